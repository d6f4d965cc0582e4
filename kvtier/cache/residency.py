"""Copies coming, staying and going: directory, slots and policies kept in step.

Every change of a copy goes through here, so that three things that must agree are written in one place:
    the directory's state, the pool's slot (memory tiers) and the policy's order.
Always: a policy's residents are exactly the READY copies of its tier; a slot that is not free belongs to one copy,
is private to one lease, or waits in quarantine for the end of a transfer that was overtaken.

Units: tier indexes, handles, slots.
"""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from kvtier.cache.directory import Directory
from kvtier.cache.level import Level
from kvtier.cache.transitions import Move, State
from kvtier.events import Forgotten, Journal, Reason
from kvtier.metrics import Counters
from kvtier.policies.base import Access
from kvtier.types import StoredBlock, page_aligned


class Leaving(NamedTuple):
    """A copy on its way out of a persistent tier, and why."""

    handle: int
    reason: Reason


class Residency:
    """What is where. `leaving[t]` holds copies of persistent tier t, LEAVING, that are to be erased there."""

    def __init__(self, levels: Sequence[Level], counters: Counters) -> None:
        self.levels = levels
        self.directory = Directory(len(levels), [tier for tier, level in enumerate(levels) if level.persistent])
        self.counters = counters
        self.journal = Journal()
        self.leaving: list[deque[Leaving]] = [deque() for _ in levels]
        self._reasons: dict[tuple[int, int], Reason] = {}  # (handle, tier) of RECLAIMED copies that are held still

    # ------------------------------------------------------------ coming

    def place(self, handle: int, tier: int, slot: int = 0) -> None:
        """A transfer into this tier begins; a persistent tier will choose the place itself."""
        pool = self.levels[tier].pool
        self.directory.move(handle, tier, Move.PLACE)
        if pool is not None:
            pool.occupy(slot, handle)
            self.directory.put_at(handle, tier, slot)

    def filled(self, handle: int, tier: int, place: int, generation: int) -> None:
        """The transfer succeeded; a persistent tier says where the copy lies."""
        if self.levels[tier].pool is None:
            self.directory.put_at(handle, tier, place, generation)
        self.directory.move(handle, tier, Move.FILLED)
        self._enter(handle, tier)

    def publish(self, handle: int, tier: int, place: int, generation: int = 0) -> None:
        """Bytes that lie there already get a name: a commit into a slot, or a copy found at start."""
        pool = self.levels[tier].pool
        if pool is not None:
            pool.occupy(place, handle)
        self.directory.put_at(handle, tier, place, generation)
        self.directory.move(handle, tier, Move.PUBLISH)
        self._enter(handle, tier)

    def adopt(self, tier: int, blocks: Iterable[StoredBlock]) -> None:
        """Take over what a persistent tier has kept, in its order: many copies at once, before there are others."""
        directory, policy = self.directory, self.levels[tier].policy
        for length_bytes, alike in groupby(blocks, key=lambda block: block.length_bytes):
            handles = []
            for block in alike:
                handles.append(handle := directory.admit(block.key, length_bytes))
                directory.put_at(handle, tier, block.place, block.generation)
                directory.move(handle, tier, Move.PUBLISH)
            policy.touch(handles, Access.FILL, page_aligned(length_bytes))

    def _enter(self, handle: int, tier: int) -> None:
        length_bytes = self.directory.length_bytes(handle)
        self.levels[tier].policy.touch([handle], Access.FILL, page_aligned(length_bytes))
        for above in range(tier):
            if self.directory.is_ready(handle, above):
                self.directory.move(handle, above, Move.DEMOTED)

    def touch(self, handles: Sequence[int], access: Access) -> None:
        """A request used these blocks (deepest first): tell the policy of every tier that has a copy."""
        for tier, level in enumerate(self.levels):
            here = [handle for handle in handles if self.directory.is_ready(handle, tier)]
            if here:
                level.policy.touch(here, access)

    # ------------------------------------------------------------ room

    def take(self, tier: int, count: int, *, drop_dirty: bool) -> list[int] | None:
        """`count` slots: free ones, then those of clean idle copies in policy order, then of dirty ones.

        All or nothing: None changes nothing. Needs no I/O, since demotion ran ahead.
        """
        pool = self.levels[tier].slots
        short = count - pool.slots_free
        if short > 0:
            victims = self._victims(tier, short, drop_dirty)
            if victims is None:
                return None
            for handle in victims:
                self.reclaim(handle, tier)
        return pool.take(count)

    def takeable(self, tier: int, *, drop_dirty: bool) -> int:
        """How many slots `take` could give."""
        idle = self.directory.idle if drop_dirty else self.directory.idle_clean
        return self.levels[tier].slots.slots_free + idle[tier]

    def _victims(self, tier: int, count: int, drop_dirty: bool) -> list[int] | None:
        policy = self.levels[tier].policy
        clean = min(count, self.directory.idle_clean[tier])
        victims = policy.candidates(clean, NotReclaimable(self.directory, tier)) if clean else []
        dirty = count - len(victims)
        if dirty == 0:
            return victims
        if not drop_dirty or self.directory.idle[tier] - self.directory.idle_clean[tier] < dirty:
            return None
        return victims + policy.candidates(dirty, NotDirty(self.directory, tier))

    # ------------------------------------------------------------ going

    def reclaim(self, handle: int, tier: int) -> None:
        """Reuse the slot of an idle READY copy of a memory tier."""
        clean = self.directory.is_clean(handle, tier)
        lowest = tier == len(self.levels) - 1
        reason = Reason.EVICTED if lowest else Reason.RECLAIMED if clean else Reason.DROPPED_DIRTY
        self.counters.add_tier(tier, reason.value)
        self.levels[tier].policy.evict([handle])
        self.directory.move(handle, tier, Move.RECLAIM)
        self._finish(handle, tier, reason, quarantined=False)

    def evict(self, handle: int, tier: int) -> Leaving:
        """Choose an idle READY copy of a persistent tier to be erased: nobody finds it there from now on."""
        self.levels[tier].policy.evict([handle])
        self.directory.move(handle, tier, Move.EVICT)
        return Leaving(handle, Reason.EVICTED)

    def kept(self, copy: Leaving, tier: int) -> None:
        """The tier could not erase it: a good copy is as good as before, any other must go all the same."""
        if copy.reason is not Reason.EVICTED or not self.directory.is_named(copy.handle):
            self.leaving[tier].append(copy)
            return
        self.directory.move(copy.handle, tier, Move.KEPT)
        self._enter(copy.handle, tier)

    def erased(self, copy: Leaving, tier: int) -> None:
        """The tier forgot it."""
        if copy.reason is Reason.EVICTED:
            self.counters.add_tier(tier, "evicted")
        self.directory.move(copy.handle, tier, Move.ACKNOWLEDGED)
        self._retire(copy.handle, tier, copy.reason)

    def lose(self, handle: int, tier: int, move: Move, reason: Reason) -> None:
        """A copy that is of no use any more (failed, condemned, dropped) goes when nobody holds it."""
        before = self.directory.state(handle, tier)
        if before is State.READY:
            self.levels[tier].policy.forget([handle])
        if self.directory.move(handle, tier, move) is before:
            return  # LEAVING or RECLAIMED: it is on its way out already
        if not self.directory.is_held(handle, tier):
            self._finish(handle, tier, reason, quarantined=False)
            return
        self._reasons[handle, tier] = reason
        if (pool := self.levels[tier].pool) is not None:  # a transfer or a lease may still use the slot
            pool.quarantine(self.directory.place(handle, tier))

    def never_written(self, handle: int, tier: int) -> None:
        """The write of a copy that was dropped meanwhile failed: there is nothing to erase."""
        self._reasons[handle, tier] = Reason.FAILED

    def overtake(self, handle: int) -> None:
        """Drop a block everywhere: no lookup finds it from now on, late results are discarded."""
        top = self.directory.top(handle)
        if top is not None and self.directory.is_named(handle):
            self.journal.note(Forgotten(self.directory.key(handle), self.levels[top].name, Reason.DROPPED))
        self.directory.unname(handle)
        for tier in range(len(self.levels)):
            if self.directory.state(handle, tier) is not State.GONE:
                self.lose(handle, tier, Move.RECLAIM, Reason.DROPPED)

    def unhold(self, handle: int, tier: int) -> None:
        """Let go of a copy; the last one to let go of a RECLAIMED copy ends it."""
        if self.directory.unhold(handle, tier) == 0 and self.directory.state(handle, tier) is State.RECLAIMED:
            self._finish(handle, tier, self._reasons.pop((handle, tier)), quarantined=True)

    def _finish(self, handle: int, tier: int, reason: Reason, *, quarantined: bool) -> None:
        pool = self.levels[tier].pool
        if pool is None and reason is not Reason.FAILED:
            self.directory.move(handle, tier, Move.EVICT)
            self.leaving[tier].append(Leaving(handle, reason))
            return
        self.directory.move(handle, tier, Move.ACKNOWLEDGED)
        if pool is not None:
            slot = self.directory.place(handle, tier)
            pool.vacate(slot)
            if quarantined:
                pool.acknowledge(slot)
            else:
                pool.give([slot])
            if self._inherited(handle, tier):
                return
        self._retire(handle, tier, reason)

    def _inherited(self, handle: int, tier: int) -> bool:
        """A duplicate that a lease still uses becomes the block's copy; those of a dropped block lose their name."""
        pool = self.levels[tier].slots
        while (heir := pool.duplicate_of(handle, besides=-1)) is not None:
            if self.directory.is_named(handle):
                self.publish(handle, tier, heir)
                self.directory.hold(handle, tier)  # by the lease that owns the slot
                return True
            pool.vacate(heir)
        return False

    def _retire(self, handle: int, tier: int, reason: Reason) -> None:
        key, named = self.directory.key(handle), self.directory.is_named(handle)
        if self.directory.retire(handle) and named:
            self.journal.note(Forgotten(key, self.levels[tier].name, reason))

    # ------------------------------------------------------------ checks

    def check(self) -> list[str]:
        """Recount directory, pools and policies against each other."""
        findings = self.directory.check()
        for tier, level in enumerate(self.levels):
            findings += [f"{level.name}: {finding}" for finding in level.policy.check()]
            if len(level.policy) != self.directory.ready[tier]:
                findings.append(
                    f"{level.name}: policy knows {len(level.policy)}, READY are {self.directory.ready[tier]}"
                )
            if level.pool is not None:
                findings += [f"{level.name}: {finding}" for finding in level.pool.check()]
                findings += self._misplaced(tier, self.directory.handles())
        return findings

    def _misplaced(self, tier: int, handles: Iterable[int]) -> list[str]:
        pool = self.levels[tier].slots
        return [
            f"{self.levels[tier].name}: handle {handle} says slot {slot}, which holds {pool.occupant(slot)}"
            for handle in handles
            if self.directory.state(handle, tier) is not State.GONE
            and pool.occupant(slot := self.directory.place(handle, tier)) != handle
        ]


