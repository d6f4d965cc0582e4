"""The picture of `manager.py`: what a block costs over the size of the pool, both sides.

Owns no state. Always: every axis of cost begins at zero, no display is needed, and the file appears whole or not at
all. Units: blocks, microseconds.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manager_sides import OURS, THEIRS

from kvtier.cli.demo.plot import COMPUTED, DOTS_PER_INCH, FAINT, INK, STORE, STYLE

COLOURS = {OURS: STORE, THEIRS: COMPUTED}
TITLES = {
    "get, a hit": "get_computed_blocks, a hit",
    "allocate, evicting": "allocate_slots, new blocks, each evicts",
    "free": "free",
    "decode": "allocate_slots, one decoded token",
}


def draw(record: Mapping[str, Any], file: Path) -> str:
    """Write a PNG to `file`; returns the sentence that says where it is, or why there is none."""
    if not record["pools"]:
        return "no plot: it shows pools of several sizes, and none was measured; leave --pools out, or name some"
    try:
        figure = figure_of(record)
    except ImportError:
        return "no plot: matplotlib is not installed; draw a run kept with --json where it is: --from FILE.json --plot"
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        figure.savefig(aside, dpi=DOTS_PER_INCH, format="png")
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        return f"no plot: {file}: {error.strerror}"
    return f"plot: {file}"


def figure_of(record: Mapping[str, Any]) -> Any:
    """A matplotlib Figure of four panels. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
            _draw_panel(axes, [row for row in record["pools"] if row["name"] == name], title)
        versions = f"Python {record['machine']['python']}"
        versions += f", vLLM {record['vllm']}" if record["vllm"] else ""
        figure.suptitle(f"Cost over the size of the pool: {record['machine']['cpu']}, {versions}", fontsize=12)
    return figure


def _draw_panel(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    pools = [int(blocks) for blocks in rows[0]["us"]]
    for row in rows:
        us, colour = list(row["us"].values()), COLOURS[row["side"]]
        others = [list(other["us"].values()) for other in rows if other is not row]
        axes.plot(pools, us, "o-", color=colour, linewidth=2, markersize=5)
        for at, (blocks, value) in enumerate(zip(pools, us, strict=True)):
            below = any(value < other[at] for other in others)
            axes.annotate(f"{value:.2f}", (blocks, value), (0, -15 if below else 7), color=colour, **_CENTRED)
        axes.annotate(row["side"], (pools[-1], us[-1]), (22, 0), color=colour, weight="bold", **_BESIDE)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(pools))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, max(max(row["us"].values()) for row in rows) * 1.2)
    axes.margins(x=0.16)
    axes.set_xlabel("blocks in the pool")
    axes.set_ylabel(f"CPU microseconds per {rows[0]['unit']}")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


_CENTRED = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
_BESIDE = {"textcoords": "offset points", "va": "center"}
