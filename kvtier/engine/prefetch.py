"""Hints: blocks brought from a disk into host memory before anybody reserves them.

A hint announces one request. At most `lookahead_requests` announced ones are worked for at a time, and what they
brought takes at most a part (`budget`) of the slots of the tier below the top, and only slots that need no I/O to
get. It is held until a reservation uses it or its time is over: never evicted before it was of use (vllm#49902).
Units: handles, slots, requests, seconds of the engine's clock.
"""

from math import inf

from kvtier.cache.coordinator import Prefix
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.engine.promotion import Promotions

PREFETCH_TTL_S = 30.0


class Prefetch:
    """What was brought up ahead and not yet used."""

    def __init__(self, residency: Residency, promotions: Promotions, budget: float, lookahead_requests: int) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = promotions
        self._lookahead_requests = lookahead_requests
        self._held: dict[int, tuple[float, int]] = {}  # handle, held in tier 1 -> expiry, request; in order of time
        self._requests = 0
        levels = residency.levels
        memory_below = len(levels) > 2 and not levels[1].persistent
        self._blocks_max = int(budget * levels[1].slots.slots_total) if memory_below else 0

    def hint(self, prefix: Prefix, now_s: float) -> None:
        """Start to bring the prefix's blocks that lie only on disk into the memory tier below the top."""
        self._requests += 1
        too_far = len({request for _, request in self._held.values()}) >= self._lookahead_requests
        for handle in (h for handles in prefix.handles for h in handles):
            source = self._directory.top(handle)
            if source is None or source < 2 or self._directory.state(handle, 1) is not State.GONE:
                continue
            full = too_far or len(self._held) >= self._blocks_max
            if full or not self._promotions.stage(handle, source, 1, inf):
                self._residency.counters.add("prefetch_refused")
                continue
            self._residency.counters.add("prefetched_blocks")
            self._directory.hold(handle, 1)
            self._held[handle] = (now_s + PREFETCH_TTL_S, self._requests)

    def used(self, handles: list[int]) -> None:
        """A reservation has these blocks now."""
        for handle in handles:
            if self._held.pop(handle, None) is not None:
                self._residency.unhold(handle, 1)

    def expire(self, now_s: float) -> None:
        """Let go of what nobody came for."""
        self.used([handle for handle, (at_s, _) in self._held.items() if at_s <= now_s])

    def next_expiry_s(self) -> float | None:
        return next((at_s for at_s, _ in self._held.values()), None)
