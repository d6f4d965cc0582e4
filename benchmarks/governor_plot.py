"""The picture of `governor_sweep.py`: time to first token over the speed of the disk, for the three ways.

Owns no state. Always: the axis of time begins at zero, no display is needed. Units: bytes per second, seconds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.demo.plot import COMPUTED, DOTS_PER_INCH, FAINT, GPU, INK, STORE, STYLE

MEBI = 1 << 20


def draw(record: Mapping[str, Any], file: Path) -> str:
    """Write a PNG to `file`; returns the sentence that says where it is, or why there is none."""
    try:
        figure = figure_of(record)
    except ImportError:
        return "no plot: matplotlib is not installed"
    figure.savefig(file, dpi=DOTS_PER_INCH, format="png")
    return f"plot: {file}"


def figure_of(record: Mapping[str, Any]) -> Any:
    """A matplotlib Figure. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    points = record["points"]
    speeds = [one["bytes_per_s"] or 0 for one in points]
    own = 4 * max(speeds)  # as fast as it is: drawn beyond the others
    places = [speed or own for speed in speeds]
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        axes = figure.subplots()
        computed_s = record["computed_s"]
        axes.axhline(computed_s, color=COMPUTED, linewidth=2, label="computed, without kvtier")
        axes.plot(
            places, [one["always_s"] for one in points], "s--", color=STORE, linewidth=1.5, label="governor off: loads"
        )
        axes.plot(places, [one["governed_s"] for one in points], "o-", color=GPU, linewidth=2.5, label="governed")
        for place, one in zip(places, points, strict=True):
            above = one["governed_s"] < 0.3 * computed_s
            text = f"{one['why']}\n{one['governed_tokens']:.0f}"
            axes.annotate(
                text, (place, one["governed_s"]), (0, 10 if above else -28), fontsize=8, color=INK, **_CENTRED
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([_name(one["bytes_per_s"]) for one in points], fontsize=9)
        axes.set_ylim(0, 1.15 * max(computed_s, *(one["always_s"] for one in points)))
        axes.margins(x=0.07)
        axes.set_xlabel("speed of the disk, bytes per second")
        axes.set_ylabel("wall seconds to the first token")
        axes.set_title(
            f"{record['prefix_tokens']} prefix tokens on disk only; below the points: why, and tokens loaded",
            loc="left",
            color=INK,
        )
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(0.02, 0.3), frameon=False)
    return figure


def _name(speed: int | None) -> str:
    if speed is None:
        return "unthrottled"
    return f"{speed // MEBI} Mi" if speed >= MEBI else f"{speed // 1024} Ki"


_CENTRED = {"textcoords": "offset points", "ha": "center"}
