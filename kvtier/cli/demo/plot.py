"""The demo's result as a picture: time to first token over the prefix's length, and where each prompt's KV came from.

Owns no state. Always: no display is needed, the file appears whole or not at all, and the demo goes on without it.
matplotlib is loaded when a plot is drawn. Units: tokens, CPU seconds.
"""

import os
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvtier.cli.demo.summary import Row, Summary, machine
from kvtier.cli.demo.sweep import Point
from kvtier.cli.demo.weights import INSTALL_EXTRA, NAME
from kvtier.cli.figures import DOTS_PER_INCH, FAINT, INK, STYLE

# Okabe and Ito's colours, which differ for colour-blind readers too; the same ones mean the same in both panels.
COMPUTED, STORE, HOST, GPU, FLOOR = "#D55E00", "#0072B2", "#56B4E9", "#009E73", "#6E6E6E"
NARROW = 0.08  # of the longest prompt: a part below that has no room for its number
SECONDS_TICKS = [base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5)]


def draw(summary: Summary, file: Path) -> str:
    """Write a PNG to `file`; returns the sentence that says where it is, or why there is none."""
    if find_spec("matplotlib") is None:
        return f"no plot: matplotlib is not installed. {INSTALL_EXTRA}"
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        figure_of(summary).savefig(aside, dpi=DOTS_PER_INCH, format="png")
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        return f"no plot: {file}: {error.strerror}"
    return f"plot: {file}"


def figure_of(summary: Summary) -> Any:
    """A matplotlib Figure of two panels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot: that would look for a display

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_times(left, summary.points, summary.store_tier)
        said = summary.restart.flushed.line.replace(": ", ":\n", 1)
        proof = left.text(0, -0.155, said, transform=left.transAxes, va="top", fontsize=9)
        proof.set_in_layout(False)  # else it, being long, would decide how wide the panel is
        _draw_hits(right, summary.rows, summary.store_tier)
        facts = machine()
        threads = "one thread" if summary.threads == 1 else f"{summary.threads} threads"
        figure.suptitle(
            f"kvtier demo: {NAME}, float32, {threads} of {facts['cpu']}, torch {facts['torch']}", fontsize=12
        )
    return figure


# ---------------------------------------------------------------- times


def _draw_times(axes: Any, points: tuple[Point, ...], store_tier: str) -> None:
    """Three lines over the prefix's length, and how many times faster restoring is at each."""
    lengths = [point.prefix_tokens for point in points]
    times = [point.medians() for point in points]
    lines = (
        ("cold", "cold: everything computed", COMPUTED, "o-", 8),
        ("restored", f"restored from {store_tier}, new process", STORE, "o-", 8),
        ("floor", "floor: KV never left RAM", FLOOR, "s--", -14),
    )
    for name, label, colour, marks, above in lines:
        seconds = [each[name].cpu_s for each in times]
        axes.plot(lengths, seconds, marks, color=colour, linewidth=2, markersize=5, label=label)
        for length, value in zip(lengths, seconds, strict=True):
            axes.annotate(_short(value), (length, value), (0, above), color=colour, **_CENTRED)
    for length, each in zip(lengths, times, strict=True):
        cold, restored = each["cold"].cpu_s, each["restored"].cpu_s
        axes.plot([length, length], [restored, cold], ":", color="#999999", linewidth=1, zorder=0)
        middle = (cold * restored) ** 0.5
        axes.text(
            length, middle, f"{cold / restored:.0f}x faster", ha="center", va="center", weight="bold", bbox=_PATCH
        )
    _scale_times(axes, lengths)
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel("time to first token, CPU seconds")
    axes.set_title("Time to first token", loc="left", fontsize=11)
    axes.legend(framealpha=1, edgecolor="none", loc="upper left")


def _scale_times(axes: Any, lengths: list[int]) -> None:
    """Both axes logarithmic, or restored and floor would be one line at the bottom."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator(SECONDS_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(0.14, 0.2)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


_PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_CENTRED = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "bbox": _PATCH}


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}"


# ---------------------------------------------------------------- hits


def _draw_hits(axes: Any, rows: tuple[Row, ...], store_tier: str) -> None:
    """One bar per question: the tokens of its prompt by the tier they came from."""
    tiers = [tier for tier in rows[0].answer.tokens_by_tier if tier != store_tier]
    colours = dict(zip_longest(tiers, (GPU, HOST)[: len(tiers)], fillvalue=FLOOR))
    colours |= {store_tier: STORE, "computed": COMPUTED}
    widest = max(row.prompt_tokens for row in rows)
    ends = [0] * len(rows)
    for name, colour in colours.items():
        tokens = [_tokens(row, name) for row in rows]
        bars = axes.barh(range(len(rows)), tokens, 0.42, ends, color=colour, label=name)
        labels = [str(count) if count >= NARROW * widest else "" for count in tokens]
        axes.bar_label(bars, labels, label_type="center", color=INK if colour == HOST else "white", weight="bold")
        ends = [end + count for end, count in zip(ends, tokens, strict=True)]
    for index, row in enumerate(rows):
        axes.text(0, index - 0.3, f"{index + 1}  {row.question}", va="bottom", fontsize=9)
        narrow = [name for name in colours if 0 < _tokens(row, name) < NARROW * widest]
        for line, name in enumerate(narrow):
            y = index + 0.2 * (line - (len(narrow) - 1) / 2)
            said = f"{_tokens(row, name)} {name}"
            axes.text(1.015 * ends[index], y, said, va="center", color=colours[name], fontsize=9)
    axes.set_xlim(0, 1.2 * widest)
    axes.set_ylim(len(rows) - 0.6, -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("tokens of the prompt")
    axes.set_title("Where the new process got each prompt's KV", loc="left", fontsize=11)
    axes.legend(frameon=False, ncols=len(colours), loc="upper left", bbox_to_anchor=(-0.02, -0.15), handlelength=1)


def _tokens(row: Row, origin: str) -> int:
    """origin: a tier's name, or `computed`."""
    if origin == "computed":
        return row.prompt_tokens - row.answer.tokens_restored
    return row.answer.tokens_by_tier.get(origin, 0)
