"""What a signal that ends the command does to its processes: it ends them first.

Owns the handlers while a simulation runs. Always: a first signal raises SystemExit, so that whoever began processes
ends them and gives back what they shared; a second one ends at once; who has the command ignore a signal (nohup) is
heeded.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
BY_SIGNAL = 128  # and its number, as a shell tells it


@contextmanager
def tidily() -> Iterator[None]:
    """Run a simulation."""
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
