"""`Promises`: what a reservation must find and get, as seen when it is asked for, and whether its lease keeps that.

Owns nothing but the records. Always: what is there is looked for block by block, under its key, in every tier that
works. A lease may be cut short of what the governor chose if its time was up, a load of its blocks failed, its tier was
given up or its namespace dropped, or if the disk had no way up; else never.

Units: tokens, seconds of simulated time.
"""

from dataclasses import dataclass, field

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.engine.breaker import Circuit
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.truth import Named, Truth
from kvtier.types import BlockKey, StoreKey, namespace_of, store_key


@dataclass(frozen=True, slots=True)
class Promise:
    """What was there when a reservation was asked for."""

    resident: int | None  # tokens, if all that was matched lies where it is read
    found: int | None  # tokens, if that can be told
    asked_s: float
    patience_s: float
    breaker_cuts: int  # of all reservations until then


@dataclass(slots=True, eq=False)
class Pending:
    """A reservation without an answer yet."""

    keys: Keys
    owner: str
    slots: int  # at most, over all groups
    fingerprint: bytes
    version: int  # of its namespace
    alive: dict[Named, int]  # what might be served to it
    promise: Promise | None = None  # None: a job asks for it
    session: str | None = None  # whose turn it is
    streamed: bool = False  # its kernels wait for what a stream brings
    covered: list[StoreKey] = field(default_factory=list)  # what was found for it
    from_disk: set[BlockKey] = field(default_factory=set)  # blocks whose fastest copy lay there
    joined: set[BlockKey] = field(default_factory=set)  # blocks that somebody else was bringing up already
    spoiled: bool = False  # a load of one of its blocks has failed
    waited: bool = False
    cancelled: bool = False
    dead: bool = False  # its owner is


class Promises:
    """Those of one engine."""

    def __init__(self, engine: ExploredEngine, truth: Truth) -> None:
        self._engine = engine
        self._truth = truth

    # ------------------------------------------------------------ what is there

    def longest(self, keys: Keys, tokens_max: int | None) -> int:
        """Block by block: the longest prefix of whole blocks in every group that has a READY copy."""
        limit = keys.tokens if tokens_max is None else min(keys.tokens, tokens_max)
        lengths = range(0, limit + 1, max(keys.block_tokens))
        rows = list(zip(keys.groups, keys.block_tokens, strict=True))
        there = [all(self._is_there(key) for row, size in rows for key in row[: n // size]) for n in lengths]
        return lengths[there.index(False) - 1 if False in there else len(there) - 1]

    def _is_there(self, key: BlockKey) -> bool:
        """Whether a READY copy lies in some tier that works."""
        directory, breakers = self._engine.directory, self._engine.core.planner.breakers
        handle = directory.find(store_key(self._engine.namespace, key))
        return handle is not None and any(
            directory.is_ready(handle, tier) and breakers.circuit(tier) is Circuit.CLOSED
            for tier in range(directory.tiers)
        )

    def over(self, match: Match, blocks_total: int, patience_s: float) -> Promise:
        """What a reservation of so many blocks over this match is promised now."""
        now_s = self._engine.clock.now()
        return Promise(self._resident(match), self._found(match, blocks_total), now_s, patience_s, self._breaker_cuts())

    def expect_room_used(self, ticket: int, match: Match) -> None:
        """Who is refused at once finds too few slots that are free or that nobody holds, whatever is kept for whom."""
        core, directory = self._engine.core, self._engine.directory
        refused = [answer for of, answer in core._leases.ended if of == ticket and isinstance(answer, NoRoom)]
        if refused:
            own = {handle for row in match.prefix.handles for handle in row}  # not to make room for itself
            idle = sum(not directory.is_held(handle, 0) for handle in directory.ready_in(0) if handle not in own)
            there = core.residency.levels[0].slots.slots_free + idle
            needed = refused[0].slots_needed
            assert there < needed, f"ticket {ticket} is refused for {needed} slots, {there} could be had"

    def _resident(self, match: Match) -> int | None:
        """The match's tokens, if all its blocks can be served as they lie; else None."""
        directory, namespace = self._engine.directory, self._engine.namespace
        handles = [handle for row in match.prefix.handles for handle in row]
        valid = all(namespace_of(directory.key(h)) == namespace and directory.is_named(h) for h in handles)
        read_in = range(self._engine.goal + 1)
        near = all(any(directory.is_ready(h, tier) for tier in read_in) for h in handles)
        there = bool(match.pins) and valid and near
        return match.tokens if there else None

    def _found(self, match: Match, blocks_total: int) -> int | None:
        """How much of a match a reservation over it must find; None if some of that was dropped since. One that holds
        nothing any more is looked up again."""
        directory = self._engine.directory
        if not match.pins or match.namespace != self._engine.namespace:
            room = blocks_total * match.keys.block_tokens[0]
            return self.longest(match.keys, room if match.tokens_max is None else min(room, match.tokens_max))
        named = all(directory.is_named(handle) for row in match.prefix.handles for handle in row)
        return self.longest(match.keys, match.tokens) if named else None

    def _breaker_cuts(self) -> int:
        return self._engine.core.counters.engine()["breaker_cuts"]

    # ------------------------------------------------------------ what came of it

    def expect_kept(self, lease: Lease, pending: Pending, *, late: bool) -> None:
        """`late`: the answer may have been there for a while."""
        self._expect_decided(lease)
        if pending.promise is None:
            return
        self._expect_found(lease, pending.promise)
        if late:
            return
        self._expect_served(lease, pending, pending.promise)
        if pending.promise.resident is not None:
            assert lease.tokens_ready == pending.promise.resident, f"more was ready: {lease!r}, {pending.promise}"
            assert self._engine.clock.now() == pending.promise.asked_s, "an answer that needs no transfer came late"

    def _expect_decided(self, lease: Lease) -> None:
        """The governor says what it chose, and no more than that is ready."""
        decision, governed = lease.decision, self._engine.setup.governed
        all_of_it = decision.tokens_chosen == decision.tokens_found
        assert all_of_it == (decision.why not in ("slower", "deadline")), f"{decision} contradicts itself"
        assert lease.tokens_ready <= decision.tokens_chosen, f"{lease!r} is ready beyond {decision}"
        assert governed == (decision.why != "off") or decision.why == "resident", f"{decision}, governed: {governed}"
        self._engine.coverage.happened(f"decision: {decision.why}")

    def _expect_found(self, lease: Lease, promise: Promise) -> None:
        """The governor chose of all that was there, and gave it all the time there was."""
        decision = lease.decision
        if promise.found is not None:
            assert decision.tokens_found == promise.found, f"{decision}: {promise.found} tokens were there"
        shortened = lease.record.deadline_s < promise.asked_s + promise.patience_s
        assert not shortened or (self._engine.setup.governed and decision.prefill_s is not None), "its time was cut"

    def _expect_served(self, lease: Lease, pending: Pending, promise: Promise) -> None:
        """What was chosen is served in full, or there is a reason."""
        if lease.tokens_ready == lease.decision.tokens_chosen:
            return
        excuses = {
            "late": self._engine.clock.now() >= lease.record.deadline_s,
            "failed": pending.spoiled,
            "a tier that fails": self._breaker_cuts() > promise.breaker_cuts,
            "dropped": self._truth.versions[pending.fingerprint] != pending.version,
            "no way": bool(pending.from_disk) and not self._engine.setup.direct,  # memory on the way was full
        }
        assert any(excuses.values()), f"{lease!r} is cut for no reason: {lease.decision}"
