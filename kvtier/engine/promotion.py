"""Loads: blocks on their way up, in deadline order.

A promotion fills a copy in the top tier that `Core` has placed. From a disk it goes by way of the tier below the
top when that has a slot to give without I/O (the block stays there, and the next hit finds it in RAM), and
straight up otherwise. Always: a promotion holds its top copy from start to end, and each hop holds its source
and its target.

Units: handles, tier indexes, seconds of the engine's clock.
"""

import heapq

from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.engine.flight import Flight, Lane
from kvtier.types import TransferBatch

LANE_BATCHES_MAX = 4  # more only queue at the device, where a later but more urgent load can't overtake them


class Promotions:
    """The queue of hops, and the blocks whose top copy waits for one."""

    def __init__(self, residency: Residency, flight: Flight) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._queues: dict[Lane, list[tuple[float, int, int]]] = {}  # heaps of (deadline, order, handle)
        self._order = 0
        self._wanted: dict[int, tuple[float, int]] = {}  # handle -> deadline, tier that the current hop enters

    def start(self, handle: int, deadline_s: float) -> bool:
        """Bring a block up to its placed top copy. False, and nothing done, if no tier below can give it."""
        source = self._source(handle)
        if source is None:
            return False
        by_way = self._by_way_of_memory(handle, source, deadline_s)
        if not by_way:
            if self._residency.levels[source].persistent and not self._residency.levels[0].host_addressable:
                return False
            self._hop(handle, (source, 0), deadline_s)
        self._directory.hold(handle, 0)
        self._wanted[handle] = (deadline_s, 1 if by_way else 0)
        return True

    def stage(self, handle: int, source: int, target: int, deadline_s: float) -> bool:
        """Bring a block into a memory tier below the top, if that has a slot to give. No top copy waits for it."""
        slots = self._residency.take(target, 1, drop_dirty=False)
        if slots is None:
            return False
        self._residency.place(handle, target, slots[0])
        self._directory.hold(handle, target)
        self._hop(handle, (source, target), deadline_s)
        return True

    def urge(self, handle: int, deadline_s: float) -> None:
        """Somebody with an earlier deadline joined a promotion that still waits for its next hop."""
        if handle in self._wanted:
            earlier_s, tier = self._wanted[handle]
            self._wanted[handle] = (min(earlier_s, deadline_s), tier)

    def arrived(self, handle: int, tier: int) -> bool:
        """A hop into `tier` ended. True if the promotion ended with it, well or not (see the top copy's state)."""
        deadline_s, expected = self._wanted.get(handle, (0.0, None))
        if tier != expected:
            return False  # a prefetch beside it, say
        if tier and self._directory.state(handle, 0) is State.FILLING and self._directory.is_ready(handle, tier):
            self._wanted[handle] = (deadline_s, 0)
            self._hop(handle, (tier, 0), deadline_s)
            return False
        del self._wanted[handle]
        return True

    def batches(self) -> list[TransferBatch]:
        """The most urgent hops of every lane, as batches that fit its tiers."""
        made: list[TransferBatch] = []
        for lane, queue in self._queues.items():
            level = self._residency.levels[lane[0]]
            while queue and self._flight.batches[lane] < LANE_BATCHES_MAX:
                count = level.batch_blocks(self._directory.length_bytes(queue[0][2]))
                handles = [heapq.heappop(queue)[2] for _ in range(min(count, len(queue)))]
                made.append(self._flight.depart(lane, handles))
        return made

    @property
    def waiting(self) -> int:
        """Hops that are planned and not yet under way."""
        return sum(len(queue) for queue in self._queues.values())

    def _source(self, handle: int) -> int | None:
        ready = (t for t in range(1, self._directory.tiers) if self._directory.is_ready(handle, t))
        return next(ready, None)

    def _by_way_of_memory(self, handle: int, source: int, deadline_s: float) -> bool:
        """Fill the tier below the top first, when it is memory, not the source, and has a slot to give."""
        if source < 2 or self._residency.levels[1].persistent:
            return False
        if self._directory.state(handle, 1) is State.FILLING:
            return True  # somebody's prefetch brings it; the next hop follows
        return self._directory.state(handle, 1) is State.GONE and self.stage(handle, source, 1, deadline_s)

    def _hop(self, handle: int, lane: Lane, deadline_s: float) -> None:
        self._directory.hold(handle, lane[0])
        self._order += 1
        heapq.heappush(self._queues.setdefault(lane, []), (deadline_s, self._order, handle))
