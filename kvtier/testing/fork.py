"""Run a few lines in a forked child, for tests of what a fork must not do."""

import os
from collections.abc import Callable, Iterable

from kvtier.errors import ClosedError

CRASHED = 99


def in_child(body: Callable[[], int]) -> int:
    """The number that `body` returned in a forked child (0 to 98), or CRASHED if it raised.

    Whatever happens, the child ends here: it never goes on with its parent's tests.
    """
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refusals(calls: Iterable[Callable[[], object]]) -> int:
    """How many of the calls raise ClosedError."""
    refused = 0
    for call in calls:
        try:
            call()
        except ClosedError:
            refused += 1
    return refused
