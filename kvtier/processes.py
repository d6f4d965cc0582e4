"""A pool of processes for what takes minutes: they end with the process that began them, whatever that one dies of.

Owns the processes. Always: whoever leaves the pool by an error, or before all is done, finds them ended; an interrupt,
which the terminal sends to all of them, ends each without a word.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any


def _nothing() -> None:
    """How a process begins that needs nothing."""


@contextmanager
def pool(processes: int, begin: Callable[..., None] = _nothing, *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """So many processes, each of which calls begin(*arguments) first; both can be pickled."""
    context = get_context("spawn")  # a fork would copy whatever threads this process has in the middle of something
    others = {*active_children()}
    with ProcessPoolExecutor(processes, context, _begin, (begin, arguments)) as executor:
        try:
            yield executor
        except BaseException:
            for process in {*active_children()} - others:
                process.terminate()  # what they are at may take minutes, and nobody wants it any more
            executor.shutdown(cancel_futures=True)
            raise


def _begin(begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, name="kvtier-parent", daemon=True).start()
    begin(*arguments)


def _end_with_parent() -> None:
    """Who computes does not look whether anybody waits for it, and a killed parent tells nobody."""
    if parent := parent_process():
        parent.join()
        os._exit(1)
