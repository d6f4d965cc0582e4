"""A memory tier that grows and shrinks while it is used: which granules come, which go, and what must leave first.

Owns: the resizes under way, one per tier (a later one ends an earlier one where it stands). Growing makes memory and
then maps it, the lowest granules first, some at a time; when memory runs out, what was won stays. Shrinking takes the
highest ones of which no slot is leased: their free slots are withdrawn at once, clean blocks leave, and dirty ones are
copied to the tier below before they do. Always: nothing that somebody holds moves or goes; a slot whose memory is to go
is in nobody's reach before it does.

Units: granules, slots, bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.allocator.vmm import Geometry
from kvtier.cache.residency import Residency
from kvtier.engine.demotion import Demotions
from kvtier.engine.flight import Flight
from kvtier.types import Outcome, Remap, Status, TransferBatch

SLOTS_AT_ONCE = 1024  # emptied at once: the engine's thread answers nobody meanwhile
GROW_BYTES = 64 << 20  # made, or mapped, at once: loads into the tier wait meanwhile, and what was won stays


@dataclass(slots=True, eq=False)
class _Resize:
    """One resize: how many granules are wanted, and which ones it is emptying or has given away already.

    preferred: those that are mapped first. ready: granules of memory that are made and mapped nowhere yet. at_once: how
    many are mapped at once; fewer after the memory ran out half-way.
    """

    ticket: int
    tier: int
    granules: int
    at_once: int
    preferred: Sequence[int] = ()
    ready: int = 0
    scarce: bool = False  # no more memory can be made
    emptying: set[int] = field(default_factory=set)
    underway: Remap | None = None
    failed: bool = False
    in_the_way: set[int] = field(default_factory=set)  # blocks that were so at the last step
    seen_arrivals: int = -1  # batches that had ended when it last took a step


class Resizes:
    """Plans remaps. `ended` collects (ticket, bytes that the tier has now)."""

    def __init__(self, residency: Residency, flight: Flight, demotions: Demotions) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._demotions = demotions
        self._active: dict[int, _Resize] = {}  # by tier
        self.ended: list[tuple[int, int]] = []

    def begin(self, ticket: int, tier: int, granules: int, preferred: Sequence[int] = ()) -> None:
        """Bring a tier to so many granules, or as near as can be; of those that are missing, map `preferred` first."""
        former = self._active.get(tier)
        at_once = max(1, GROW_BYTES // self._geometry(tier).granule_bytes)
        if former is None:
            self._active[tier] = _Resize(ticket, tier, granules, at_once, preferred)
            return
        self.ended.append((former.ticket, self._bytes(tier)))
        anew = replace(former, ticket=ticket, granules=granules, at_once=at_once, preferred=preferred)
        self._active[tier] = replace(anew, scarce=False, failed=False, seen_arrivals=-1)

    def stop(self, tier: int) -> None:
        """Leave the tier's size as it is, as soon as what is under way has ended."""
        resize = self._active.get(tier)
        if resize is not None:
            resize.granules, resize.failed, resize.seen_arrivals = 0, True, -1

    def withdraw_free(self, tier: int) -> None:
        """Nobody may take a slot: all memory of the tier is about to go."""
        pool = self._residency.levels[tier].slots
        pool.withdraw([slot for slot in range(pool.slots_total) if slot != NULL_SLOT and pool.is_free(slot)])

    def readmit(self, tier: int) -> None:
        """It has stayed."""
        self._admit_slots(tier, self._residency.levels[tier].granules, besides=set())

    def is_active(self, tier: int) -> bool:
        """Whether the tier is changing its size."""
        return tier in self._active

    def batches(self) -> list[TransferBatch]:
        """Remaps to carry out now."""
        made = []
        for resize in list(self._active.values()):
            if resize.underway is None and resize.seen_arrivals != self._flight.arrivals:
                resize.seen_arrivals = self._flight.arrivals  # only then can more have become possible
                made += self._step(resize)
        return made

    def conclude(self) -> None:
        """Everything is planned: where nothing is on its way out nothing will change, whatever else is under way."""
        for resize in list(self._active.values()):
            if resize.underway is None and not self._goes_on(resize):
                self._end(resize)

    def settled(self, tier: int, remap: Remap, outcome: Outcome) -> None:
        """A remap ended."""
        level = self._residency.levels[tier]
        assert level.geometry is not None
        if outcome.done:
            level.granules = (level.granules | {*remap.map}) - {*remap.unmap}
            self._admit_slots(tier, remap.map, besides=set())
            slots = sum(map(len, level.geometry.slots_whole(level.granules)))
            level.capacity_bytes = max(0, slots - 1) * level.stride_bytes  # one is the null block
            self._residency.ranks.shrunk(tier)
        resize = self._active.get(tier)
        if outcome.done and not (resize and resize.preferred):
            self._tell_policy(tier)  # one that wakes is told once, at the end: what it has learnt would be cut
        if resize is None:
            return  # given up, and with it whatever this was for
        resize.underway = None
        resize.ready = outcome.place
        resize.emptying -= {*remap.unmap}
        if outcome.done:
            resize.scarce |= outcome.place < remap.ready
        elif outcome.status is Status.NO_ROOM:
            resize.at_once = len(remap.map) // 2
        else:
            resize.failed = True
            self._admit_slots(tier, remap.unmap, besides=resize.emptying)

    def give_up(self, tier: int) -> list[int]:
        """The tier's device is lost: nobody waits for memory of it any more. Returns the tickets that have no answer.

        A remap that is under way ends for nobody.
        """
        resize = self._active.pop(tier, None)
        self._demotions.evacuate(tier, ())
        return [] if resize is None else [resize.ticket]

    # ------------------------------------------------------------ steps

    def _step(self, resize: _Resize) -> list[TransferBatch]:
        level = self._residency.levels[resize.tier]
        assert level.geometry is not None
        missing = resize.granules - len(level.granules)
        if missing > 0 and not resize.failed and (growth := self._growth(resize, missing)):
            return [self._depart(resize, growth)]
        if resize.ready:
            return [self._depart(resize, Remap())]  # nothing comes of it
        if missing >= 0 or resize.failed:
            self._end(resize)
            return []
        return self._shrink(resize, -missing)

    def _growth(self, resize: _Resize, missing: int) -> Remap | None:
        """The next granules, once there is memory for them; None if there is none."""
        level, geometry = self._residency.levels[resize.tier], self._geometry(resize.tier)
        count = min(missing, resize.at_once)
        if resize.ready < count and not resize.scarce:
            return Remap(ready=count)
        absent = (g for g in chain(resize.preferred, range(geometry.granules)) if g not in level.granules)
        arriving = tuple(islice(dict.fromkeys(absent), min(count, resize.ready)))
        least = 1 if level.granules else geometry.granules_of(NULL_SLOT + 1).stop
        if len(arriving) >= least:
            return Remap(map=arriving)
        self._residency.counters.add_tier(resize.tier, "no_memory")
        resize.failed = True
        return None

    def _shrink(self, resize: _Resize, count: int) -> list[TransferBatch]:
        """Empty the highest granules that nobody leases, some at a time; give away those that are empty."""
        geometry = self._geometry(resize.tier)
        count = min(count, max(1, SLOTS_AT_ONCE * geometry.stride_bytes // geometry.granule_bytes))
        empty: list[int] = []
        dirty: list[int] = []
        chosen: set[int] = set()
        moving = self._flight.moving(resize.tier)
        for granule in sorted(self._residency.levels[resize.tier].granules, reverse=True):
            if len(chosen) == count:
                break
            waiting = self._in_the_way(resize.tier, granule, moving)
            if waiting is None:
                continue
            chosen.add(granule)
            dirty += waiting
            if not waiting:
                empty.append(granule)
        self._admit_slots(resize.tier, resize.emptying - chosen, besides=chosen)  # leased meanwhile
        resize.emptying = chosen
        self._clear(resize.tier, chosen)
        if empty:
            unused = frozenset(slot for granule in empty for slot in _slots_of(geometry, granule))
            return [self._depart(resize, Remap(unmap=tuple(sorted(empty)), unused=unused))]
        if dirty:
            resize.in_the_way = {*dirty}
            self._demotions.evacuate(resize.tier, dirty)
        else:
            self._end(resize)
        return []

    def _goes_on(self, resize: _Resize) -> bool:
        """Whether what is in the way is being moved, or makes its way down through the tiers below."""
        below = range(resize.tier, len(self._residency.levels) - 1)
        stores = any(self._flight.batches[tier, tier + 1] or self._flight.evictions[tier + 1] for tier in below)
        return stores or not resize.in_the_way.isdisjoint(self._flight.moving(resize.tier))

    def _in_the_way(self, tier: int, granule: int, moving: set[int]) -> list[int] | None:
        """The blocks that have to be copied, or whose copying has to end, before a granule can go; None if a slot is
        leased."""
        pool = self._residency.levels[tier].slots
        waiting = []
        for slot in _slots_of(self._geometry(tier), granule):
            if slot == NULL_SLOT:
                return None
            if pool.is_free(slot) or pool.is_withdrawn(slot):
                continue
            handle = pool.occupant(slot)
            if handle is None or self._directory.place(handle, tier) != slot:
                return None  # private to a lease
            if self._directory.is_held(handle, tier):
                if handle not in moving:
                    return None
                waiting.append(handle)
            elif not self._directory.is_clean(handle, tier):
                waiting.append(handle)
        return waiting

    def _clear(self, tier: int, granules: Iterable[int]) -> None:
        """Let clean idle blocks go, and nobody take a free slot any more."""
        pool = self._residency.levels[tier].slots
        for granule in granules:
            for slot in _slots_of(self._geometry(tier), granule):
                handle = None if pool.is_free(slot) or pool.is_withdrawn(slot) else pool.occupant(slot)
                if handle is not None and self._may_go(handle, tier):
                    self._residency.reclaim([handle], tier)
                if pool.is_free(slot):
                    pool.withdraw([slot])

    def _may_go(self, handle: int, tier: int) -> bool:
        idle = self._directory.is_ready(handle, tier) and not self._directory.is_held(handle, tier)
        return idle and self._directory.is_clean(handle, tier)

    # ------------------------------------------------------------ inside

    def _depart(self, resize: _Resize, remap: Remap) -> TransferBatch:
        resize.underway = remap
        return self._flight.depart_remap(resize.tier, remap)

    def _end(self, resize: _Resize) -> None:
        """As far as it came: what it was emptying is of use again. Nothing of it is under way."""
        del self._active[resize.tier]
        self._demotions.evacuate(resize.tier, ())
        self._admit_slots(resize.tier, resize.emptying, besides=set())
        if resize.preferred and self._residency.levels[resize.tier].granules:
            self._tell_policy(resize.tier)
        self.ended.append((resize.ticket, self._bytes(resize.tier)))

    def _tell_policy(self, tier: int) -> None:
        level = self._residency.levels[tier]
        level.policy.resize(level.slots_usable)
        self._residency.retire_ghosts(level.policy)

    def _bytes(self, tier: int) -> int:
        return len(self._residency.levels[tier].granules) * self._geometry(tier).granule_bytes

    def _admit_slots(self, tier: int, granules: Iterable[int], besides: set[int]) -> None:
        """Withdrawn slots on these granules are free again, if all their memory is there and not `besides` to go."""
        level, geometry = self._residency.levels[tier], self._geometry(tier)
        there = level.granules - besides
        slots = {slot for granule in granules for slot in _slots_of(geometry, granule)}
        whole = [slot for slot in slots if level.slots.is_withdrawn(slot) and there >= {*geometry.granules_of(slot)}]
        level.slots.restore(whole)

    def _geometry(self, tier: int) -> Geometry:
        geometry = self._residency.levels[tier].geometry
        assert geometry is not None, "only tiers with a geometry are resized"
        return geometry


def _slots_of(geometry: Geometry, granule: int) -> range:
    return geometry.slots_touching(range(granule, granule + 1))
