"""Copies coming, staying and going: directory, slots and policies kept in step.

Every change of a copy goes through here, so that three things that must agree are written in one place:
    the directory's state, the pool's slot (memory tiers) and the policy's order.
Always: a policy's residents are exactly the READY copies of its tier; a slot that is not free belongs to one copy,
is private to one lease, or waits in quarantine for the end of a transfer that was overtaken; a handle has a name as
long as it has a copy or a policy remembers it as a ghost.

Units: tier indexes, handles, slots.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.directory import Directory
from kvtier.cache.level import Level
from kvtier.cache.order_log import OrderLog
from kvtier.cache.ranks import Ranks
from kvtier.cache.staying import NotDirty, NotReclaimable
from kvtier.cache.transitions import Move, State
from kvtier.events import Forgotten, Journal, Reason
from kvtier.metrics import Counters
from kvtier.policies.base import Access, Policy
from kvtier.policies.gate import Gate


class Leaving(NamedTuple):
    """A copy on its way out of a persistent tier, and why."""

    handle: int
    reason: Reason


class Residency:
    """What is where. `leaving[t]` holds copies of persistent tier t, LEAVING, that are to be erased there."""

    def __init__(
        self, levels: Sequence[Level], counters: Counters, namespaces: NamespaceTable, pin_quota: float = 0.25
    ) -> None:
        """pin_quota: the share of each tier's blocks that may be kept there for a priority or a pin."""
        self.levels = levels
        self.namespaces = namespaces
        self.directory = Directory(len(levels), [tier for tier, level in enumerate(levels) if level.persistent])
        self.counters = counters
        self.journal = Journal()
        self.ranks = Ranks(
            self.directory,
            self._size_class,
            lambda tier: int(pin_quota * levels[tier].blocks_max),
            lambda tier: counters.add_tier(tier, "pins_refused"),
        )
        self.leaving: list[deque[Leaving]] = [deque() for _ in levels]
        self._reasons: dict[tuple[int, int], Reason] = {}  # (handle, tier) of RECLAIMED copies that are held still
        self._gates = {tier: level.gate for tier, level in enumerate(levels) if level.gate is not None}
        self.orders = {
            tier: OrderLog(
                level.policy, level.policy_name, level.policy_blocks, self.directory, tier, namespaces.fingerprint_of
            )
            for tier, level in enumerate(levels)
            if level.persistent
        }
        for tier, order in self.orders.items():
            levels[tier].policy = order  # from now on, what it is told is noted

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

    def publish_held(self, handles: Sequence[int], slots: Sequence[int]) -> None:
        """What a lease has written into slots of the top tier gets its names, and stays held by the lease."""
        level, length_bytes = self.levels[0], self.directory.length_bytes
        for handle, slot in zip(handles, slots, strict=True):
            level.slots.occupy(slot, handle)
        self.directory.publish_held(handles, 0, slots)
        ways = ((self.directory.was_reused(handle), level.size_class(length_bytes(handle))) for handle in handles)
        for (reused, size_class), alike in groupby(zip(ways, handles, strict=True), key=itemgetter(0)):
            access = Access.MOVED if reused else Access.FILL
            level.policy.touch([handle for _, handle in alike], access, size_class)
        self.ranks.entered(handles, 0)
        self.retire_ghosts(level.policy)
        self._note_use(handles)

    def _enter(self, handle: int, tier: int) -> None:
        policy, directory = self.levels[tier].policy, self.directory
        access = Access.MOVED if directory.was_reused(handle) else Access.FILL
        policy.touch([handle], access, self._size_class(handle, tier))
        self.ranks.entered([handle], tier)
        self.retire_ghosts(policy)
        for above in range(tier):
            if self.directory.is_ready(handle, above):
                self.directory.move(handle, above, Move.DEMOTED)

    def _size_class(self, handle: int, tier: int) -> int:
        return self.levels[tier].size_class_at(self.directory.place(handle, tier), self.directory.length_bytes(handle))

    def touch(self, handles: Sequence[int], access: Access) -> None:
        """A request used these blocks (deepest first): tell the policy of every tier that has a copy."""
        if access is Access.REUSE:
            self.directory.note_reuse(handles)
        for tier, level in enumerate(self.levels):
            if here := self.directory.ready_among(handles, tier):
                level.policy.touch(here, access)
        if access is Access.REUSE:
            self._note_use(handles)

    # ------------------------------------------------------------ worth

    def refuse(self, handles: Sequence[int], tier: int) -> None:
        """A tier does not want copies of these: those above it are clean until the blocks are used again."""
        gate = self._gates[tier]
        gate.note_refusal(handles)
        self.retire_ghosts(gate)
        self.directory.refuse(handles, tier)
        self.counters.add_tier(tier, "not_admitted", len(handles))

    def reconsider(self, tier: int) -> None:
        """Ask again about all that a tier did not want."""
        self.directory.reconsider(self.directory.refused_by(tier))

    def _note_use(self, handles: Sequence[int]) -> None:
        """Who is worth keeping may be another question from now on."""
        if self._gates:
            named = [handle for handle in handles if self.directory.is_named(handle)]
            self.directory.reconsider(named)
            for gate in self._gates.values():
                gate.note_use(named)
                self.retire_ghosts(gate)

    # ------------------------------------------------------------ room

    def take(self, tier: int, count: int, *, drop_dirty: bool, incoming: int | None = None) -> list[int] | None:
        """`count` slots: free ones, then those of clean idle copies in policy order, then of dirty ones.

        Of the clean ones, those go first that are also found above (DESIGN 6). Ranks come before all this (`ranks`).
        All or nothing: None changes nothing. Needs no I/O, since demotion ran ahead. incoming: the (first) block that
        they are for, if it has a handle.
        """
        pool = self.levels[tier].slots
        if self.levels[tier].lost or self.levels[tier].asleep:
            return None
        short = count - pool.slots_free
        if short > 0:
            victims = self._victims(tier, short, drop_dirty, incoming)
            if victims is None:
                return None
            self.reclaim(victims, tier, incoming)
        return pool.take(count)

    def takeable(self, tier: int, *, drop_dirty: bool) -> int:
        """How many slots `take` could give."""
        idle = self.directory.idle if drop_dirty else self.directory.idle_clean
        return self.levels[tier].slots.slots_free + idle[tier]

    def _victims(self, tier: int, count: int, drop_dirty: bool, incoming: int | None) -> list[int] | None:
        policy, choose, directory = self.levels[tier].policy, self.ranks.choose, self.directory
        clean_total = directory.idle_clean[tier]
        dirty_total = directory.idle[tier] - clean_total
        clean = min(count, clean_total)
        dirty = count - clean
        if dirty > (dirty_total if drop_dirty else 0):
            return None
        idle = (h for h in directory.doubled[tier] if not directory.is_held(h, tier))
        victims = choose(policy, tier, clean, NotReclaimable(directory, tier), clean_total, incoming, idle)
        if dirty:
            victims += choose(policy, tier, dirty, NotDirty(directory, tier), dirty_total, incoming)
        return victims

    # ------------------------------------------------------------ going

    def reclaim(self, handles: Sequence[int], tier: int, incoming: int | None = None) -> None:
        """Reuse the slots of idle READY copies of a memory tier, for `incoming` (first) if that is known."""
        level, lowest = self.levels[tier], tier == len(self.levels) - 1
        place = self.directory.place
        ends = [(h, Reason.EVICTED if lowest else self._why_reclaimed(h, tier)) for h in handles]
        for reason, count in Counter(reason for _, reason in ends).items():
            self.counters.add_tier(tier, reason.value, count)
        level.policy.evict(handles, incoming)
        self.ranks.left(handles, tier)
        self.retire_ghosts(level.policy)
        self.directory.take_out(handles, tier)
        level.slots.give([place(handle, tier) for handle in handles])
        for handle, reason in ends:
            if not self._inherited(handle, tier):
                self._retire(handle, tier, reason)

    def _why_reclaimed(self, handle: int, tier: int) -> Reason:
        if self.directory.is_below(handle, tier):
            return Reason.RECLAIMED
        return Reason.NOT_KEPT if self.directory.is_clean(handle, tier) else Reason.DROPPED_DIRTY

    def evict(self, handle: int, tier: int, incoming: int | None = None) -> Leaving:
        """Choose an idle READY copy of a persistent tier to be erased: nobody finds it there from now on."""
        self.levels[tier].policy.evict([handle], incoming)
        self.ranks.left([handle], tier)
        self.retire_ghosts(self.levels[tier].policy)
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
            self.ranks.left([handle], tier)
        if self.directory.move(handle, tier, move) is before:
            return  # LEAVING or RECLAIMED: it is on its way out already
        if not self.directory.is_held(handle, tier):
            self._finish(handle, tier, reason, quarantined=False)
            return
        self._reasons[handle, tier] = reason
        if (pool := self.levels[tier].pool) is not None:  # a transfer or a lease may still use the slot
            pool.quarantine(self.directory.place(handle, tier))
            overtaken = move is not Move.FAILED  # else its transfer has ended, and the slot is free in a moment
            self.counters.add_tier(tier, "quarantined", int(overtaken))

    def never_written(self, handle: int, tier: int) -> None:
        """The write of a copy that was dropped meanwhile failed: there is nothing to erase."""
        self._reasons[handle, tier] = Reason.FAILED

    def abandon(self, tier: int) -> None:
        """The memory of a tier is gone, with all that was in it. What others still hold there ends when they let go."""
        self.levels[tier].lost = True
        here = [h for h in self.directory.handles() if self.directory.state(h, tier) in (State.FILLING, State.READY)]
        for handle in here:
            self.counters.add_tier(tier, "device_lost")
            self.lose(handle, tier, Move.RECLAIM, Reason.LOST)

    def overtake(self, handle: int) -> None:
        """Drop a block everywhere: no lookup finds it from now on, late results are discarded."""
        top = self.directory.top(handle)
        if top is not None and self.directory.is_named(handle):
            self.journal.note(Forgotten(self.directory.key(handle), self.levels[top].name, Reason.DROPPED))
        self.directory.unname(handle)
        for gate in self._gates.values():
            gate.forget([handle])
        for tier, level in enumerate(self.levels):
            level.policy.forget([handle])
            if self.directory.state(handle, tier) is not State.GONE:
                self.lose(handle, tier, Move.RECLAIM, Reason.DROPPED)
        self.retire_unless_known(handle)  # of a ghost, nothing else was left

    def unhold(self, handles: Iterable[int], tier: int) -> None:
        """Let go of copies; the last one to let go of a RECLAIMED copy ends it."""
        for handle in self.directory.unhold(handles, tier):
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
                self.directory.hold([handle], tier)  # by the lease that owns the slot
                return True
            pool.vacate(heir)
        return False

    def _retire(self, handle: int, tier: int, reason: Reason) -> None:
        if self.directory.has_copy(handle):
            return
        if self.directory.is_named(handle):
            self.journal.note(Forgotten(self.directory.key(handle), self.levels[tier].name, reason))
        self._retire_unless_remembered(handle)

    def retire_ghosts(self, memory: Policy | Gate) -> None:
        """A policy, or a gate, has given up some of what it remembered."""
        for ghost in memory.forgotten():
            self.retire_unless_known(ghost)

    def retire_unless_known(self, handle: int) -> None:
        """Give up the handle of a block without copies that neither a policy nor a gate remembers."""
        if not self.directory.has_copy(handle):
            self._retire_unless_remembered(handle)

    def _retire_unless_remembered(self, handle: int) -> None:
        for level in self.levels:  # a loop: `any` of a generator takes three times as long
            if level.policy.remembers(handle) or (level.gate and level.gate.remembers(handle)):
                return
        self.directory.retire(handle)
