"""Several tiers: requests of a trace through the production core, on a clock that is moved from event to event.

    arrival --> waits for its turn --> match, reserve --> loads --> waits for the engine, prefill --> commit, release

Core, directory, planner, policies and governor are the product's own; the tiers (`tier_model`) say when a batch ends,
the engine (`prefill_model`) when a prompt is computed. Nothing waits and no byte moves.

Owns: the events to come, and each request on its way. Always: time never goes back; of events at one time the older
one comes first; every batch that the core plans is acknowledged once. Only whole blocks have a name, and the last
token of a prompt is always computed, as in the product. Units: tokens, blocks, seconds of the simulated clock, which
is at 0 when the first request arrives.
"""

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.blocks.hashing import Keys
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.clock import ManualClock
from kvtier.engine.core import Core
from kvtier.sim.lanes import Lanes
from kvtier.sim.prefill_model import PrefillModel
from kvtier.sim.setup import Setup
from kvtier.sim.telling import Telling
from kvtier.sim.trace import Trace, TracedHint, TracedRequest
from kvtier.types import store_key

NAME_BYTES = 8  # of a block's hash, made of its number
MATCH_TTL_S = 1e9  # a match is used as soon as it is made
Progress = Callable[[int], None]  # requests since the last call


@dataclass(slots=True)
class _Served:
    """A request on its way. number: in the trace, which is the order of arrival."""

    number: int
    request: TracedRequest
    arrived_s: float
    keys: Keys
    match: Match | None = None
    lease: Lease | None = None
    looked: bool = False  # it counts once, however often it has to look again


