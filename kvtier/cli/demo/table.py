"""The demo's result for people: the answers, tables of the requests and of the lengths, and what the figures mean.

Owns no state. Units: tokens, CPU seconds.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.demo.summary import Row, Summary, machine
from kvtier.cli.demo.sweep import Point
from kvtier.cli.paper import new_table, print_whole


def show(console: Console, summary: Summary) -> None:
    """Print everything to the console."""
    for row in summary.rows:
        console.print(Text.assemble((row.question, "bold"), "  ", row.said), soft_wrap=True)
    print_whole(console, table_of(summary.rows))
    print_whole(console, lengths_of(summary.points, summary.store_tier))
    for line in (*summary.restart.lines, "", *explanation(summary)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def table_of(rows: tuple[Row, ...]) -> Table:
    """One line per request; the tokens of its prompt by the tier they came from, new ones computed."""
    tiers = list(rows[0].answer.tokens_by_tier)
    table = _table(
        "Second process: prompt tokens by origin, CPU seconds to the first token",
        ("#", "prompt", *tiers, "new", "cold", "restored", "floor", "speed-up", "tokens\nidentical"),
    )
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            str(row.prompt_tokens),
            *(str(row.answer.tokens_by_tier.get(tier, 0)) for tier in tiers),
            str(row.prompt_tokens - row.answer.tokens_restored),
            f"{row.cold.cpu_s:.2f}",
            f"{row.answer.restored.cpu_s:.2f}",
            f"{row.answer.floor.cpu_s:.2f}",
            f"{row.speedup:.1f}x",
            "yes" if row.tokens_identical else "NO",
        )
    return table


def lengths_of(points: tuple[Point, ...], store_tier: str) -> Table:
    """One line per length of the prefix."""
    table = _table(
        f"By prefix length, all of it from {store_tier}: medians of {len(points[0].answers)}, CPU seconds",
        (
            "prefix",
            "cold",
            "restored",
            "= load",
            "+ forward",
            "floor",
            "over\nfloor",
            "speed-up",
            "token\nidentical",
        ),
    )
    for point in points:
        times = point.medians()
        cold, restored, floor = times["cold"], times["restored"], times["floor"]
        table.add_row(
            str(point.prefix_tokens),
            f"{cold.cpu_s:.2f}",
            f"{restored.cpu_s:.3f}",
            f"{times['load'].cpu_s:.3f}",
            f"{times['forward'].cpu_s:.3f}",
            f"{floor.cpu_s:.3f}",
            f"{restored.cpu_s / floor.cpu_s:.2f}",
            f"{cold.cpu_s / restored.cpu_s:.1f}x",
            "yes" if point.tokens_identical else "NO",
        )
    return table


def explanation(summary: Summary) -> list[str]:
    """The medians in words, where the bytes came from, and what the figures were measured on."""
    times = summary.medians()
    cold, restored, floor = times["cold"], times["restored"], times["floor"]
    facts = machine()
    moved = ", ".join(f"{count} to {tier}" for tier, count in summary.written_blocks.items() if count)
    return [
        f"Time to first token of the questions, median CPU seconds (wall): cold {cold.cpu_s:.2f} ({cold.wall_s:.2f}), "
        f"restored {restored.cpu_s:.2f} ({restored.wall_s:.2f}): a speed-up of {cold.cpu_s / restored.cpu_s:.1f}. "
        f"Question 1, wholly from {summary.store_tier}: {summary.rows[0].speedup:.1f}.",
        f"The floor, the same forward on KV that was in RAM all the time, takes {floor.cpu_s:.2f} "
        f"({floor.wall_s:.2f}); with restoring it takes {restored.cpu_s / floor.cpu_s:.2f} times that.",
        f"Blocks that moved down while the first process answered: {moved or 'none'}. {_source(summary)}",
        f"Measured on {facts['cpu']}, {summary.threads} of {facts['cores']} cores, torch {facts['torch']}, "
        f"transformers {facts['transformers']}.",
    ]


def _source(summary: Summary) -> str:
    stored_tokens = summary.hit_tokens_by_tier.get(summary.store_tier, 0)
    device_bytes = sum(row.answer.device_bytes for row in summary.rows)
    said = f"The second process restored {stored_tokens} tokens from {summary.store_tier}"
    if device_bytes:
        return f"{said}; {device_bytes / 1e6:.0f} MB were read from the device."
    return f"{said}, all through the page cache: this file system does not bypass it (O_DIRECT)."


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = new_table(title)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
