"""Hints: blocks brought from a disk into host memory before anybody reserves them.

A prefetch only uses slots that need no I/O to get, up to a part (`budget`) of the tier below the top, and what it
brought is held until a reservation uses it or its time is over: never evicted before it was of use (vllm#49902).
Units: handles, slots, seconds of the engine's clock.
"""

from math import inf

from kvtier.cache.coordinator import Prefix
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.engine.promotion import Promotions

PREFETCH_TTL_S = 30.0


class Prefetch:
    """What was brought up ahead and not yet used."""

    def __init__(self, residency: Residency, promotions: Promotions, budget: float) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = promotions
        self._expires: dict[int, float] = {}  # handle, held in tier 1 -> time; in order of time
        levels = residency.levels
        memory_below = len(levels) > 2 and not levels[1].persistent
        self._blocks_max = int(budget * levels[1].slots.slots_total) if memory_below else 0

    def hint(self, prefix: Prefix, now_s: float) -> None:
        """Start to bring the prefix's blocks that lie only on disk into the memory tier below the top."""
        counters = self._residency.counters
        for handle in (h for handles in prefix.handles for h in handles):
            source = self._directory.top(handle)
            if source is None or source < 2 or self._directory.state(handle, 1) is not State.GONE:
                continue
            if len(self._expires) >= self._blocks_max or not self._promotions.stage(handle, source, 1, inf):
                counters.add("prefetch_refused")
                continue
            counters.add("prefetched_blocks")
            self._directory.hold(handle, 1)
            self._expires[handle] = now_s + PREFETCH_TTL_S

    def used(self, handles: list[int]) -> None:
        """A reservation has these blocks now."""
        for handle in handles:
            if self._expires.pop(handle, None) is not None:
                self._residency.unhold(handle, 1)

    def expire(self, now_s: float) -> None:
        self.used([handle for handle, at_s in self._expires.items() if at_s <= now_s])

    def next_expiry_s(self) -> float | None:
        return next(iter(self._expires.values()), None)
