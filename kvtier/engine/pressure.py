"""A disk that others fill: the store gives way, whole extents at a time, until `min_free` is free again.

Owns: when each persistent tier was last asked. A tier learns what its disk has left with every batch; an idle one is
asked each second, by a batch of nothing. While it holds too much nothing is stored there (`Demotions`).
Always: one extent at a time leaves, the coldest of which every block may go; what somebody holds, or a running flush
has just saved, stays.

Units: seconds of the engine's clock, bytes.
"""

from kvtier.cache.residency import Residency
from kvtier.cache.staying import Protected
from kvtier.engine.demotion import Demotions
from kvtier.engine.flight import Flight
from kvtier.types import TransferBatch

ASK_EVERY_S = 1.0


class DiskPressure:
    """Plans the evictions that give disk space back."""

    def __init__(self, residency: Residency, flight: Flight, demotions: Demotions) -> None:
        self._residency = residency
        self._flight = flight
        self._demotions = demotions
        self._ask_at_s: dict[int, float] = {}  # by tier; not before the first second is over

    def batches(self, now_s: float) -> list[TransferBatch]:
        """Evictions where a tier holds too much; a question where it is time for one."""
        made = []
        for tier in self._residency.orders:
            level = self._residency.levels[tier]
            assert level.room is not None
            ask_at_s = self._ask_at_s.setdefault(tier, now_s + ASK_EVERY_S)
            if self._flight.writes(tier):
                self._ask_at_s[tier] = now_s + ASK_EVERY_S  # its acknowledgement will tell
                continue
            if now_s >= level.blocked_until_s and level.room.excess_bytes() > 0 and (made_way := self._give_way(tier)):
                made.append(made_way)
            elif now_s >= ask_at_s:
                made.append(self._flight.depart_question(tier))
                self._ask_at_s[tier] = now_s + ASK_EVERY_S
        return made

    def wake_at_s(self) -> float | None:
        """When the next question is due."""
        return min(self._ask_at_s.values(), default=None)

    def _give_way(self, tier: int) -> TransferBatch | None:
        staying = Protected(self._residency.directory, tier, self._demotions.flushes)
        victims = self._demotions.victims.whole_extent(tier, staying)
        if not victims:
            return None
        self._residency.counters.add_tier(tier, "gave_way", len(victims))
        return self._flight.depart((tier, tier), (), [self._residency.evict(handle, tier) for handle in victims])
