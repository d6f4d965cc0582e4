"""Stores: blocks on their way down, ahead of need.

When the slots of a tier that can be had without I/O (free, or idle and clean) fall under the low watermark, idle
dirty blocks are copied to the tier below, in policy order, until the high watermark is reached; while loads from
there are under way they wait, until half of the low watermark is used up (vllm RFC#50031). A flush copies
all that is not yet in the lowest persistent tier. Evictions from a persistent tier travel in the transaction of
the batch that needs their room; in the lowest tier a block that also lies above never makes room for another, for it
would only have to be written again.

Always: at most `STORES_MAX` batches per lane (`STORES_TO_DISK_MAX` into a disk, which commits together what waits) and
`queue_bytes` in all are under way; a failing tier is left alone
for a while that doubles. Units: slots, blocks, bytes, seconds of the engine's clock.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from kvtier.cache.level import Level
from kvtier.cache.residency import Leaving, Residency
from kvtier.cache.staying import NotDemotable, NotEvictable
from kvtier.cache.transitions import State
from kvtier.engine.admitting import Admitting
from kvtier.engine.flight import Flight
from kvtier.engine.flushes import Flushes
from kvtier.engine.victims import Victims
from kvtier.engine.wear import Wear
from kvtier.policies.base import up_to
from kvtier.types import StoreKey, TransferBatch

STORES_MAX = 2
STORES_TO_DISK_MAX = 4
BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 10.0
FLUSH_FAILURES_MAX = 6  # of the disk in a row, after which a flush is over: behind pauses of 3.1 s in all
STARVED_S = 1.0  # after a refusal for room: by then others may have given some back
SLACK_DIVISOR = 8  # places kept free for the next batch: at most this part of the tier


class Demotions:
    """Chooses what goes down and what leaves the lowest tier."""

    def __init__(self, residency: Residency, flight: Flight, wear: Wear, queue_bytes: int) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._admitting = Admitting(residency, flight, wear)
        self._queue_bytes = queue_bytes
        self.victims = Victims(residency)
        self.flushes = Flushes()
        self._evacuating: dict[int, dict[int, StoreKey]] = {}  # by tier: blocks that are in the way of a resize
        self._setbacks: dict[int, int] = {}  # of the tiers below one, when they were last held against a flush
        self._flush_asked = False  # since the order was last noted for one

    # ------------------------------------------------------------ planning

    def batches(self, now_s: float) -> list[TransferBatch]:
        """What to store now, slowest tiers first: their success makes room for the faster ones."""
        made: list[TransferBatch] = []
        levels = self._residency.levels
        for tier in range(len(levels) - 1, -1, -1):
            self._admitting.ease(tier)
            if now_s < levels[tier].blocked_until_s:
                continue
            if tier > 0:
                made += self._stores(tier - 1, now_s)
            if self._residency.leaving[tier]:
                made.append(self._flight.depart((tier, tier), (), self._erasures(tier)))
        return made

    def _stores(self, tier: int, now_s: float) -> Iterator[TransferBatch]:
        lane = (tier, tier + 1)
        target = self._residency.levels[tier + 1]
        while self._may_start(lane) and self._flight.bytes.total() < self._queue_bytes:
            handles = self._chosen(tier)
            if not handles:
                return
            batch = self._to_disk(lane, handles, now_s) if target.persistent else self._to_memory(lane, handles)
            if batch is None and not target.persistent:
                batch = self._past(tier, handles, now_s)
            if batch is None:
                self._refused(tier, handles, now_s)
                return
            yield batch

    def _may_start(self, lane: tuple[int, int]) -> bool:
        """Whether another batch may be under way: into a disk more than two, as long as they hold few slots."""
        source, target = (self._residency.levels[tier] for tier in lane)
        batches = self._flight.batches[lane]
        few = self._flight.blocks[lane] <= source.slots_usable // (2 * STORES_MAX)
        return batches < STORES_MAX or (target.persistent and batches < STORES_TO_DISK_MAX and few)

    def _refused(self, tier: int, handles: list[int], now_s: float) -> None:
        """Nothing could be stored. While stores are under way room may come of it; else wait, or give a flush up."""
        below = range(tier + 1, len(self._residency.levels))
        if any(self._flight.batches[t - 1, t] or self._flight.evictions[t] for t in below):
            return
        levels = self._residency.levels
        target = levels[tier + 1]
        if target.room is not None:
            target.refused = True
            target.setbacks += 1
            if not target.room.excess_bytes():  # else it must not be kept from giving way
                target.blocked_until_s = now_s + BACKOFF_FIRST_S
        elif not any(levels[t].failures or levels[t].refused for t in below):
            return
        elif (setbacks := sum(levels[t].setbacks for t in below)) == self._setbacks.get(tier):
            return  # what is below has not been tried since: a pause is no attempt
        else:
            self._setbacks[tier] = setbacks
        for handle in handles:
            self.flushes.tried(handle, self._directory.key(handle), lowest=False, done=False)

    def _chosen(self, tier: int) -> list[int]:
        """A batch of blocks of one size that should go down from this tier: for a flush first, else the policy's."""
        level = self._residency.levels[tier]
        handles = self._to_flush(tier)
        handles = handles or self._admitted(tier, self._to_evacuate(tier)) or self._ahead_of_need(tier, level)
        if not handles:
            return []
        below, length_bytes = self._residency.levels[tier + 1], self._directory.length_bytes
        size = below.size_class(length_bytes(handles[0]))
        alike = [h for h in handles if below.size_class(length_bytes(h)) == size]
        # A store holds its sources: on a hung disk all batches together must leave most slots to the living.
        share = max(1, level.slots_usable // (2 * STORES_MAX))
        return alike[: min(share, below.batch_blocks(size))]

    def _ahead_of_need(self, tier: int, level: Level) -> list[int]:
        """Those of the next to leave whom the tier below wants; while it wants none of them there are more to ask."""
        while handles := self._next_to_leave(tier, level):
            if admitted := self._admitted(tier, handles):
                return admitted
        return []

    def _next_to_leave(self, tier: int, level: Level) -> list[int]:
        lane = (tier, tier + 1)
        kept = self._residency.ranks.kept(tier)  # not to be counted on
        available = self._residency.takeable(tier, drop_dirty=False) + self._flight.blocks[lane] - kept
        low = max(1, ceil(level.low_watermark * level.slots_usable))
        high = max(low + 1, ceil(level.high_watermark * level.slots_usable))
        level.demoting = available < (high if level.demoting else low)
        if not level.demoting or (available > low // 2 and self._flight.loads(tier + 1)):
            return []  # a disk that somebody waits for is not kept busy with stores, as long as there are slots
        idle_dirty = self._directory.idle[tier] - self._directory.idle_clean[tier]
        batch_blocks = self._residency.levels[tier + 1].batch_blocks(level.stride_bytes)
        count = min(high - available, idle_dirty, batch_blocks)
        return up_to(level.policy, count, NotDemotable(self._directory, tier))

    def _admitted(self, tier: int, handles: list[int]) -> list[int]:
        """Those of these blocks of a tier whom the tier below lets in. The others may leave without a copy there."""
        return self._admitting.admitted(tier + 1, handles, lambda: self._first_to_leave(tier + 1, handles))

    def _first_to_leave(self, tier: int, handles: Sequence[int]) -> int | None:
        """Who makes room in this tier for blocks that come; None if nobody has to."""
        level = self._residency.levels[tier]
        size = level.size_class(self._directory.length_bytes(handles[0]))
        if level.room is None:
            short = len(handles) - level.slots.slots_free
        else:
            room_blocks = level.room.blocks(self._directory.length_bytes(handles[0]))
            short = self._short(tier, len(handles), size, room_blocks)
        if short <= 0:
            return None
        staying = NotEvictable(self._directory, tier, self.flushes)
        return next(iter(self._residency.ranks.up_to(level.policy, tier, 1, staying)), None)

    def evacuate(self, tier: int, handles: Iterable[int]) -> None:
        """Copy these blocks to the tier below before all others."""
        self._evacuating[tier] = {handle: self._directory.key(handle) for handle in handles}

    def _to_evacuate(self, tier: int) -> list[int]:
        staying = NotDemotable(self._directory, tier)
        return [
            handle
            for handle, key in self._evacuating.get(tier, {}).items()
            if self._directory.key(handle) == key and self._directory.is_ready(handle, tier) and handle not in staying
        ]

    def _past(self, tier: int, handles: list[int], now_s: float) -> TransferBatch | None:
        """For a flush: straight to the disk, where nothing of the memory between is to be had: others hold it, or it is
        full of blocks of another size, for which the disk has no place."""
        lowest = len(self._residency.levels) - 1
        level, between = self._residency.levels[lowest], range(tier + 1, lowest)
        can = level.persistent and self._residency.levels[tier].host_addressable
        if not can or not self.flushes.owes(handles[0]):
            return None
        waiting = self._directory.idle_clean if level.refused else self._directory.idle
        if any(waiting[t] or self._residency.levels[t].slots.slots_free for t in between):
            return None
        paused = now_s < level.blocked_until_s and (level.failures > 0 or not level.refused)
        if paused or not self._may_start((tier, lowest)):
            return None
        fit = [handle for handle in handles if self._directory.state(handle, lowest) is State.GONE]
        return self._to_disk((tier, lowest), fit, now_s) if fit else None

    # ------------------------------------------------------------ targets

    def _to_memory(self, lane: tuple[int, int], handles: list[int]) -> TransferBatch | None:
        tier = lane[1]
        if tier == len(self._residency.levels) - 1:
            self._make_room(tier, handles)
            count = min(len(handles), self._residency.levels[tier].slots.slots_free)
        else:
            count = min(len(handles), self._residency.takeable(tier, drop_dirty=False))
        slots = self._residency.take(tier, count, drop_dirty=False, incoming=handles[0]) if count else None
        if slots is None:
            return None  # its own demotion makes room first
        for handle, slot in zip(handles, slots, strict=False):
            self._residency.place(handle, tier, slot)
        return self._depart(lane, handles[:count])

    def _make_room(self, tier: int, handles: list[int]) -> None:
        """In memory with nothing below, as on a disk: were what lies above to leave, it would at once be stored again
        in the place of another that lies above, for ever."""
        level = self._residency.levels[tier]
        staying = NotEvictable(self._directory, tier, ())
        short = len(handles) - level.slots.slots_free
        if short > 0:
            victims = self._residency.ranks.up_to(level.policy, tier, short, staying, incoming=handles[0])
            self._residency.reclaim(victims, tier, handles[0])

    def _to_disk(self, lane: tuple[int, int], handles: list[int], now_s: float) -> TransferBatch | None:
        """Write what fits, and evict in the same transaction so that the next batch fits too."""
        tier = lane[1]
        level = self._residency.levels[tier]
        assert level.room is not None
        if level.room.excess_bytes() > 0:
            return None  # it gives way to others first
        length_bytes = self._directory.length_bytes(handles[0])
        size = level.size_class(length_bytes)
        # The tier takes places when a batch runs: what is under way may or may not be counted in its answer.
        starved = now_s < level.starved_until_s
        room = 0 if starved else max(0, level.room.blocks(length_bytes) - self._flight.blocks[lane])
        level.starved_until_s = 0.0
        count = min(len(handles), room)
        short = self._short(tier, len(handles), size, room)
        victims = self._victims(tier, short, None if starved and level.sizes_vary else size, incoming=handles[0])
        if not count and not victims:
            return None
        leaving = [self._residency.evict(handle, tier, handles[0]) for handle in victims]
        for handle in handles[:count]:
            self._residency.place(handle, tier)
        if owed := [handle for handle in handles[:count] if self.flushes.owes(handle)]:
            self.flushes.over_budget(owed, self._admitting.over_budget_bytes(tier, owed))
        return self._depart(lane, handles[:count], leaving)

    def _short(self, tier: int, blocks: int, size: int, room_blocks: int) -> int:
        """How many blocks have to leave a disk for so many to come, and the next ones to find room, too."""
        slack = min(blocks, self._residency.levels[tier].capacity_bytes // size // SLACK_DIVISOR)
        return blocks + slack - room_blocks - self._flight.evictions[tier]

    def _depart(self, lane: tuple[int, int], handles: list[int], leaving: Sequence[Leaving] = ()) -> TransferBatch:
        self._directory.hold(handles, lane[0])
        self._directory.hold(handles, lane[1])
        return self._flight.depart(lane, handles, leaving)

    # ------------------------------------------------------------ leaving a persistent tier

    def _victims(self, tier: int, count: int, size: int | None, incoming: int) -> list[int]:
        """As `Victims.of_size`, but nobody whom a running flush has just saved."""
        staying = NotEvictable(self._directory, tier, self.flushes)
        return self.victims.of_size(tier, count, size, staying, incoming)

    def _erasures(self, tier: int) -> list[Leaving]:
        queue = self._residency.leaving[tier]
        copies = list(queue)
        queue.clear()
        return copies

    # ------------------------------------------------------------ results

    def blocked(self, tier: int, now_s: float) -> None:
        """The tier failed: leave it alone for a while, twice as long each time in a row. A flush has one try behind
        each pause, for all that it owes: one by one its blocks would take as long as there are many."""
        level = self._residency.levels[tier]
        level.setbacks += 1
        if level.failures and now_s < level.blocked_until_s:
            return  # it was under way when the pause began
        level.blocked_until_s = now_s + min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2**level.failures)
        level.failures += 1
        if level.failures >= FLUSH_FAILURES_MAX:
            self.flushes.give_up()

    def recovered(self, tier: int) -> None:
        level = self._residency.levels[tier]
        level.failures = 0
        level.refused = False
        level.blocked_until_s = 0.0

    # ------------------------------------------------------------ flush

    def dirty(self) -> list[int]:
        """Blocks that lie only in memory although the lowest tier is persistent."""
        lowest = len(self._residency.levels) - 1
        if not self._residency.levels[lowest].persistent:
            return []
        is_ready, top = self._directory.is_ready, self._directory.top
        return [h for h in self._directory.handles() if not is_ready(h, lowest) and top(h) is not None]

    def flush(self, ticket: int) -> None:
        """Start copying all that lies only in memory to the lowest persistent tier."""
        dirty = self.dirty()
        self._directory.reconsider(dirty)  # whoever was refused must not leave before it is written
        self.flushes.begin(ticket, {handle: self._directory.key(handle) for handle in dirty})
        self._flush_asked = True

    def flushed_all(self) -> bool:
        """Whether all that was to be flushed has been: then it is time to note the order, too (`flush_noted`)."""
        return self._flush_asked and next(self.flushes.owed(), None) is None

    def flush_noted(self) -> None:
        """The order of that moment is on its way."""
        self._flush_asked = False

    def _to_flush(self, tier: int) -> list[int]:
        """Blocks to flush whose lowest copy is READY here and whose way down is clear."""
        below, lowest = tier + 1, len(self._residency.levels) - 1
        ready: list[int] = []
        settled: dict[int, bool] = {}  # handle -> failed
        limit = self._residency.levels[below].batch_blocks(self._residency.levels[tier].stride_bytes)
        for handle, key in self.flushes.owed():
            if self._directory.key(handle) != key or self._directory.top(handle) is None:
                settled[handle] = True  # its slot was taken before it could be written
            elif self._directory.is_ready(handle, lowest):
                settled[handle] = False  # its old copy there could not be erased, say
            elif self._directory.state(handle, lowest) is State.RECLAIMED:
                settled[handle] = True  # its old copy is condemned and still held: no telling for how long
            elif self._directory.state(handle, lowest) is not State.GONE:
                continue  # it is on its way there
            elif self._directory.is_ready(handle, tier) and self._directory.state(handle, below) is State.GONE:
                ready.append(handle)
                if len(ready) == limit:
                    break
        for handle, failed in settled.items():
            self.flushes.settle(handle, failed=failed)
        return ready
