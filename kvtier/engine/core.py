"""The polled core: every verb of the cache as a plain function that neither waits nor reads a clock.

    ticket = core.submit_reserve(match, ...)      questions that need I/O get a ticket
    for batch in core.plan(now): ...              what to move now; somebody carries it out
    core.apply(BatchDone(...), now)               and says how it ended
    core.poll()                                   tickets that have their answer

It has one caller at a time: the engine's thread, a scheduler that must not wait, or the simulator. Always: the
directory, the pools and the policies agree (`check()`), and no answer depends on a transfer that is not acknowledged.

Units: tokens, slots, bytes, seconds of the caller's clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvtier.blocks.hashing import Keys
from kvtier.blocks.layer_parts import layer_parts
from kvtier.blocks.namespace import NamespaceTable
from kvtier.blocks.spec import block_specs
from kvtier.cache.account import recount, stats_of
from kvtier.cache.adoption import adopt
from kvtier.cache.leases import Arrival, Found, Lease, Match, NoRoom, Phase
from kvtier.cache.level import Level
from kvtier.cache.prefix import longest_prefix
from kvtier.cache.residency import Residency
from kvtier.engine import arguments
from kvtier.engine.answers import Answer, Dropped, Flushed
from kvtier.engine.governor import Governor
from kvtier.engine.hints import Advice, Hints
from kvtier.engine.matches import Matches
from kvtier.engine.planner import Planner
from kvtier.engine.prefetch import Prefetch
from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.rates import Rates
from kvtier.engine.reservations import Reservations
from kvtier.engine.sidecar import Sidecars
from kvtier.engine.tier_memory import TierMemory
from kvtier.engine.traced import Traced
from kvtier.errors import UsageError
from kvtier.metrics import Counters
from kvtier.types import BatchDone, BlockKey, ModelSpec, StoredBlock, TransferBatch, namespace_of, store_key

T = TypeVar("T")


class Core:
    """Deciding code of one cache: matches, leases, plans and counters over a list of levels, fastest first."""

    def __init__(
        self,
        model: ModelSpec,
        levels: Sequence[Level],
        namespaces: NamespaceTable,
        *,
        queue_bytes: int = 256 << 20,
        prefetch_budget: float = 0.25,
        lookahead_requests: int = 8,
        governed: bool = True,
        prefill_tokens_per_s: float | None = None,
        epoch_ms: int = 0,
        pin_quota: float = 0.25,
    ) -> None:
        """governed: load nothing that is computed faster.

        prefill_tokens_per_s: how fast the engine computes, until it reports that (`prefilled`); None: unknown.
        epoch_ms: what the wall clock shows, in ms since 1970, when the clock whose seconds are passed in is at 0.
        pin_quota: the share of each tier that hints may keep there.
        """
        self.model = model
        self._namespaces = namespaces
        self._namespace = namespaces.id_of_model(model)
        self._sizes = tuple(group.block_tokens for group in model.groups)
        self._names = [level.name for level in levels]
        self.counters = Counters(self._names)
        self.residency = Residency(levels, self.counters, namespaces, pin_quota)
        self._directory = self.residency.directory
        self._sidecars = Sidecars(self.residency, rates := Rates(), epoch_ms)
        specs = block_specs(model)
        self.planner = Planner(self.residency, self._sidecars, rates, queue_bytes, layer_parts(specs))
        self._prefetch = Prefetch(self.residency, self.planner.promotions, prefetch_budget, lookahead_requests)
        self._prefill = PrefillSpeed(prefill_tokens_per_s)
        promotions = self.planner.promotions
        governor = Governor(self.residency, promotions, rates, self._prefill, specs, self._sizes, governed)
        self.hints = Hints(self.residency)
        self.traced = Traced(self.counters)
        self._leases = Reservations(self.residency, self.planner, governor, self.hints, specs, self._sizes)
        self._matches = Matches(self.residency, self._sizes)
        self._memory = TierMemory(self.planner, self._leases, self._prefetch, self._matches.held, self._look_again)
        self._answers: list[tuple[int, Answer]] = []
        self._last_id = 0

    # ------------------------------------------------------------ start

    def adopt(
        self, tier: int, stored: Iterable[StoredBlock], sidecar: Iterable[tuple[bytes, bytes]] = (), now_s: float = 0.0
    ) -> None:
        """Take what a persistent tier has kept, oldest first, into the directory. Before anything else."""
        rows = dict(sidecar)
        adopt(self.residency, tier, stored, rows)
        self._sidecars.found(tier, rows)
        self._sidecars.opened(now_s)

    # ------------------------------------------------------------ sought

    def match(
        self, keys: Keys, owner: str, tokens_max: int | None, expires_at_s: float, session: str | None = None
    ) -> Match:
        """Pin the longest prefix that is in any tier. session: whose turn it is, by which `hint` calls its blocks."""
        self._check_keys(keys)
        match = self.blank_match(keys, owner, tokens_max)
        match.session, match.traced = session, False
        self.hints.came(session)
        match.expires_at_s = expires_at_s
        self._matches.look(match, self._namespace)
        asked = keys.tokens if tokens_max is None else min(tokens_max, keys.tokens)
        self.counters.looked_up(asked, [match.tiers[name] for name in self._names])
        return match

    def blank_match(self, keys: Keys, owner: str, tokens_max: int | None) -> Match:
        """A match that has not looked yet: it pins nothing and is not counted."""
        name = arguments.instance("owner", owner, str)  # by which `release_owner` finds it
        return Match(self.new_id(), self, self._namespace, name, keys, tokens_max)

    def peek(self, keys: Keys, tokens_max: int | None = None) -> Found:
        """Ask the same and pin nothing."""
        self._check_keys(keys)
        prefix = longest_prefix(self._directory, self._namespace, keys, tokens_max)
        return Found(prefix.tokens, self._matches.tiers_of(prefix))

    def missing(self, keys: Keys) -> tuple[BlockKey, ...]:
        """The keys that have no copy in any tier."""
        self._check_keys(keys)
        found, namespace = self._directory.is_found, self._namespace
        return tuple(key for group in keys.groups for key in group if not found(store_key(namespace, key)))

    def prefetch(self, keys: Keys, now_s: float) -> None:
        """Announce a request: what of it lies only on disk comes into memory, within the budget. Never waits."""
        self._check_keys(keys)
        self._prefetch.hint(keys, self._namespace, now_s)

    def hint(self, session: str, advice: Advice, now_s: float) -> None:
        """Something is said of a session that `match` has named."""
        self.traced.said(session, advice, now_s)
        self.hints.advise(session, advice, now_s)

    # ------------------------------------------------------------ placed

    def submit_reserve(
        self, match: Match, blocks_total: int, deadline_s: float, now_s: float, *, streamed: bool = False
    ) -> int:
        """Ask for slots; the answer (`Lease` or `NoRoom`) comes from `poll` under the ticket.

        streamed: do not wait for what a device's stream has taken; the lease is told what to wait for.
        """
        self._expect_ours(match, match.home)
        if blocks_total < 1:
            raise UsageError(f"blocks_total={blocks_total}: a lease has at least one block")
        self.counters.add("reserves")
        self.hints.watch(now_s)
        namespace = self._namespaces.fingerprint_of(self._namespace)  # which is the match's, or will be
        self.traced.note(match, blocks_total * self._sizes[0], namespace, now_s)
        if not match.pins or match.namespace != self._namespace:
            # Expired, consumed, released or of other weights. What others have committed since may be more than fits.
            self._matches.look(match, self._namespace, blocks_total * self._sizes[0])
        ticket = self.new_id()
        self._leases.begin(ticket, match, blocks_total, deadline_s, now_s, streamed=streamed)
        self._prefetch.used([h for handles in match.prefix.handles for h in handles])
        return ticket

    def commit(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Publish the keys of slots that the lease has written.

        If since the lease was taken the weights have changed or its namespace was dropped, nobody can say with which
        ones its slots were written: nothing is published (counted `stale_commits`).
        """
        self._expect_ours(lease, lease.record.match.home)
        stale = self._is_stale(lease)
        self.counters.add("stale_commits", len(pairs) * stale)
        self._leases.commit(lease, () if stale else pairs)

    def promise_commit(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Check a commit whose work is still under way; `commit_promised` publishes it. Raises as `commit` does."""
        self._expect_ours(lease, lease.record.match.home)
        self._leases.promise(lease, pairs)

    def commit_promised(self, lease: Lease, pairs: Sequence[tuple[int, BlockKey]]) -> None:
        """Its work is over. Nothing is published if the lease or its slots are gone meanwhile (`stale_commits`)."""
        if lease.record.phase is Phase.ACTIVE and not self.residency.levels[0].lost:
            self.commit(lease, pairs)
        else:
            self.counters.add("stale_commits", len(pairs))

    def may_publish(self, lease: Lease) -> bool:
        """Whether a commit under this lease would still publish something."""
        return lease.record.phase is Phase.ACTIVE and not self._is_stale(lease)

    def _is_stale(self, lease: Lease) -> bool:
        return lease.record.namespace != self._namespace or self._leases.is_stale(lease)

    def prefilled(self, start: int, tokens: int, seconds: float) -> None:
        """The engine has computed `tokens` tokens behind the first `start` ones of a prompt in so many seconds."""
        self._prefill.observe(start, tokens, seconds)

    def expect_lease(self, lease: Lease) -> None:
        """Raises UsageError for a lease of another cache."""
        self._expect_ours(lease, lease.record.match.home)

    def release_lease(self, lease: Lease) -> None:
        """Give a lease back. Idempotent."""
        self.expect_lease(lease)
        self._leases.release(lease.lease_id)

    def give_up(self, ticket: int) -> None:
        """Nobody wants the answer to a reservation any more; its lease, if there is one already, is given back."""
        self._leases.release(ticket)

    def release_owner(self, owner: str) -> int:
        """Its owner is dead: give back all leases, pending reservations and matches in this name. How many?"""
        matches = self._matches.of_owner(owner)
        for match in matches:
            self.release_match(match)
        return self._leases.release_owner(owner) + len(matches)

    def release_match(self, match: Match) -> None:
        """Let go of a match's pins. Idempotent."""
        self._expect_ours(match, match.home)
        self._matches.release(match)

    def _expect_ours(self, held: Match | Lease, home: object) -> None:
        if home is not self:
            raise UsageError(f"{held!r} belongs to another cache, or to this one before it was closed")

    # ------------------------------------------------------------ kept and dropped

    def submit_flush(self) -> int:
        """Copy all that lies only in memory to the lowest persistent tier; `Flushed` comes from `poll`."""
        ticket = self.new_id()
        self.planner.demotions.flush(ticket)
        return ticket

    def submit_drop(self, fingerprint: bytes | None = None) -> int:
        """Forget a namespace (None: the current one) in all tiers; `Dropped` comes from `poll`, once durable."""
        namespace = self._namespace if fingerprint is None else self._namespaces.find(fingerprint)
        if namespace is None:
            raise UsageError(f"no namespace {fingerprint!r} is known here; pass a fingerprint of 32 bytes")
        ticket = self.new_id()
        handles = [h for h in self._directory.handles() if namespace_of(self._directory.key(h)) == namespace]
        self._leases.dropped(namespace)
        if namespace == self._namespace:
            self._prefetch.forget()
        self.planner.drops.begin(ticket, namespace, handles)
        return ticket

    def submit_resize(self, tier_name: str, size_bytes: int) -> int:
        """Give a tier more or less memory; `Resized` (DeviceLost, if that happens meanwhile) comes from `poll`."""
        self._memory.resize(ticket := self.new_id(), tier_name, size_bytes)
        return ticket

    def refuse_if_lost(self) -> None:
        """Raises DeviceLost if the top tier's device is gone."""
        self.residency.levels[0].expect_device()

    def submit_sleep(self) -> int:
        """Give all memory of the top tier back, contents copied down first; `Slept` comes from `poll`."""
        self._memory.sleep(ticket := self.new_id())
        return ticket

    def submit_wake(self, *, restore: bool = True) -> int:
        """Map that memory again, as much as there is, and bring back what lay in it; `Woken` comes from `poll`."""
        self._memory.wake(ticket := self.new_id(), restore=restore)
        return ticket

    def set_weights_epoch(self, epoch: str) -> None:
        """From now on look up and commit under another epoch of the weights; older blocks age out."""
        if not epoch or epoch == "auto" or not epoch.isprintable():
            raise UsageError(f"epoch {epoch!r} is no weights epoch: a text that changes when the weights change")
        self.model = replace(self.model, weights_epoch=epoch)
        self._namespace = self._namespaces.id_of_model(self.model)
        self._prefetch.forget()

    # ------------------------------------------------------------ polled

    def plan(self, now_s: float) -> list[TransferBatch]:
        """What should move now. Each batch must be answered by exactly one `apply`."""
        self._leases.expire(now_s)
        self._matches.expire(now_s)
        self.hints.watch(now_s)
        self.planner.watch(now_s)
        self._give_up_on_tiers()
        self._prefetch.advance(now_s)
        self._leases.resolved(self.planner.promotions.end_lost())
        return self._memory.plan(now_s)

    def enqueued(self, batch_id: int, arrival: Arrival) -> None:
        """A stream of the top tier has taken a batch, whose acknowledgement follows: `arrival` is to be waited for."""
        self._leases.enqueued(self.planner.enqueued(batch_id, arrival))

    def apply(self, done: BatchDone, now_s: float) -> None:
        """Take a batch's terminal acknowledgement."""
        resolved = self.planner.apply(done, now_s)
        self._prefetch.failed(self.planner.failed_loads)
        self.planner.failed_loads.clear()
        for tier in self.planner.devices_lost:  # before leases take their failed loads for misses
            self.lose_device(tier)
        self.planner.devices_lost.clear()
        self._leases.resolved(resolved)
        self._give_up_on_tiers()

    def lose_device(self, tier: int = 0) -> None:
        """The device of a tier is gone: nothing of what it held is found any more, nobody gets a slot there."""
        if not self.residency.levels[tier].lost:
            self.residency.abandon(tier)
            self._leases.device_lost()
            lost = self.residency.levels[tier].device_lost()
            self._answers += [(ticket, lost) for ticket in self._memory.give_up(tier)]

    def _give_up_on_tiers(self) -> None:
        """Nobody waits for a tier whose breaker has just opened."""
        for tier in self.planner.breakers.newly_open():
            self._leases.give_up_on(tier)

    def poll(self) -> list[tuple[int, Answer]]:
        """Tickets answered since the last call. Each is reported once."""
        for ticket, answer in self._leases.ended:
            self._answers.append((ticket, self.current(answer)))
            if isinstance(answer, Lease):  # its match is consumed
                self._matches.consumed(answer.record.match)
        self._leases.ended.clear()
        self._answers += [(ticket, Dropped(done)) for ticket, done in self.planner.drops.ended()]
        self._answers += self._memory.answers()
        ended = [] if self.planner.order_waits else self.planner.demotions.flushes.ended()
        self._answers += [(ticket, Flushed(*how)) for ticket, *how in ended]
        answers, self._answers = self._answers, []
        return answers

    def current(self, answer: T) -> T | NoRoom:
        """An answer that nobody has fetched yet: a lease that was given back meanwhile is none any more."""
        if not isinstance(answer, Lease) or answer.record.phase is not Phase.RELEASED:
            return answer
        return NoRoom(sum(map(len, answer.record.slots)), self.residency.takeable(0, drop_dirty=True))

    def wake_at_s(self, now_s: float) -> float | None:
        """When to plan again though nothing happens."""
        times = [
            self.planner.wake_at_s(now_s),
            self._leases.next_deadline_s(),
            self._prefetch.next_expiry_s(),
            self._matches.next_expiry_s(),
        ]
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def busy(self) -> bool:
        """Transfers are under way or wait for their turn."""
        return len(self.planner.flight) > 0 or self.planner.promotions.waiting > 0

    # ------------------------------------------------------------ asked

    def stats(self) -> dict[str, Any]:
        """Counters and sizes as plain data; reading them changes nothing."""
        return {
            "blocks": len(self._directory) - (ghosts := self._directory.ghosts()),
            "ghosts": ghosts,
            "leases": len(self._leases),
            "matches": len(self._matches),
            "sessions": len(self.hints),
            "batches_in_flight": len(self.planner.flight),
            **self.counters.engine(),
            "tiers": {
                name: stats_of(self.residency, tier) | self.planner.stats(tier) for tier, name in enumerate(self._names)
            },
        }

    def unsaved(self) -> int:
        """Blocks that are in memory only although the lowest tier is persistent."""
        return len(self.planner.demotions.dirty())

    def check(self) -> list[str]:
        """Recount everything; an empty list means all invariants hold."""
        return recount(self.residency)

    # ------------------------------------------------------------ inside

    def _look_again(self, match: Match) -> None:
        """Pin what a match finds now, unless it was made under other weights."""
        if match.namespace == self._namespace:
            self._matches.look(match, self._namespace)

    def _check_keys(self, keys: Keys) -> None:
        if not isinstance(keys, Keys) or keys.block_tokens != self._sizes:
            raise UsageError("these keys were not made for this model; use hash_blocks(tokens, config.model)")

    def new_id(self) -> int:
        """A number for a match, a ticket or a lease that no other has."""
        self._last_id += 1
        return self._last_id
