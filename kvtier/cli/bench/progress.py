"""How far a bench of several parts is, on standard error, for people only.

Always: nothing is shown where nobody looks (standard error is no terminal); what was shown is gone at the end; nothing
is drawn between two steps, for a thread that draws would take its time from what is measured. Units: steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Step = Callable[[], object]
Begin = Callable[[str, int], Step]  # what is done from now on, in how many steps -> to be called after each


@contextmanager
def shown() -> Iterator[Begin]:
    """Yields what is to be told of each part as it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False) as progress:

        def begin(what: str, steps: int) -> Step:
            for task in progress.task_ids:
                progress.remove_task(task)
            task = progress.add_task(what, total=steps)
            progress.refresh()

            def step() -> None:
                progress.advance(task)
                progress.refresh()

            return step

        yield begin


def still() -> None:
    """A step that is shown to nobody."""


def silent(what: str, steps: int) -> Step:
    """A part that is shown to nobody."""
    return still
