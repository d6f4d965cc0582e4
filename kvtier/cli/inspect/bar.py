"""A bar on the terminal while blocks are read or written. Owns the bar. Units: bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.cli.inspect import show

Advance = Callable[[int, int, int], None]  # blocks done, blocks in all (about), bytes done


@contextmanager
def progress_bar(quiet: bool, reading: str) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal, which is gone when all is done. reading: what is being done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("reading the index", total=None, done="")

        def advance(blocks: int, blocks_about: int, done_bytes: int) -> None:
            total = max(blocks, blocks_about)
            done = f"{blocks:,} of {total:,} blocks, {show.size(done_bytes)}"
            bar.update(task, description=reading, completed=blocks, total=total, done=done)

        yield advance
