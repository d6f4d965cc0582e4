"""What a signal that ends the command does first: its processes end, and what it made on the disk goes.

Owns the handlers meanwhile. Always: a first signal raises SystemExit, so that whoever began processes or made folders
ends and removes them; a second one ends at once; who has the command ignore a signal (nohup) is heeded.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
BY_SIGNAL = 128  # and its number, as a shell tells it


@contextmanager
def tidily() -> Iterator[None]:
    """Run what has something to clear up. In a thread, where no signal comes, it is left as it is."""
    if current_thread() is not main_thread():
        yield
        return
    taken = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        if signal.getsignal(other) is _stop:
            signal.signal(other, signal.SIG_DFL)
    raise SystemExit(BY_SIGNAL + number)