@dataclass(slots=True)
class Observed:
    """What the requests met."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)  # of prefixes that were restored, by tier
    blocks: Counter[str] = field(default_factory=Counter)  # that lay somewhere at their request's turn, by tier
    blocks_asked: int = 0
    uncached: int = 0  # requests that the top tier is too small for
    end_s: float = 0.0


class Replay:
    """One run over one trace. `core` may be looked at, before and after; `lanes` says when batches end."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        """Raises ConfigError for a tier without room for a few blocks."""
        pairs = setup.tiers()
        trace = trace.from_first_arrival()
        config = setup.config
        self._trace = trace
        self._model = setup.model
        self._sizes = tuple(group.block_tokens for group in self._model.groups)
        self._parts = setup.parts
        self._names = [tier.name for tier in config.tiers]
        self._deadline_s = config.limits.load_deadline_s
        self._admitted_max = setup.admitted_max
        self._step_s = setup.step_s
        self.lanes = Lanes([model for model, _ in pairs])
        self.prefill = PrefillModel(setup.tokens_per_s)
        self.observed = Observed()
        self.clock = ManualClock()
        namespaces = NamespaceTable()
        self._namespace = namespaces.id_of_model(self._model)
        self.core = Core(
            self._model,
            [level for _, level in pairs],
            namespaces,
            queue_bytes=config.limits.queue_bytes,
            prefetch_budget=config.prefetch.budget,
            lookahead_requests=config.prefetch.lookahead_requests,
            governed=config.limits.governor,
            prefill_tokens_per_s=setup.tokens_per_s,
            pin_quota=config.limits.pin_quota,
        )
        self.telling = Telling(trace, self.core.hint, setup.hints, recorded=setup.recorded_hints)
        self.hinted = str(setup.hints or "recorded") if setup.hints or self.telling.recorded else None
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self._waiting: deque[_Served] = deque()
        self._loading: dict[int, _Served] = {}  # by ticket
        self._arrived = 0
        self._admitted = 0
        self._room_may_be = True  # something was given back since a reservation was refused

    def run(self, progress: Progress | None = None) -> Observed:
        """Serve all requests, and let what they have begun end."""
        last_s = 0.0
        for request in self._trace.requests:
            last_s = max(last_s, request.at_s)
            self._at(last_s, self._arrive, request)
        for hint in self.telling.recorded:
            self._at(hint.at_s, self._hinted, hint)
        told = 0
        while self._events:
            self._turn()
            if progress and len(self.observed.ttft_s) - told >= 64:
                progress(len(self.observed.ttft_s) - told)
                told = len(self.observed.ttft_s)
        self.observed.end_s = self.clock.now()
        return self.observed

    # ------------------------------------------------------------ time

    def _turn(self) -> None:
        """The next event, or the moment before it at which the core wants to plan; then what follows from it."""
        at_s = self._events[0][0]
        wake_s = self.core.wake_at_s(self.clock.now())
        if wake_s is not None and wake_s < at_s:
            self.clock.advance(max(0.0, wake_s - self.clock.now()))
        else:
            _, _, then, subject = heapq.heappop(self._events)
            self.clock.advance(at_s - self.clock.now())
            then(subject)
        self._follow()

    def _follow(self) -> None:
        """What an engine does in a turn: it plans once, and again only when something has happened."""
        self._admit()
        now_s = self.clock.now()
        for batch in self.core.plan(now_s):
            self._at(self.lanes.ends_at_s(batch, now_s), self._batch_ended, batch)
        for ticket, answer in self.core.poll():
            self._answered(self._loading.pop(ticket), answer)

    def _at(self, at_s: float, then: Callable[[Any], None], subject: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (max(at_s, self.clock.now()), self._order, then, subject))

    def _soon(self, then: Callable[[Any], None], subject: object) -> None:
        """The next verb of a request: the engine plans before it."""
        self._at(self.clock.now() + self._step_s, then, subject)

    def _batch_ended(self, batch: Any) -> None:
        self.core.apply(self.lanes.carry_out(batch), self.clock.now())
        self._room_may_be |= not self._admitted  # nobody else can give back what this one has held

    # ------------------------------------------------------------ one request's life

    def _arrive(self, request: TracedRequest) -> None:
        self._waiting.append(_Served(self._arrived, request, self.clock.now(), self._keys(request)))
        self._arrived += 1

    def _hinted(self, hint: TracedHint) -> None:
        self.telling.due(hint, self.clock.now())

    def _keys(self, request: TracedRequest) -> Keys:
        """The names of its whole blocks in each group."""
        whole = request.blocks[: request.tokens_in // self._trace.block_tokens]
        return Keys.opaque([_hashes(whole, parts) for parts in self._parts], self._model)

    def _admit(self) -> None:
        """Those whose turn it is look for their prefix."""
        while self._waiting and self._admitted < self._admitted_max and self._room_may_be:
            served = self._waiting.popleft()
            self._admitted += 1
            if not served.looked:
                self._look(served.keys)
                served.looked = True
            tokens_max, expires_at_s = served.request.tokens_in - 1, self.clock.now() + MATCH_TTL_S
            session = self.telling.session(served.number)
            served.match = self.core.match(served.keys, "simulated", tokens_max, expires_at_s, session)
            self._soon(self._reserve, served)

    def _reserve(self, served: _Served) -> None:
        """Ask for slots."""
        assert served.match is not None  # it has looked
        now_s = self.clock.now()
        ticket = self.core.submit_reserve(served.match, self._blocks_total(served), now_s + self._deadline_s, now_s)
        self._loading[ticket] = served

    def _look(self, keys: Keys) -> None:
        """Count where the blocks lie, those behind a missing one included."""
        directory, observed = self.core.residency.directory, self.observed
        for row in keys.groups:
            observed.blocks_asked += len(row)
            for key in row:
                handle = directory.find(store_key(self._namespace, key))
                tier = None if handle is None else directory.fastest(handle)
                if tier is not None:
                    observed.blocks[self._names[tier]] += 1

    def _answered(self, served: _Served, answer: object) -> None:
        if isinstance(answer, NoRoom):
            self._refused(served)
            return
        assert isinstance(answer, Lease)  # nothing else was asked for
        served.lease = answer
        self.telling.begun(served.number, self.clock.now())
        self.observed.tokens.update(answer.tiers)
        self._compute(served, served.request.tokens_in - answer.tokens_ready)

    def _refused(self, served: _Served) -> None:
        """Wait, without pinning anything, until others have given back slots; or do without, if that cannot help."""
        assert served.match is not None  # it was used for the reservation
        self.core.release_match(served.match)
        served.match = None
        tokens = self._blocks_total(served) * self._sizes[0]
        slots = sum(-(-tokens // size) for size in self._sizes)
        too_large = slots > self.core.residency.levels[0].slots_usable
        if too_large or not self._events:
            self.observed.uncached += 1
            self.telling.begun(served.number, self.clock.now())
            self._compute(served, served.request.tokens_in)
            return
        self._admitted -= 1
        self._room_may_be = False
        insort(self._waiting, served, key=lambda waiting: waiting.number)

    def _blocks_total(self, served: _Served) -> int:
        """Of the first group, a partial one included."""
        return -(-served.request.tokens_in // self._sizes[0])

    def _compute(self, served: _Served, tokens: int) -> None:
        self._at(self.prefill.ends_at_s(tokens, self.clock.now()), self._computed, served)

    def _computed(self, served: _Served) -> None:
        """The first token is there, and what was computed gets its names."""
        self.observed.ttft_s.append(self.clock.now() - served.arrived_s)
        if lease := served.lease:
            ready, tokens_in = lease.tokens_ready, served.request.tokens_in
            self.core.commit(lease, _pairs(lease, served.keys, ready))
            self.core.prefilled(ready, tokens_in - ready, self.prefill.seconds(tokens_in - ready))
        self._soon(self._leave, served)

    def _leave(self, served: _Served) -> None:
        """The request ends."""
        self._admitted -= 1
        self._room_may_be = True
        if served.lease is not None:
            self.core.release_lease(served.lease)
        self.telling.served(served.number, self.clock.now())


def _hashes(blocks: Sequence[int], parts: int) -> list[bytes]:
    """Of the blocks of a group, so many to each of the trace."""
    numbers = (block * parts + part for block in blocks for part in range(parts))
    return [number.to_bytes(NAME_BYTES, "big") for number in numbers]


def _pairs(lease: Lease, keys: Keys, ready: int) -> Sequence[tuple[int, Any]]:
    """Slots and names of what was computed, behind so many tokens."""
    return [
        pair
        for group, (row, size) in enumerate(zip(keys.groups, keys.block_tokens, strict=True))
        for pair in list(zip(lease.slots(group), row, strict=False))[ready // size :]
    ]
