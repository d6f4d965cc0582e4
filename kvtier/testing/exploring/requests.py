"""`Requests`: what the callers of the cache hold, from lookup to release, and what they must find there.

Owns the matches, pending reservations and leases that callers have, and which bytes every slot of a lease must show
until it is given back. Always: a prefix that is served has the bytes of its keys, of the version that was valid when
it was asked for; slots to be written belong to nobody else.

Units: tokens, blocks, slots, seconds of simulated time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.cache.transitions import State
from kvtier.engine.polled import Reserve
from kvtier.errors import UsageError
from kvtier.testing.exploring.admitted import Admitted
from kvtier.testing.exploring.budget import Budget
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.promises import Pending, Promises
from kvtier.testing.exploring.sessions import Sessions
from kvtier.testing.exploring.streams import Coming
from kvtier.testing.exploring.truth import Named, Truth
from kvtier.testing.exploring.waiting import keys_of, point_of
from kvtier.types import BlockKey, StoreKey, group_of, store_key

STALE_MAX = 6


@dataclass(slots=True, eq=False)
class Held:
    """A lease, and what its slots must show."""

    lease: Lease
    keys: Keys
    fingerprint: bytes
    version: int
    shown: dict[int, bytes]  # by slot
    owed: list[tuple[int, BlockKey]]  # slots to compute and commit
    named: set[BlockKey]  # restored or committed
    coming: dict[int, Coming]  # slots that a stream will have filled, for who waits on it


class Requests:
    """All requests against one engine."""

    def __init__(self, engine: ExploredEngine, truth: Truth, sessions: Sessions, budget: Budget | None) -> None:
        self._engine = engine
        self._core = engine.core
        self._truth = truth
        self._sessions = sessions
        self.admitted = Admitted(engine, budget, self._found_unanswered)
        self.matches: list[Match] = []
        self.pending: dict[int, Pending] = {}
        self.leases: dict[int, Held] = {}
        self.stale: list[Lease] = []  # given back
        self._promises = Promises(engine, truth)
        self._lengths = [segments.block_bytes for segments in engine.specs]

    # ------------------------------------------------------------ lookups

    def match(self, keys: Keys, owner: str, tokens_max: int | None, ttl_s: float, session: str | None = None) -> Match:
        """Pin a prefix; it must be just as long as a look at every block says."""
        expected = self._promises.longest(keys, tokens_max)
        match = self._core.match(keys, owner, tokens_max, self._engine.clock.now() + ttl_s, session)
        self._sessions.came(session)
        assert match.tokens == expected, f"match found {match.tokens} tokens, {expected} are there"
        self._expect_alive(keys, match.tokens)
        return match

    def peek(self, keys: Keys, tokens_max: int | None) -> int:
        found = self._core.peek(keys, tokens_max)
        expected = self._promises.longest(keys, tokens_max)
        assert found.tokens == expected == sum(found.tiers.values()), f"peek found {found}, {expected} are there"
        self._expect_alive(keys, found.tokens)
        return found.tokens

    def _expect_alive(self, keys: Keys, tokens: int) -> None:
        for row, size in zip(keys.groups, keys.block_tokens, strict=True):
            for key in row[: tokens // size]:
                assert (self._engine.fingerprint, key) in self._truth.alive, "a block is found that was dropped"

    # ------------------------------------------------------------ reservations

    def reserve(self, match: Match, blocks: int, deadline_s: float, *, streamed: bool) -> int:
        """Ask for slots. What might be served is what may be served now."""
        promise = self._promises.over(match, blocks, deadline_s)
        ticket = self._engine.surface.submit(Reserve(match, blocks, deadline_s, streamed), self._engine.clock.now())
        self.expect(ticket, match.keys, blocks, match.owner)
        pending = self.pending[ticket]
        pending.promise, pending.session, pending.streamed = promise, match.session, streamed
        self.found_for(ticket, match)
        self._promises.expect_room_used(ticket, match)
        return ticket

    def found_for(self, ticket: int, match: Match) -> None:
        """If its answer is a lease, these blocks were used, or the first of them."""
        rows = match.keys.prefix(match.tokens).groups
        namespace = self._engine.namespace
        self.pending[ticket].covered = [store_key(namespace, key) for row in rows for key in row]

    def _found_unanswered(self) -> Counter[StoreKey]:
        return Counter(key for pending in self.pending.values() for key in pending.covered)

    def note_failed(self, keys: set[BlockKey]) -> None:
        """Loads of these blocks have failed: whoever waits for one has a reason for a shorter prefix."""
        for pending in self.pending.values():
            pending.spoiled |= not keys.isdisjoint(keys_of(pending))

    def expect(self, ticket: int, keys: Keys, blocks: int, owner: str) -> None:
        """An answer under this ticket will give slots for these keys."""
        fingerprint = self._engine.fingerprint
        named = ((fingerprint, key) for row in keys.groups for key in row)
        alive = {name: self._truth.alive[name] for name in named if name in self._truth.alive}
        slots = sum(-(-blocks * keys.block_tokens[0] // size) for size in keys.block_tokens)
        self.pending[ticket] = Pending(keys, owner, slots, fingerprint, self._truth.versions[fingerprint], alive)

    def answered(self, ticket: int, answer: Lease | NoRoom, *, late: bool) -> str:
        """A reservation has its answer. `late`: it may have been there for a while."""
        pending = self.pending.pop(ticket)
        if isinstance(answer, NoRoom):
            return f"ticket {ticket}: no room, {answer.slots_needed} needed, {answer.slots_available} available"
        assert not pending.dead, f"slots of a dead owner are handed out: {answer!r}"
        if pending.cancelled:
            self._keep_stale(answer)
            return f"ticket {ticket}: nobody waits for its answer"
        self.leases[ticket] = held = self.shown_by(answer, pending, late=late)
        self.admitted.used(store_key(answer.record.namespace, key) for key in held.named)
        return f"ticket {ticket}: {answer.tokens_ready} tokens ready"

    def shown_by(self, lease: Lease, pending: Pending, *, late: bool) -> Held:
        """Check what is served, and mark the slots to be written as this lease's own."""
        shown, owed = {}, []
        keys, named = pending.keys, set[BlockKey]()
        for group, (row, size) in enumerate(zip(keys.groups, keys.block_tokens, strict=True)):
            slots, ready = lease.table(group), lease.tokens_ready // size
            assert min((0, *slots[ready:])) == 0, "a slot to be written lies in host memory"
            named.update(row[:ready])
            for slot, key in zip(slots[:ready], row, strict=False):
                shown[slot] = self._served((pending.fingerprint, key), pending, late)
            for slot in slots[ready:]:
                assert slot not in shown, f"slot {slot} is to be read and to be written"
                shown[slot] = self.mark(slot, lease.lease_id)
            owed += list(zip(slots[ready:], row[ready:], strict=False))
        self._promises.expect_kept(lease, pending, late=late)
        coming: dict[int, Coming] = {}
        lease.wait(coming)
        assert pending.streamed or not coming, f"{lease!r} is to wait for a stream, and was not asked for so"
        held = Held(lease, keys, pending.fingerprint, pending.version, shown, owed, named, coming)
        self._note_ways(held)
        self.compare(held)
        return held

    def _note_ways(self, held: Held) -> None:
        if held.coming.keys() & held.shown.keys():
            self._engine.coverage.happened("streamed before it was there")
        if min((0, *held.shown)) < 0:
            self._engine.coverage.happened("read in host memory")

    def _served(self, named: Named, pending: Pending, late: bool) -> bytes:
        version = pending.alive.get(named) if late else self._truth.alive.get(named)
        assert version is not None, "a block is served that nobody has computed, or that was dropped"
        return self.content(named, version)

    def content(self, named: Named, version: int) -> bytes:
        return self._truth.content(named, version, self._lengths[group_of(named[1])])

    def mark(self, slot: int, lease_id: int) -> bytes:
        """Write into a slot of a lease's own what nobody else would."""
        mine = self._truth.content((b"lease", BlockKey(lease_id.to_bytes(8, "big"))), slot, min(self._lengths))
        self.write(slot, mine)
        return mine

    def write(self, slot: int, content: bytes) -> None:
        self._engine.top.slot(slot)[: len(content)] = content

    # ------------------------------------------------------------ leases

    def compare(self, held: Held) -> None:
        """Every slot of a lease shows what it must, from the answer (or once a stream has filled it) to the release."""
        for slot, content in held.shown.items():
            if slot in held.coming and not held.coming[slot].over:
                continue
            shown = self._engine.shown(slot)[: len(content)]
            assert shown == content, f"lease {held.lease.lease_id}: wrong bytes in slot {slot}"

    def commit(self, ticket: int, count: int) -> str:
        """Compute and publish up to `count` blocks, and once more one that is there already."""
        held = self.leases[ticket]
        pairs, held.owed = held.owed[:count], held.owed[count:]
        counted = self._core.counters.engine()["stale_commits"]
        stale = (held.fingerprint, held.version) != (self._engine.fingerprint, self._truth.versions[held.fingerprint])
        for slot, key in pairs:
            named = (held.fingerprint, key)
            version = self._truth.alive.get(named, self._truth.versions[named[0]])
            held.shown[slot] = self.content(named, held.version if stale else version)
            self.write(slot, held.shown[slot])
        self._core.commit(held.lease, pairs)
        counted = self._core.counters.engine()["stale_commits"] - counted
        assert counted == len(pairs) * stale, f"{counted} of {len(pairs)} commits are stale, should be: {stale}"
        if not stale:
            self.admitted.used(store_key(self._engine.namespace, key) for _, key in pairs)
        for _, key in pairs if not stale else ():
            held.named.add(key)
            self._truth.commit((held.fingerprint, key))
            assert self._is_known(key), "a block that was committed is not known"
        return f"{len(pairs)} blocks" + " that are stale" * stale

    def _is_known(self, key: BlockKey) -> bool:
        directory = self._engine.directory
        handle = directory.find(store_key(self._engine.namespace, key))
        return handle is not None and directory.state(handle, 0) is not State.GONE

    def release(self, ticket: int) -> None:
        held = self.leases.pop(ticket)
        self.compare(held)
        self._core.release_lease(held.lease)
        self._given_back(held)

    def release_owner(self, owner: str) -> int:
        """Its owner is dead. Returns how many leases are given back by that."""
        for pending in [pending for pending in self.pending.values() if pending.owner == owner]:
            pending.dead = True
            self._may_be_given_back(pending)
        theirs = [ticket for ticket, held in self.leases.items() if held.lease.record.owner == owner]
        for ticket in theirs:
            held = self.leases.pop(ticket)
            self.compare(held)
            self._given_back(held)
        return len(theirs)

    def _given_back(self, held: Held) -> None:
        record = held.lease.record
        sure = held.version == self._truth.versions[held.fingerprint]  # else a duplicate has lost its name
        named = (store_key(record.namespace, key) for key in held.named)
        self._sessions.served(record.match.session, named, sure=sure)
        self._keep_stale(held.lease)

    def _may_be_given_back(self, pending: Pending) -> None:
        """Nobody has fetched its answer, and now nobody will: there may be a lease or not."""
        namespace = self._engine.namespaces.find(pending.fingerprint)
        named = [] if namespace is None else [store_key(namespace, key) for key in keys_of(pending)]
        self._sessions.served(pending.session, named, sure=False)
        self.admitted.used(pending.covered)

    def _keep_stale(self, lease: Lease) -> None:
        self.stale = [*self.stale[1 - STALE_MAX :], lease]

    def misuse(self, lease: Lease) -> None:
        """Give back a lease once more, and commit under it: the first is harmless, the second refused."""
        self._core.release_lease(lease)
        keys = next(iter(self.leases.values())).keys if self.leases else None
        pairs = [(lease.record.slots[0][0], keys.groups[0][0])] if keys and keys.groups[0] else []
        self._expect_refused(lambda: lease.slots(0))
        self._expect_refused(lambda: self._core.commit(lease, pairs))

    def _expect_refused(self, misuse: Callable[[], object]) -> None:
        try:
            misuse()
        except UsageError:
            return
        raise AssertionError("a lease that was given back is good for something")

    # ------------------------------------------------------------ cancellation

    def cancel(self, ticket: int) -> str:
        """Nobody wants the answer any more. Returns the point at which that was."""
        point = point_of(self._engine, self.pending[ticket])
        self.pending[ticket].cancelled = True
        self._core.give_up(ticket)
        self._may_be_given_back(self.pending[ticket])
        return point

    def check_matches(self, blamed: set[StoreKey]) -> None:
        """What a match pins is there as long as it does, but for what was dropped, unreadable, or on a lost device."""
        directory, levels = self._engine.directory, self._core.residency.levels
        self.matches = [match for match in self.matches if match.pins]
        for match in self.matches:
            for handles, tier in match.pins:
                for handle in handles:
                    assert directory.is_held(handle, tier), f"{match!r} pins what nobody holds"
                    key = directory.key(handle)
                    lost = levels[tier].lost or not directory.is_named(handle) or key in blamed
                    assert lost or directory.is_ready(handle, tier), f"{match!r}: a pinned block went"
