"""Results of `kvtier simulate` as a picture: what was found on the left, how far apart uses are on the right.

Owns no state. Always: no display is needed, and the file appears whole or not at all. matplotlib is loaded when a plot
is drawn. Units: blocks.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.figures import DOTS_PER_INCH, STYLE
from kvtier.errors import UsageError
from kvtier.sim.reuse import reuse_distances
from kvtier.sim.trace import Trace

# Okabe and Ito's colours, which differ for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BOUND = "#6E6E6E"
BINS_PER_DECADE = 8

Draw = Callable[[Any], None]


def draw(file: Path, trace: Trace, draw_result: Draw, sizes: Sequence[int]) -> None:
    """Write a PNG. draw_result: draws the left panel. sizes: capacities to mark in the right one.

    Raises UsageError if the file cannot be written.
    """
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        figure_of(trace, draw_result, sizes).savefig(aside, dpi=DOTS_PER_INCH, format="png")
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"--plot {file}: {error.strerror}; name a file that can be written") from error


def figure_of(trace: Trace, draw_result: Draw, sizes: Sequence[int]) -> Any:
    """A matplotlib Figure of two panels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot: that would look for a display

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
        draw_result(left)
        _draw_distances(right, trace, sizes)
        figure.suptitle(f"kvtier simulate: {trace.name}, {len(trace.requests)} requests", fontsize=12)
    return figure


def legend_below(axes: Any, columns: int) -> None:
    """Where it hides no line."""
    axes.legend(frameon=False, ncols=columns, loc="upper left", bbox_to_anchor=(-0.02, -0.13), handlelength=1.6)


def short(number: float) -> str:
    """``512``, ``16k``, ``1.5M``."""
    if number < 10_000:
        return f"{number:.0f}"
    return f"{number / 1000:.0f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def _draw_distances(axes: Any, trace: Trace, sizes: Sequence[int]) -> None:
    """Accesses by how many other blocks were used since the block's last use; the capacities as lines."""
    from matplotlib.ticker import FuncFormatter

    distances = reuse_distances(trace)
    last = len(str(trace.unique_blocks)) * BINS_PER_DECADE
    edges = [10 ** (step / BINS_PER_DECADE) for step in range(last + 1)]
    values = [max(1, distance) for distance in distances]
    axes.hist(values, edges, weights=[*distances.values()], color=COLOURS[5], edgecolor="white", linewidth=0.5)
    for size in sizes:
        axes.axvline(size, color=BOUND, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "0 or 1" if value == 1 else short(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel("other blocks used in between" + " (dotted: the capacities)" * bool(sizes))
    axes.set_ylabel("accesses")
    share = 100 * sum(distances.values()) / max(1, trace.accesses)
    axes.set_title(
        f"Reuse distance ({share:.0f} % of {short(trace.accesses)} accesses are reuses)", loc="left", fontsize=11
    )
