"""What several tiers found, as a panel. Owns no state. Units: percent of input tokens."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from kvtier.cli.figures import FAINT
from kvtier.cli.simulate.plot import BOUND, COLOURS, legend_below
from kvtier.sim.report import ReplayReport


def draw(axes: Any, reports: Sequence[ReplayReport]) -> None:
    """A bar for each policy: which tier its hits came from; a dash where Belady's bound lies."""
    names = [tier.name for tier in reports[0].tiers]
    places = range(len(reports))
    ends = [0.0] * len(reports)
    for name, colour in zip(names, cycle(COLOURS), strict=False):
        rates = [100 * tier.prefix_hit_rate for report in reports for tier in report.tiers if tier.name == name]
        bars = axes.bar(places, rates, 0.5, ends, color=colour, label=name)
        labels = [f"{rate:.1f}" if rate >= 1.5 else "" for rate in rates]
        axes.bar_label(bars, labels, label_type="center", color="white", weight="bold")
        ends = [end + rate for end, rate in zip(ends, rates, strict=True)]
    bounds = [report.optimum_hit_rate for report in reports]
    if None not in bounds:
        tops = [100 * bound for bound in bounds if bound is not None]
        axes.hlines(tops, [p - 0.35 for p in places], [p + 0.35 for p in places], color=BOUND, linestyle="--")
        axes.annotate("belady", (0.35, tops[0]), (0, 4), textcoords="offset points", ha="right", color=BOUND)
    axes.set_xlim(-0.6, max(1.6, len(reports) - 0.4))
    axes.set_xticks([*places], [report.policy for report in reports])
    axes.set_ylabel("prefix tokens found, % of input")
    hinted = f"\nwith hints: {reports[0].hinted}" if reports[0].hinted else ""
    axes.set_title(f"Hits by tier{hinted}", loc="left", fontsize=11)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.15)
    legend_below(axes, len(names))
