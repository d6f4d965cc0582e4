"""`OneShot`: one value from the engine's thread to a caller, who may be interrupted at any point of waiting.

Owns: a lock that is taken from the start and that only the sender lets go of. Always: the sender never waits. A
`Future` cannot promise that: an interrupt in the middle of its waiting leaves its condition locked, and whoever would
set its result waits for ever.
"""

import threading
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class OneShot(Generic[T]):
    """Sent once, received by one thread."""

    def __init__(self) -> None:
        self._unsent = threading.Lock()
        self._unsent.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None

    def send(self, value: T) -> None:
        self._value = value
        self._unsent.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._unsent.release()

    def receive(self, timeout_s: float | None = None) -> T:
        """The value, or the error raised. Raises TimeoutError if neither comes in time."""
        if not self._unsent.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return cast(T, self._value)
