"""What is printed for people: tables that keep all their figures, however narrow the terminal, and plain text.

Owns no state. Always: columns that may not fold are printed whole; a terminal that is too narrow wraps the lines.
"""

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH_MAX = 10_000  # characters


def plain(text: str) -> str:
    """Text that somebody else made, so that it stays in its line and steers no terminal: `\\x1b` for an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def new_table(title: str | None = None) -> Table:
    """An empty table, as all verbs print them."""
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def print_whole(console: Console, table: Table) -> None:
    """Print it as wide as its columns with `no_wrap` need, where rich would cut them, and an empty line after it."""
    for column in table.columns:
        if column.no_wrap:
            texts = [str(text) for text in (column.header, *column.cells)]
            column.min_width = max(cell_len(line) for text in texts for line in text.split("\n"))
    needed = Measurement.get(console, console.options.update(width=WIDTH_MAX), table).minimum
    width = console.width
    console.width = max(width, needed)
    try:
        console.print(table)
        console.print()
    finally:
        console.width = width
