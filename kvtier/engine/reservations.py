"""Leases: from a match to slots, through promotion, commit and release.

Owns the lease records. A reservation takes all its slots at once or none. The prefix that lies in the top tier is
shared and held; what lies below is promoted into placed copies that anybody may join (one transfer per key), or read
where it is, if the top tier's readers can; the rest of the slots are private to the lease until it commits them. When
the last promotion ended, failed or met its deadline, the lease is settled (`Settlement`).

Units: handles, slots, tokens, seconds of the engine's clock.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from kvtier.blocks.spec import BlockSpec
from kvtier.cache.lease_slots import shared_and_private
from kvtier.cache.leases import Lease, LeaseRecord, Match, NoRoom, Phase
from kvtier.cache.pins import unpin_tier
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import Move, State
from kvtier.engine.commits import Commits
from kvtier.engine.governor import Governor
from kvtier.engine.hints import Hints
from kvtier.engine.lease_counts import count_decision
from kvtier.engine.planner import Planner
from kvtier.engine.settlement import Settlement
from kvtier.errors import DeviceLost, UsageError
from kvtier.events import Reason
from kvtier.policies.base import Access
from kvtier.types import BlockKey, store_key

OWNERS_TOLD = 3
IN_PLACE = -1  # where a slot of the tier below will be named, once all that is waited for is there


class Reservations:
    """All leases of the engine. `ended` collects those whose `reserve` has its answer."""

    def __init__(
        self,
        residency: Residency,
        planner: Planner,
        governor: Governor,
        hints: Hints,
        specs: Sequence[BlockSpec],
        sizes: Sequence[int],
    ) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = planner.promotions
        self._goal = planner.promotions.goal
        self._governor = governor
        self._hints = hints
        self._commits = Commits(residency, specs)
        self._settlement = Settlement(residency, planner.promotions, governor, sizes)
        self._sizes = tuple(sizes)  # block_tokens of each group
        self._layers = frozenset(segment.layer for spec in specs for segment in spec.segments)
        self._records: dict[int, LeaseRecord] = {}
        self._waiters: dict[int, set[int]] = {}  # handle -> leases that wait for its promotion
        self._eras: Counter[int] = Counter()  # namespace -> how often it was dropped
        self.ended: list[tuple[int, Lease | NoRoom | DeviceLost]] = []

    def __len__(self) -> int:
        return len(self._records)

    # ------------------------------------------------------------ reserve

    def begin(
        self, ticket: int, match: Match, blocks_total: int, deadline_s: float, now_s: float, *, streamed: bool = False
    ) -> None:
        """Take slots for `blocks_total` blocks of group 0 (the same tokens in every group); the answer is in `ended`.

        A pending one is ended by `release` under its ticket, too.
        """
        tokens_total = blocks_total * self._sizes[0]
        if tokens_total < match.tokens:
            raise UsageError(f"blocks_total={blocks_total} covers {tokens_total} tokens, the match has {match.tokens}")
        self._residency.levels[0].expect_awake()
        hits, sources = self._available(match)
        decision = self._governor.choose(hits, sources, deadline_s, now_s)
        count_decision(self._residency.counters, decision)
        deadline_s = min(deadline_s, now_s + self._governor.patience_s(decision))
        era, tokens = self._eras[match.namespace], decision.tokens_chosen
        record = LeaseRecord(ticket, match.owner, match, match.namespace, era, tokens, decision, deadline_s)
        record.layers, record.streamed = self._layers, streamed
        keep = [tokens // size for size in self._sizes]
        record.hits = [row[:count] for row, count in zip(hits, keep, strict=True)]
        record.sources = [row[:count] for row, count in zip(sources, keep, strict=True)]
        totals = [-(-tokens_total // size) for size in self._sizes]
        resident = [h for h in _flat(record.hits) if self._directory.state(h, 0) is not State.GONE]
        self._directory.hold(resident, 0)
        count = sum(totals) - (sum(map(len, record.hits)) if self._goal else len(resident))
        slots = self._residency.take(0, count, drop_dirty=True, incoming=self._first_new(match, record.hits))
        if slots is None:
            self._residency.unhold(resident, 0)
            self._refuse(record, count)
            return
        self._records[ticket] = record
        self._assign(record, totals, iter(slots), set(resident))
        if any(map(self._promotions.is_stalled, record.waiting)):
            unpin_tier(self._residency, match, 1)  # not to wait for itself: what its loads read they hold
        self._governor.measure_again(hits, sources, decision, now_s)
        self._settle_if_complete(record)

    def _available(self, match: Match) -> tuple[list[list[int]], list[Sequence[int]]]:
        """The match's blocks, up to the first that is lost or was condemned since."""
        hits: list[list[int]] = []
        sources: list[Sequence[int]] = []
        for handles in match.prefix.handles:
            tops = [self._directory.fastest(h) for h in handles]
            known = tops.index(None) if None in tops else len(tops)
            hits.append(list(handles[:known]))
            sources.append([top for top in tops[:known] if top is not None])
        return hits, sources

    def _first_new(self, match: Match, hits: list[list[int]]) -> int | None:
        """The first block that will enter the top tier, if it has a handle: by promotion, or as a policy's ghost."""
        below = (h for h in _flat(hits) if not self._goal and self._directory.state(h, 0) is State.GONE)
        following = (
            keys[len(known)] for keys, known in zip(match.keys.groups, hits, strict=True) if keys[len(known) :]
        )
        ghosts = (self._directory.find(store_key(match.namespace, key)) for key in following)
        return next((handle for handle in chain(below, ghosts) if handle is not None), None)

    def _assign(self, record: LeaseRecord, totals: list[int], slots: Iterator[int], resident: set[int]) -> None:
        """Give every block its slot, and start the promotions in prefix order."""
        for group, handles in enumerate(record.hits):
            row: list[int] = []
            for handle in handles:
                if handle in resident:
                    row.append(self._directory.place(handle, 0))
                    if self._directory.state(handle, 0) is State.FILLING:
                        self._wait_for(record, handle)
                        self._promotions.urge(handle, record.deadline_s, streamed=record.streamed)
                elif self._goal:
                    row.append(IN_PLACE)
                    self._read_in_place(record, handle)
                else:
                    row.append(slot := next(slots))
                    self._promote(record, handle, slot)
            fresh = [next(slots) for _ in range(totals[group] - len(handles))]
            record.writable.update(fresh)
            record.slots.append(row + fresh)

    def _promote(self, record: LeaseRecord, handle: int, slot: int) -> None:
        self._residency.place(handle, 0, slot)
        self._directory.hold([handle], 0)
        if self._promotions.start(handle, record.deadline_s, streamed=record.streamed):
            self._wait_for(record, handle)
        else:
            record.failed = True  # nothing below can reach the top: settled as a miss, which frees the slot
            self._residency.lose(handle, 0, Move.FAILED, Reason.FAILED)

    def _read_in_place(self, record: LeaseRecord, handle: int) -> None:
        """Hold the copy below the top, once it is there."""
        if self._directory.is_ready(handle, self._goal):
            self._hold_in_place(record, handle)
        elif self._promotions.joined(handle, record.deadline_s) or self._promotions.start(handle, record.deadline_s):
            self._wait_for(record, handle)
        else:
            record.failed = True

    def _hold_in_place(self, record: LeaseRecord, handle: int) -> None:
        self._directory.hold([handle], self._goal)
        record.in_place.add(handle)

    def _wait_for(self, record: LeaseRecord, handle: int) -> None:
        if self._settlement.comes(record, handle):
            return
        record.waiting.add(handle)
        self._waiters.setdefault(handle, set()).add(record.lease_id)

    # ------------------------------------------------------------ settle

    def give_up_on(self, tier: int) -> None:
        """Settle with what is there the leases that wait for something from a tier that fails or hangs."""
        coming = self._promotions.coming_from(tier)
        waiting = [r for r in self._records.values() if r.phase is Phase.LOADING and not r.waiting.isdisjoint(coming)]
        for record in waiting:
            self._residency.counters.add("breaker_cuts")
            self._stop_waiting(record)
            self._settle(record)

    def refuse_if_leased(self) -> None:
        """Raises UsageError, with the owners, while somebody holds slots or waits for some."""
        if self._records:
            owners = sorted({record.owner for record in self._records.values()})
            more = f" and {len(owners) - OWNERS_TOLD} more" if len(owners) > OWNERS_TOLD else ""
            raise UsageError(
                f"{len(self._records)} leases hold slots of the fastest tier, or wait for some, in the name of "
                f"{', '.join(map(repr, owners[:OWNERS_TOLD]))}{more}: release them before it sleeps"
            )

    def device_lost(self) -> None:
        """Nobody waits for slots that are gone; what is leased stays so until it is released."""
        for record in [r for r in self._records.values() if r.phase is Phase.LOADING]:
            self._forget(record)
            self.ended.append((record.lease_id, self._residency.levels[0].device_lost()))

    def enqueued(self, handles: Sequence[int]) -> None:
        """A stream brings these blocks: leases that were reserved so wait for them no more, their kernels do."""
        for handle in handles:
            for record in [self._records[lease_id] for lease_id in self._waiters.get(handle, ())]:
                if self._settlement.comes(record, handle):
                    record.waiting.remove(handle)
                    self._waiters[handle].discard(record.lease_id)
                    self._settle_if_complete(record)
            if handle in self._waiters and not self._waiters[handle]:
                del self._waiters[handle]

    def resolved(self, handles: Sequence[int]) -> None:
        """Promotions of these blocks ended, well or not."""
        for handle in handles:
            for lease_id in self._waiters.pop(handle, set()):
                record = self._records[lease_id]
                record.waiting.discard(handle)
                record.failed |= not self._directory.is_ready(handle, self._goal)
                if self._goal and self._directory.is_ready(handle, self._goal):
                    self._hold_in_place(record, handle)
                self._settle_if_complete(record)

    def expire(self, now_s: float) -> None:
        """Settle with what is there the leases that would wait beyond their deadline."""
        late = [r for r in self._records.values() if r.phase is Phase.LOADING and r.deadline_s <= now_s]
        for record in late:
            self._residency.counters.add("deadline_cuts")
            self._stop_waiting(record)
            self._settle(record)

    def next_deadline_s(self) -> float | None:
        loading = (r.deadline_s for r in self._records.values() if r.phase is Phase.LOADING)
        return min(loading, default=None)

    def _settle_if_complete(self, record: LeaseRecord) -> None:
        if record.phase is Phase.LOADING and not record.waiting:
            self._settle(record)

    def _stop_waiting(self, record: LeaseRecord) -> None:
        for handle in record.waiting:
            waiters = self._waiters[handle]
            waiters.discard(record.lease_id)
            if not waiters:
                del self._waiters[handle]
                self._promotions.give_up(handle)
        record.waiting.clear()

    def _settle(self, record: LeaseRecord) -> None:
        needed = sum(len(slots) for slots in record.slots)
        lease = self._settlement.settle(record)
        if lease is None:
            self._forget(record)
            self._refuse(record, needed)
        else:
            self.ended.append((record.lease_id, lease))

    # ------------------------------------------------------------ commit and release

    def commit(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Publish the keys of slots that the lease has written. All pairs are checked before the first is published."""
        self._residency.levels[0].expect_awake()
        record = self._active(lease)
        self._commits.check(record, pairs)
        self._commits.publish(record, pairs)

    def promise(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """These slots get these names when the work on them is over. Raises as `commit` does, and promises nothing."""
        self._residency.levels[0].expect_awake()
        record = self._active(lease)
        self._commits.check(record, pairs)
        record.promised |= dict(pairs)

    def dropped(self, namespace: int) -> None:
        """What leases of now compute was begun before the drop, with old weights, say: none of it is published."""
        self._eras[namespace] += 1

    def is_stale(self, lease: Lease) -> bool:
        """Whether the lease's namespace was dropped since it was taken."""
        return lease.record.era != self._eras[lease.record.namespace]

    def _active(self, lease: Lease) -> LeaseRecord:
        record = self._records.get(lease.lease_id)
        if record is None or record.phase is not Phase.ACTIVE:
            raise UsageError(f"{lease!r} was released: nothing can be committed under it")
        return record

    def release(self, lease_id: int) -> None:
        """Give a lease back, or give up a reservation that still loads (its match stays valid). Idempotent."""
        record = self._records.get(lease_id)
        if record is not None:
            if record.phase is Phase.ACTIVE:
                self._hints.served(record.match.session, self._settlement.touch(record, Access.RELEASE))
            self._forget(record)

    def release_owner(self, owner: str) -> int:
        """Give back all leases in this name; pending reservations are refused. Returns how many there were."""
        theirs = [record for record in self._records.values() if record.owner == owner]
        for record in theirs:
            pending = record.phase is Phase.LOADING
            self.release(record.lease_id)
            if pending:
                self._refuse(record, sum(len(slots) for slots in record.slots))
        return len(theirs)

    def _refuse(self, record: LeaseRecord, slots_needed: int) -> None:
        self._residency.counters.add("no_room")
        self.ended.append((record.lease_id, NoRoom(slots_needed, self._residency.takeable(0, drop_dirty=True))))

    def _forget(self, record: LeaseRecord) -> None:
        self._stop_waiting(record)
        record.phase = Phase.RELEASED
        del self._records[record.lease_id]
        pool = self._residency.levels[0].slots
        shared, private = shared_and_private(record, pool, self._directory)
        pool.give(private)
        self._residency.unhold(shared, 0)
        self._residency.unhold(record.in_place, self._goal)
        record.in_place.clear()


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [item for row in rows for item in row]