class NotReclaimable(Container[int]):
    """Handles whose copy in a tier must stay: held, or the only one."""

    def __init__(self, directory: Directory, tier: int) -> None:
        self._directory = directory
        self._tier = tier

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.is_held(handle, self._tier) or not self._directory.is_clean(handle, self._tier)


class NotDirty(Container[int]):
    """Handles of a tier that are held, or have a copy below."""

    def __init__(self, directory: Directory, tier: int) -> None:
        self._directory = directory
        self._tier = tier

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._directory.is_held(handle, self._tier) or self._directory.is_clean(handle, self._tier)


class NotDemotable(NotDirty):
    """Handles of a tier that need not, or at this moment cannot, be copied to the tier below."""

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        below = self._directory.state(handle, self._tier + 1)  # LEAVING: the old copy must be gone first
        return below is not State.GONE or super().__contains__(handle)


class NotEvictable(Container[int]):
    """Handles of a persistent tier that are held, live above as well (those would be written down again), or
    were just stored for a flush."""

    def __init__(self, directory: Directory, tier: int, flushed: Container[int]) -> None:
        self._directory = directory
        self._tier = tier
        self._flushed = flushed

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        held = self._directory.is_held(handle, self._tier)
        return held or self._directory.top(handle) != self._tier or handle in self._flushed
