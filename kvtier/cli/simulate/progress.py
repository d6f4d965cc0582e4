"""How far a long simulation is, on standard error, for people only.

Always: nothing is shown where nobody looks (standard error is no terminal), nor of what is done within a moment; what
was shown is gone at the end. Units: requests.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LONG_REQUESTS = 2000  # in all runs together: below that a bar would only flicker


@contextmanager
def shown(requests: int) -> Iterator[Callable[[int], None]]:
    """Yields what is to be told of requests as they are served, `requests` in all."""
    console = Console(file=sys.stderr)
    if not console.is_terminal or requests < LONG_REQUESTS:
        yield _ignore
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=requests)
        yield lambda served: progress.advance(task, served)


def _ignore(served: int) -> None:
    pass
