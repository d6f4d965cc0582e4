"""Loads: blocks on their way up, in deadline order.

A promotion fills a copy in the top tier that `Core` has placed. From a disk it goes by way of the tier below the
top when that has a slot to give without I/O (the block stays there, and the next hit finds it in RAM), and
straight up otherwise. No disk reads into a device: there it stalls until a slot on its way is free, or whoever waits
for it gives up. Where blocks are read in the tier below the top (`goal` 1), they come so far only. Always: a promotion
holds its top copy from start to end, and each hop holds its source and its target; a stalled one holds its source.

Units: handles, tier indexes, seconds of the engine's clock.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from kvtier.cache.leases import Arrival
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import Move, State
from kvtier.engine.flight import Flight
from kvtier.engine.rates import Lane
from kvtier.events import Reason
from kvtier.types import LayerPart, TransferBatch

LANE_BATCHES_MAX = 4  # more only queue at the device, where a later but more urgent load can't overtake them


@dataclass(slots=True)
class Promotion:
    """A top copy that waits: how urgently, where the current hop leads from and to, and if it was planned for this.

    streamed: somebody waits only until a stream has taken the last hop. arrival: it has.
    """

    deadline_s: float
    source: int
    entering: int
    staged: bool
    streamed: bool = False
    arrival: Arrival | None = None


class Promotions:
    """The queue of hops, and the blocks whose top copy waits for one."""

    def __init__(self, residency: Residency, flight: Flight, parts: tuple[LayerPart, ...] = ()) -> None:
        """`parts`: how streamed blocks are copied into a top tier on a device."""
        self.goal = int(residency.levels[0].reads_below)  # the tier into which blocks are brought
        self._parts = () if residency.levels[0].host_addressable else parts
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._queues: dict[Lane, list[tuple[float, int, int]]] = {}  # heaps of (deadline, order, handle)
        self._queued: dict[tuple[int, int], tuple[int, int]] = {}  # (handle, target) -> order, source; else taken back
        self._waiting_bytes: Counter[Lane] = Counter()  # of what is queued
        self.halted: frozenset[int] = frozenset()  # tiers from which nothing starts now
        self._order = 0
        self._wanted: dict[int, Promotion] = {}
        self._stalled: dict[int, int] = {}  # handle -> source, of those without a slot on their way

    def start(self, handle: int, deadline_s: float, *, streamed: bool = False) -> bool:
        """Bring a block up to its placed top copy, or where it is read. False, and nothing done, if nothing can."""
        source = self._source(handle)
        if source is None:
            return False
        staged, entering = self._by_way_of_memory(handle, source, deadline_s), 1
        if staged is None and not self.goal and self._reaches_top(source):
            self._hop(handle, (source, 0), deadline_s)
            entering = 0
        elif staged is None and source > 1 and not self._residency.levels[1].persistent:
            self._stall(handle, source)
        elif staged is None:
            return False
        self._want(handle, Promotion(deadline_s, source, entering, bool(staged), streamed))
        return True

    def _reaches_top(self, source: int) -> bool:
        """Whether a tier can be read into the top tier directly."""
        return self._residency.levels[0].host_addressable or not self._residency.levels[source].persistent

    def _want(self, handle: int, promotion: Promotion) -> None:
        if not self.goal:
            self._directory.hold([handle], 0)
        self._wanted[handle] = promotion

    def joined(self, handle: int, deadline_s: float) -> bool:
        """Whether a block is on its way for somebody already; then it comes as early as this deadline wants it."""
        self.urge(handle, deadline_s)
        return handle in self._wanted

    def bring(self, handle: int, source: int, target: int) -> bool:
        """Bring a block up for nobody yet, into memory that has a slot to give. False, and nothing done, if not."""
        if target:
            return self.stage(handle, source, target, inf)
        if self.goal or not self._reaches_top(source):
            return False
        slots = self._residency.take(0, 1, drop_dirty=False, incoming=handle)
        if slots is None:
            return False
        self._residency.place(handle, 0, slots[0])
        self._hop(handle, (source, 0), inf)
        self._want(handle, Promotion(inf, source, 0, staged=False))
        return True

    def sample(self, handle: int, source: int) -> bool:
        """Bring one block into the lowest memory tier for nobody, to see how the source does. False if it cannot."""
        target = sum(not level.persistent for level in self._residency.levels) - 1
        there = any(self._directory.state(handle, tier) is not State.GONE for tier in range(target + 1))
        return not there and self.bring(handle, source, target)

    def stage(self, handle: int, source: int, target: int, deadline_s: float) -> bool:
        """Bring a block into a memory tier below the top, if that has a slot to give. No top copy waits for it."""
        slots = self._residency.take(target, 1, drop_dirty=False, incoming=handle)
        if slots is None:
            return False
        self._residency.place(handle, target, slots[0])
        self._directory.hold([handle], target)
        self._hop(handle, (source, target), deadline_s)
        return True

    def urge(self, handle: int, deadline_s: float, *, streamed: bool = False) -> None:
        """Somebody, perhaps with an earlier deadline, joined a promotion that still waits for its next hop."""
        wanted = self._wanted.get(handle)
        if wanted is not None:
            wanted.deadline_s = min(wanted.deadline_s, deadline_s)
            wanted.streamed |= streamed

    def enqueued(self, handles: Iterable[int], arrival: Arrival) -> list[int]:
        """A stream has taken the last hop of these blocks. Returns those that somebody may wait for."""
        wanted = [handle for handle in handles if handle in self._wanted]
        for handle in wanted:
            self._wanted[handle].arrival = arrival
        return wanted

    def arrival(self, handle: int) -> Arrival | None:
        """What to wait for on a stream until a block is in the top tier; None if nothing says yet that it comes."""
        wanted = self._wanted.get(handle)
        return wanted.arrival if wanted and self._directory.state(handle, 0) is State.FILLING else None

    def give_up(self, handle: int) -> None:
        """Nobody waits for this promotion any more: what is not under way does not start, so that loads of a slow
        or hung disk cannot pile up on slots that others need. What is under way still ends in the cache.
        """
        wanted = self._wanted.get(handle)
        if wanted is None or (wanted.entering == 0 and (handle, 0) not in self._queued):
            return
        if handle in self._stalled:
            self._go_on(handle)
        own_hop = wanted.entering == 0 or wanted.staged  # else it is a prefetch's, and goes on
        hop = self._unqueue(handle, wanted.entering) if own_hop else None
        self._forsake(handle)
        if hop is not None:
            if wanted.entering:
                self._fail(handle, wanted.entering)
            self._residency.unhold([handle], hop[1])

    def give_up_all(self) -> None:
        """Nobody waits for any promotion into the top tier."""
        for handle in list(self._wanted):
            self.give_up(handle)

    def _forsake(self, handle: int) -> None:
        """Nothing comes into the top copy, if one waits."""
        del self._wanted[handle]
        if not self.goal:
            self._fail(handle, 0)

    def _fail(self, handle: int, tier: int) -> None:
        if self._directory.state(handle, tier) is State.FILLING:
            self._residency.lose(handle, tier, Move.FAILED, Reason.FAILED)
        self._residency.unhold([handle], tier)

    def arrived(self, handle: int, tier: int) -> bool:
        """A hop into `tier` ended. True if the promotion ended with it, well or not (see the top copy's state)."""
        wanted = self._wanted.get(handle)
        if wanted is None or tier != wanted.entering or handle in self._stalled:
            return False  # a prefetch beside it, say
        if tier and self._directory.state(handle, 0) is State.FILLING and self._directory.is_ready(handle, tier):
            wanted.source, wanted.entering = tier, 0
            self._hop(handle, (tier, 0), wanted.deadline_s)
            return False
        del self._wanted[handle]
        return True

    # ------------------------------------------------------------ stalled

    def is_stalled(self, handle: int) -> bool:
        """Whether a load waits for a slot on its way."""
        return handle in self._stalled

    def end_lost(self) -> list[int]:
        """End the stalled loads whose block is not there any more, or not wanted; which they were."""
        lost = [handle for handle, source in self._stalled.items() if not self._may_go_on(handle, source)]
        for handle in lost:
            self._go_on(handle)
            self._forsake(handle)
        return lost

    def _may_go_on(self, handle: int, source: int) -> bool:
        awaited = self.goal or self._directory.state(handle, 0) is State.FILLING
        return bool(awaited) and self._directory.is_ready(handle, source)

    def _stall(self, handle: int, source: int) -> None:
        self._directory.hold([handle], source)
        self._stalled[handle] = source

    def _go_on(self, handle: int) -> None:
        self._residency.unhold([handle], self._stalled.pop(handle))

    def _resume(self) -> None:
        """What is stalled goes on as far as there are slots now, the most urgent first."""
        for handle in sorted(self._stalled, key=lambda handle: self._wanted[handle].deadline_s):
            wanted, source = self._wanted[handle], self._stalled[handle]
            staged = self._by_way_of_memory(handle, source, wanted.deadline_s)
            if staged is None:
                return
            wanted.staged = staged
            self._go_on(handle)

    # ------------------------------------------------------------ planned

    def batches(self) -> list[TransferBatch]:
        """The most urgent hops of every lane, as batches that fit its tiers."""
        self._resume()
        made: list[TransferBatch] = []
        for lane, queue in self._queues.items():
            if lane[0] in self.halted:
                continue
            while self._flight.batches[lane] < LANE_BATCHES_MAX and (handles := self._next(lane, queue)):
                parts = self._parts if any(self._is_streamed(handle, lane) for handle in handles) else ()
                made.append(self._flight.depart(lane, handles, parts=parts))
        return made

    def _is_streamed(self, handle: int, lane: Lane) -> bool:
        """Whether somebody wants to wait on a stream for this hop."""
        wanted = self._wanted.get(handle)
        return bool(self._parts) and lane[1] == 0 and wanted is not None and wanted.streamed

    def _blocks_max(self, lane: Lane) -> float:
        """How many more may be under way: a hung disk must not hold more than half of the top tier's slots."""
        source, target = (self._residency.levels[tier] for tier in lane)
        if lane[1] or not source.persistent:
            return inf
        return max(1, target.slots_usable // 2) - self._flight.blocks[lane]

    def _next(self, lane: Lane, queue: list[tuple[float, int, int]]) -> list[int]:
        """Take a batch's worth of hops out of a lane's queue; all streamed ones, for a batch comes layer by layer."""
        handles: list[int] = []
        length_bytes, blocks_max = 0, self._blocks_max(lane)
        batch_bytes = self._residency.levels[lane[0]].batch_bytes
        while queue and len(handles) < blocks_max:
            if length_bytes >= batch_bytes and not self._is_streamed(queue[0][2], lane):
                break
            _, order, handle = heapq.heappop(queue)
            if self._queued.get((handle, lane[1])) == (order, lane[0]):
                self._unqueue(handle, lane[1])
                handles.append(handle)
                length_bytes += self._directory.length_bytes(handle)
        return handles

    @property
    def wanted(self) -> int:
        """Blocks that are on their way to the top tier, or wait for it."""
        return len(self._wanted)

    @property
    def waiting(self) -> int:
        """Hops that are planned and not yet under way."""
        return len(self._queued)

    def waiting_bytes(self, lane: Lane) -> int:
        """Bytes of what is queued on a lane."""
        return self._waiting_bytes[lane]

    def path(self, source: int) -> tuple[Lane, ...]:
        """The lanes by which a block of this tier comes up to be read, when memory on the way has room."""
        if self.goal:
            return ((source, 1),) if source > 1 else ()
        if source < 2 or self._residency.levels[1].persistent:
            return ((source, 0),) if source else ()
        return (source, 1), (1, 0)

    def is_persistent(self, tier: int) -> bool:
        return self._residency.levels[tier].persistent

    def coming_from(self, tier: int) -> set[int]:
        """Blocks whose top copy waits for something from this tier."""
        return {handle for handle, wanted in self._wanted.items() if wanted.source == tier}

    def _source(self, handle: int) -> int | None:
        tiers = (tier for tier in range(1, self._directory.tiers) if tier not in self._directory.bypassed)
        return next((tier for tier in tiers if self._directory.is_ready(handle, tier)), None)

    def _by_way_of_memory(self, handle: int, source: int, deadline_s: float) -> bool | None:
        """Fill the tier below the top first, when it is memory, not the source, and has a slot to give.

        True if the hop there was planned now, False if it is under way already, None if this is not the way.
        """
        if source < 2 or self._residency.levels[1].persistent:
            return None
        state = self._directory.state(handle, 1)
        if state is State.FILLING:
            return False  # somebody's prefetch brings it; the next hop follows
        return (state is State.GONE and self.stage(handle, source, 1, deadline_s)) or None

    def _unqueue(self, handle: int, target: int) -> tuple[int, int] | None:
        """Take a hop out of the queue; None if it is not (or no longer) there."""
        hop = self._queued.pop((handle, target), None)
        if hop is not None:
            self._waiting_bytes[hop[1], target] -= self._directory.length_bytes(handle)
        return hop

    def _hop(self, handle: int, lane: Lane, deadline_s: float) -> None:
        self._directory.hold([handle], lane[0])
        self._waiting_bytes[lane] += self._directory.length_bytes(handle)
        self._order += 1
        self._queued[handle, lane[1]] = (self._order, lane[0])
        heapq.heappush(self._queues.setdefault(lane, []), (deadline_s, self._order, handle))
