"""Threads that take part in a move of many pieces, beside the one that asks for it.

Owns the threads; they start when they are first wanted. Always: when `share` returns or raises, every piece that was
begun has ended, and no other begins. Any number of threads may share at once.

One queue asks them and another answers: futures cost three times as much, which was 0.1 ms of CPU for each batch.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

Piece = TypeVar("Piece")
Part = Callable[[], None]  # what a thread does of a move; it notes its own end, and raises nothing


class IoThreads:
    """Up to `threads` of them."""

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._asked: SimpleQueue[Part | None] = SimpleQueue()  # None ends a thread
        self._lock = threading.Lock()  # nobody is asked who has been told to end
        self._closed = False
        self._forgotten = weakref.finalize(self, _dismiss, self._asked, threads)  # if nobody closes this
        self._forgotten.atexit = False  # who closes a store as the interpreter ends still shares

    def share(self, work: Callable[[Piece], None], pieces: Iterable[Piece], threads: int) -> None:
        """Call `work` for every piece, on so many threads. The caller is one of them: it would only wait, and waking
        others costs. Raises what `work` raised."""
        left = deque(pieces)
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        helpers = self._ask(partial(_help, work, left, ended), min(threads, len(left)) - 1)
        try:
            _take(work, left)
        finally:
            errors = [ended.get() for _ in range(helpers)]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Whoever shares goes on alone from now on. Idempotent."""
        with self._lock:
            if not self._closed:
                _dismiss(self._asked, len(self._threads))
            self._closed = True
        self._forgotten.detach()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _ask(self, part: Part, helpers: int) -> int:
        """How many of these helpers will answer."""
        if helpers < 1:
            return 0
        with self._lock:
            if not self._closed:
                self._start()
            if self._closed or not self._threads:
                return 0
            for _ in range(helpers):
                self._asked.put(part)
        return helpers

    def _start(self) -> None:
        while len(self._threads) < self._count:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._asked,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine gives no more: those that there are do it, or the caller alone
                return
            self._threads.append(thread)


def _dismiss(asked: "SimpleQueue[Part | None]", threads: int) -> None:
    for _ in range(threads):
        asked.put(None)


def _serve(asked: "SimpleQueue[Part | None]") -> None:
    while (part := asked.get()) is not None:
        part()


def _help(work: Callable[[Piece], None], left: "deque[Piece]", ended: "SimpleQueue[BaseException | None]") -> None:
    try:
        _take(work, left)
    except BaseException as error:  # noqa: BLE001  the caller raises it
        ended.put(error)
    else:
        ended.put(None)


def _take(work: Callable[[Piece], None], left: "deque[Piece]") -> None:
    while left:
        try:
            piece = left.popleft()
        except IndexError:  # another thread was faster
            return
        work(piece)
