"""`Throttle`: makes a running persistent tier as slow as a disk of so many bytes per second.

Patches the tier object, so that it also works on one that an engine has opened already. Always: all threads share the
one speed, a batch is slowed down before it is carried out, and `lift` lets everything go on at once.
Units: bytes, seconds.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from kvtier.tiers.base import SupportsGroups, Tier

Wait = Callable[[float], object]


class Throttle:
    """Stands before `read` and `write` of a tier. `wait`: how to let time pass; for tests."""

    def __init__(
        self, tier: Tier, bytes_per_s: float, clock: Callable[[], float] = time.monotonic, wait: Wait | None = None
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a speed of {bytes_per_s} bytes/s would never end")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lifted = threading.Event()
        self._wait = wait or self._lifted.wait
        self._lock = threading.Lock()
        self._free_at_s = clock()  # when the imagined disk has done what it was asked for
        setattr(tier, "read", self._slowed(tier.read, lambda items: items))  # noqa: B010  on this object alone
        setattr(tier, "write", self._slowed(tier.write, lambda batch: batch.items))  # noqa: B010
        if isinstance(tier, SupportsGroups):
            together = self._slowed(tier.write_together, lambda batches: [i for batch in batches for i in batch.items])
            setattr(tier, "write_together", together)  # noqa: B010

    def lift(self) -> None:
        """As fast as it is from now on, for those that wait as well."""
        self._lifted.set()

    def _slowed(self, call: Callable[[Any], Any], items_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def slowed(argument: Any) -> Any:
            self._take(sum(item.length_bytes for item in items_of(argument)))
            return call(argument)

        return slowed

    def _take(self, size_bytes: int) -> None:
        if self._lifted.is_set():
            return
        with self._lock:
            now_s = self._clock()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
            left_s = self._free_at_s - now_s
        self._wait(left_s)
