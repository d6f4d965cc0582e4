"""Time as a value that is passed in. Unit: seconds, monotonic.

Deciding code never asks for the time; it is told. `ManualClock` drives tests and the simulator.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Answers what time it is; never goes backwards."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
