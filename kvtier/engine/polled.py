"""The polled surface: submit, poll, apply, for engines that may not wait, or that own the top tier themselves.

An engine that keeps its own GPU cache (vLLM) is a *foreign top tier*: it takes a `Store` or a `Load`, gets a `Job`
naming keys and slots of our fastest tier, copies the bytes itself, and answers with `apply(BatchDone(job_id, ...))`,
one outcome per key. Until then the slots are held by the job's lease; only what is DONE becomes visible. A job without
keys holds nothing, and needs no answer.

Units: slots of our fastest tier, seconds.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease, Match, NoRoom, Phase
from kvtier.engine import arguments
from kvtier.engine.answers import Answer
from kvtier.engine.core import Core
from kvtier.errors import DeviceLost, UsageError
from kvtier.types import BatchDone, BlockKey, Outcome, group_of


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for slots over a match: answered by `Lease` or `NoRoom`."""

    match: Match
    blocks_total: int
    load_deadline_s: float = 0.5  # from now
    streamed: bool = False  # see `TieredCache.reserve`


@dataclass(frozen=True, slots=True)
class Store:
    """Offer blocks; what is known, or somebody stores now, is not asked for. Answered by a `Job` or `NoRoom`."""

    keys: Keys
    owner: str


@dataclass(frozen=True, slots=True)
class Load:
    """Ask for a match's blocks in our fastest tier. Answered by a `Job` (of the prefix that is there) or `NoRoom`."""

    match: Match
    load_deadline_s: float = 0.5  # from now


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a namespace, by its fingerprint (None: the current one): at once. Answered by `Dropped`, once durable."""

    namespace: bytes | None = None


Request = Reserve | Store | Load | Drop


@dataclass(frozen=True, slots=True)
class Job:
    """Copies for the foreign side: `keys[i]` into (`store`) or out of (`load`) slot `slots[i]`."""

    job_id: int
    kind: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]


class ForeignTop(Protocol):
    """Somebody who executes jobs on memory that is not ours. Neither verb waits."""

    def start(self, job: Job) -> None: ...

    def finished(self) -> list[BatchDone]:
        """Jobs that ended since the last call, one outcome per key of the job."""
        ...


class PolledSurface:
    """Requests in, answers out, over a core. The caller plans and carries out the core's batches as well."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._stores: dict[int, tuple[BlockKey, ...]] = {}  # ticket -> keys to store
        self._loads: dict[int, Match] = {}
        self._jobs: dict[int, tuple[Job, Lease]] = {}
        self._storing: dict[BlockKey, int] = {}  # key -> ticket, and later job, that stores it
        self._idle: list[tuple[int, Job]] = []  # jobs without keys

    def submit(self, request: Request, now_s: float) -> int:
        """Ask for something; the answer comes from `poll` under the returned ticket."""
        if isinstance(request, Store):
            return self._submit_store(request, now_s)
        if isinstance(request, Drop):
            named = request.namespace
            return self._core.submit_drop(None if named is None else arguments.instance("namespace", named, bytes))
        if not isinstance(request, Reserve | Load):
            raise UsageError(f"request is {arguments.shown(request)}; pass a Reserve, Store, Load or Drop")
        match = arguments.instance("match", request.match, Match)
        deadline_s = now_s + arguments.seconds("load_deadline_s", request.load_deadline_s)
        if isinstance(request, Reserve):
            blocks = arguments.integer("blocks_total", request.blocks_total, at_least=1)
            streamed = arguments.instance("streamed", request.streamed, bool)
            return self._core.submit_reserve(match, blocks, deadline_s, now_s, streamed=streamed)
        if self._core.residency.levels[0].reads_below:
            raise UsageError("with `access: uva` blocks stay in host memory: a Load, whose job names slots, is refused")
        blocks = max(1, match.tokens // match.keys.block_tokens[0])
        ticket = self._core.submit_reserve(match, blocks, deadline_s, now_s)
        self._loads[ticket] = match
        return ticket

    def _submit_store(self, request: Store, now_s: float) -> int:
        owner = arguments.instance("owner", request.owner, str)
        missing = tuple(key for key in self._core.missing(request.keys) if not self._is_storing(key))
        if not missing:
            ticket = self._core.new_id()
            self._idle.append((ticket, Job(ticket, "store", (), ())))
            return ticket
        sizes = request.keys.block_tokens
        tokens = max((sum(group_of(key) == g for key in missing) * size for g, size in enumerate(sizes)), default=0)
        nothing = self._core.blank_match(request.keys, owner, 0)
        ticket = self._core.submit_reserve(nothing, max(1, -(-tokens // sizes[0])), now_s, now_s)
        self._stores[ticket] = missing
        self._storing |= dict.fromkeys(missing, ticket)
        return ticket

    def _is_storing(self, key: BlockKey) -> bool:
        """Whether a job brings this block already; one of before a reset, or whose owner is dead, brings nothing."""
        ticket = self._storing.get(key)
        if ticket is None or ticket in self._stores:
            return ticket is not None
        return ticket in self._jobs and self._core.may_publish(self._jobs[ticket][1])

    def poll(self) -> list[tuple[int, Answer | Job]]:
        """Answers since the last call."""
        idle, self._idle = self._idle, []
        return idle + [(ticket, self._translated(ticket, answer)) for ticket, answer in self._core.poll()]

    def current(self, answer: Answer | Job) -> Answer | Job:
        """An answer that waited to be fetched: one with slots that were given back meanwhile is NoRoom."""
        if not isinstance(answer, Job):
            return self._core.current(answer)
        if answer.job_id not in self._jobs:
            return answer
        now = self._core.current(self._jobs[answer.job_id][1])
        if isinstance(now, NoRoom):
            job, _ = self._jobs.pop(answer.job_id)
            self._stored(job.job_id, job.keys)
            return now
        return answer

    def _translated(self, ticket: int, answer: Answer) -> Answer | Job:
        keys = self._stores.pop(ticket, None)
        match = self._loads.pop(ticket, None)
        if not isinstance(answer, Lease) or (keys is None and match is None):
            self._stored(ticket, keys or ())
            return answer
        if match is not None:
            ready = match.keys.prefix(answer.tokens_ready).groups
            job = self._job(answer, "load", [(key, i) for row in ready for i, key in enumerate(row)])
            if not job.keys:
                self._core.release_lease(answer)
                return job
        else:
            assert keys is not None
            counts = [0] * len(self._core.model.groups)
            placed = []
            for key in keys:
                placed.append((key, counts[group_of(key)]))
                counts[group_of(key)] += 1
            job = self._job(answer, "store", placed)
        self._jobs[job.job_id] = (job, answer)
        return job

    def _job(self, lease: Lease, kind: str, placed: Sequence[tuple[BlockKey, int]]) -> Job:
        slots = tuple(lease.slots(group_of(key))[index] for key, index in placed)
        return Job(lease.lease_id, kind, tuple(key for key, _ in placed), slots)

    def apply(self, done: BatchDone) -> None:
        """A job ended: commit what was stored, give the slots back. A second answer for a job is ignored."""
        arguments.instance("done", done, BatchDone)
        job_id = arguments.integer("batch_id", done.batch_id)
        if job_id not in self._jobs:
            return
        job, lease = self._jobs[job_id]
        outcomes = done.outcomes if isinstance(done.outcomes, tuple | list) else ()
        if len(outcomes) != len(job.keys) or not all(isinstance(o, Outcome) for o in outcomes):
            given = f"{len(outcomes)} outcomes" if outcomes else arguments.shown(done.outcomes)
            raise UsageError(f"job {job.job_id} has {len(job.keys)} keys, {given} were given: pass an Outcome for each")
        del self._jobs[job_id]
        self._stored(job_id, job.keys)
        if job.kind == "store" and lease.record.phase is Phase.ACTIVE:  # else its owner was taken for dead
            triples = zip(job.slots, job.keys, outcomes, strict=True)
            with suppress(DeviceLost):  # too late for its slots: nothing to publish, and nobody to blame
                self._core.commit(lease, [(slot, key) for slot, key, outcome in triples if outcome.done])
        self._core.release_lease(lease)

    def _stored(self, ticket: int, keys: Sequence[BlockKey]) -> None:
        """Whatever has become of these keys, this ticket brings them no more."""
        for key in keys:
            if self._storing.get(key) == ticket:
                del self._storing[key]


def drive(surface: PolledSurface, foreign: ForeignTop) -> list[tuple[int, Answer]]:
    """One turn between a surface and its foreign side; returns the answers that are not jobs."""
    for done in foreign.finished():
        surface.apply(done)
    others: list[tuple[int, Answer]] = []
    for ticket, answer in surface.poll():
        if isinstance(answer, Job):
            foreign.start(answer)
        else:
            others.append((ticket, answer))
    return others
