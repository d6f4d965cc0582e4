"""Keeps reading below a rate, so that a writer has the rest of the device.

Owns: when the next byte may be read. Units: bytes, seconds.
"""

import time
from collections.abc import Callable

from kvtier.config.units import Rejected, parse_bytes
from kvtier.errors import UsageError

_PIECES_PER_S = 4  # a read of a quarter of a second, then a pause: no long bursts
_PIECE_BYTES_MIN = 1 << 20


class Pace:
    """`bytes_per_s`: None for as fast as it goes."""

    def __init__(
        self,
        bytes_per_s: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def batch_bytes(self, most: int) -> int:
        """How much to read at once."""
        if self._bytes_per_s is None:
            return most
        return min(most, max(_PIECE_BYTES_MIN, self._bytes_per_s // _PIECES_PER_S))

    def spend(self, read_bytes: int) -> None:
        """So much was read: wait until more may be. Time lost to a slow device is not made up for."""
        if self._bytes_per_s is None:
            return
        now = self._clock()
        self._due = max(self._due, now - 1 / _PIECES_PER_S) + read_bytes / self._bytes_per_s
        if self._due > now:
            self._sleep(self._due - now)


def parse_rate(text: str) -> int:
    """``200MiB/s`` or ``200MiB`` as bytes a second. Raises UsageError."""
    try:
        bytes_per_s = parse_bytes(text.removesuffix("/s"))
    except Rejected as error:
        raise UsageError(f"--rate: {error}") from None
    if bytes_per_s < 1:
        raise UsageError(f"--rate {text}: nothing would ever be read; use for instance 200MiB/s")
    return bytes_per_s
