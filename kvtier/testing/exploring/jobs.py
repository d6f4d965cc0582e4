"""`ForeignJobs`: a foreign top tier, which takes jobs and does them well, badly, twice or never.

Owns the jobs under way. Always: until a job is answered its slots show what was there or what it wrote; only what it
reports DONE becomes visible.

Units: slots, blocks.
"""

from dataclasses import dataclass
from random import Random

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Match
from kvtier.engine.polled import Job, Load, Store
from kvtier.errors import UsageError
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.promises import Pending
from kvtier.testing.exploring.requests import Requests
from kvtier.testing.exploring.truth import Truth
from kvtier.types import DONE, BatchDone, BlockKey, Outcome, Status, store_key

FAILED = Outcome(Status.FAILED, detail="injected")


@dataclass(slots=True, eq=False)
class Running:
    """A job, what its slots must show, and the namespace it was asked for in."""

    job: Job
    pending: Pending
    shown: dict[int, bytes]


class ForeignJobs:
    """All jobs of one engine. `running` by job, `pending` by ticket."""

    def __init__(self, engine: ExploredEngine, truth: Truth, requests: Requests) -> None:
        self._engine = engine
        self._truth = truth
        self._requests = requests
        self.running: dict[int, Running] = {}
        self.kinds: dict[int, str] = {}  # of tickets without an answer
        self.last: BatchDone | None = None
        self._offered: dict[int, tuple[set[BlockKey], set[BlockKey]]] = {}  # by ticket of a store: what must, may come

    def store(self, keys: Keys, owner: str) -> int:
        """Offer blocks."""
        missing = {key for row in keys.groups for key in row if not self._is_known(key)}
        asked_for = {key for _, allowed in self._offered.values() for key in allowed}
        wanted = missing - self._stored_by_jobs(current=False) - asked_for
        allowed = missing - self._stored_by_jobs(current=True)
        ticket = self._engine.surface.submit(Store(keys, owner), self._engine.clock.now())
        self._requests.expect(ticket, keys, len(keys.groups[0]), owner)
        self.kinds[ticket] = "store"
        self._offered[ticket] = wanted, allowed
        return ticket

    def _stored_by_jobs(self, *, current: bool) -> set[BlockKey]:
        """The blocks that jobs under way bring; `current`: of these, what can be found when they have."""
        now = self._engine.fingerprint, self._truth.versions[self._engine.fingerprint]
        storing = [running for running in self.running.values() if running.job.kind == "store"]
        if current:
            storing = [r for r in storing if (r.pending.fingerprint, r.pending.version) == now]
        return {key for running in storing for key in running.job.keys}

    def _is_known(self, key: BlockKey) -> bool:
        handle = self._engine.directory.find(store_key(self._engine.namespace, key))
        return handle is not None and self._engine.directory.top(handle) is not None

    def load(self, match: Match, deadline_s: float) -> int:
        """Ask for a match's blocks."""
        ticket = self._engine.surface.submit(Load(match, deadline_s), self._engine.clock.now())
        self._requests.expect(ticket, match.keys, max(1, match.tokens // match.keys.block_tokens[0]), match.owner)
        self._requests.found_for(ticket, match)
        self.kinds[ticket] = "load"
        return ticket

    def expect_no_load(self, match: Match) -> str:
        """Where blocks are read in host memory no job can name slots for them."""
        try:
            self._engine.surface.submit(Load(match), self._engine.clock.now())
        except UsageError:
            self._engine.core.release_match(match)
            return "refused: blocks are read in host memory"
        raise AssertionError("a job loads what is read where it lies")

    def refused(self, ticket: int) -> None:
        """A ticket is answered without a job, if it asked for one."""
        self.kinds.pop(ticket, None)
        self._offered.pop(ticket, None)

    def started(self, ticket: int, job: Job, *, late: bool) -> str:
        """A ticket is answered by a job."""
        pending = self._requests.pending.pop(ticket)
        assert self.kinds.pop(ticket) == job.kind
        if job.kind == "store":
            wanted, allowed = self._offered.pop(ticket)
            assert wanted <= {*job.keys} <= allowed, f"{job!r} stores other blocks than those that nobody has or brings"
        assert not pending.dead, f"slots of a dead owner are handed out: {job!r}"
        assert len({*job.slots}) == len(job.keys) == len({*job.keys}), "a job has a slot of its own for each block"
        shown: dict[int, bytes] = {}
        for slot, key in zip(job.slots, job.keys, strict=True):
            named = (pending.fingerprint, key)
            if job.kind == "store":
                shown[slot] = self._requests.mark(slot, job.job_id)
                continue
            version = pending.alive.get(named) if late else self._truth.alive.get(named)
            assert version is not None, "a job loads what nobody has computed, or what was dropped"
            shown[slot] = self._requests.content(named, version)
        if job.kind == "load":
            self._requests.admitted.used(pending.covered)
        if job.keys:
            self.running[job.job_id] = Running(job, pending, shown)
        self.compare()
        return f"ticket {ticket}: job to {job.kind} {len(job.keys)} blocks"

    def compare(self) -> None:
        """Every slot of every job shows what it must."""
        slot_of = self._engine.top.slot
        for running in self.running.values():
            for slot, content in running.shown.items():
                assert slot_of(slot)[: len(content)] == content, f"{running.job!r}: wrong bytes in slot {slot}"

    def end(self, job_id: int, rng: Random, failing: float) -> str:
        """A job ends; each block fails with these odds."""
        running = self.running.pop(job_id)
        job, pending = running.job, running.pending
        stored: list[tuple[bytes, BlockKey]] = []
        outcomes = []
        for slot, key in zip(job.slots, job.keys, strict=True):
            if rng.random() < failing:
                outcomes.append(FAILED)
                continue
            outcomes.append(DONE)
            if job.kind == "store":
                named = (pending.fingerprint, key)
                version = self._truth.alive.get(named, self._truth.versions[named[0]])
                self._requests.write(slot, self._requests.content(named, version))
                stored.append(named)
        current = (self._engine.fingerprint, self._truth.versions[self._engine.fingerprint])
        if (pending.fingerprint, pending.version) == current:
            for named in stored:
                self._truth.commit(named)
            self._requests.admitted.used(store_key(self._engine.namespace, key) for _, key in stored)
        self.last = BatchDone(job_id, tuple(outcomes))
        self._engine.surface.apply(self.last)
        return f"job {job_id} ({job.kind}): {len(outcomes) - outcomes.count(FAILED)} of {len(outcomes)} done"

    def release_owner(self, owner: str) -> int:
        """Whoever was to do these jobs is dead; what is said of them afterwards changes nothing."""
        theirs = [job_id for job_id, running in self.running.items() if running.pending.owner == owner]
        for job_id in theirs:
            self._expect_ignored(self.running.pop(job_id).job)
        return len(theirs)

    def _expect_ignored(self, job: Job) -> None:
        before = self._engine.state()
        self.last = BatchDone(job.job_id, (DONE,) * len(job.keys))
        self.repeat()
        assert self._engine.state() == before, "a job of a dead owner was taken for done"

    def repeat(self) -> None:
        """The latest answer arrives once more."""
        if self.last is not None:
            self._engine.surface.apply(self.last)
