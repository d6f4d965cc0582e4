"""What one tier found, as a panel. Owns no state. Units: percent of input tokens, blocks."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from kvtier.cli.figures import FAINT
from kvtier.cli.simulate.plot import BOUND, COLOURS, legend_below, short
from kvtier.cli.simulate.tables import unusual
from kvtier.sim.flat import BELADY, FlatRun
from kvtier.sim.trace import Trace

LEGEND_COLUMNS = 4  # more are wider than the panel, and push the other one away
TICKS_MAX = 8


def draw(axes: Any, trace: Trace, runs: Sequence[FlatRun]) -> None:
    """A line for each policy; the bound is dashed, and no line reaches above it."""
    colours = cycle(COLOURS)
    for policy in dict.fromkeys(run.job.policy for run in runs):
        of_policy = sorted((run.job.blocks, run.found.prefix_tokens) for run in runs if run.job.policy == policy)
        sizes = [blocks for blocks, _ in of_policy]
        rates = [100 * tokens / trace.input_tokens for _, tokens in of_policy]
        if policy == BELADY:
            axes.plot(sizes, rates, "s--", color=BOUND, linewidth=2, markersize=4, label="belady (the bound)")
        else:
            axes.plot(sizes, rates, "o-", color=next(colours), linewidth=2, markersize=5, label=policy)
    _scale_sizes(axes, sorted({run.job.blocks for run in runs}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("prefix tokens found, % of input")
    axes.set_title("\n".join(filter(None, ("One tier", unusual(runs[0].job)))), loc="left", fontsize=11)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    legend_below(axes, LEGEND_COLUMNS)


def _scale_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """A logarithmic axis, with the sizes themselves as ticks where they are few."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    if len(sizes) <= TICKS_MAX:
        axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
