"""`World`: an engine, its callers, its disk and the truth, and what happens to them.

Every verb is one operation of a schedule; what chance has to decide, the schedule does. Owns the clock. Always: every
ticket is answered once; after a crash the disk holds what was carried out, and nothing else is remembered.

Units: seconds of simulated time, slots, pages.
"""

from random import Random

from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.cache.transitions import State
from kvtier.clock import ManualClock
from kvtier.engine.answers import Answer
from kvtier.engine.breaker import Circuit
from kvtier.engine.polled import Job
from kvtier.errors import Asleep, DeviceLost, UsageError
from kvtier.testing.exploring.budget import Budget, done_bytes, written_bytes
from kvtier.testing.exploring.checks import Checks
from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.dict_disk import DictDisk
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.testing.exploring.jobs import ForeignJobs
from kvtier.testing.exploring.orders import OrderModel
from kvtier.testing.exploring.questions import Questions
from kvtier.testing.exploring.requests import Requests
from kvtier.testing.exploring.scrubbing import Scrubbing
from kvtier.testing.exploring.sessions import Sessions
from kvtier.testing.exploring.setup import Setup
from kvtier.testing.exploring.store import Disk, GlassDisk
from kvtier.testing.exploring.truth import Truth
from kvtier.testing.exploring.underway import Flying
from kvtier.testing.exploring.waiting import note_waiting
from kvtier.testing.faulty import INJECTED, Odds
from kvtier.types import BlockKey, Outcome, Status, StoreKey, Transfer, TransferBatch, block_key_of

EPOCHS = ("v1", "v2", "v3")
BATCHES_MAX = 5000  # one after the other without an end
TAKEN_FIRST = 0.5  # odds
BLAMED = (Status.MISSING, Status.CORRUPT, Status.FAILED)


class World:
    """One explored cache. `odds` are those of its disk."""

    def __init__(self, setup: Setup, rng: Random, medium: Disk | None = None) -> None:
        self.setup = setup
        self.rng = rng
        self.clock = ManualClock()
        self.coverage = Coverage()
        self.truth = Truth()
        self.odds = Odds()
        self.epoch = EPOCHS[0]
        if "disk" not in setup.shape:
            self.medium: Disk | None = None
        else:
            self.medium = medium or DictDisk(setup.extents, setup.extent_pages)
        self.orders = OrderModel()
        self.budget = None if setup.wear is None else Budget(*setup.wear)
        self.recent: list[tuple[int, int, int]] = []  # prompts that were asked for just now
        self.gone: dict[bytes, int] = {}  # by fingerprint: versions below were erased for good
        self.begin()
        self.expect_restored(0)

    def begin(self) -> None:
        """A process starts over what the disk has."""
        setup = self.setup
        self.engine = ExploredEngine(setup, self.medium, self.clock, self.rng, self.odds, self.epoch, self.coverage)
        self.sessions = Sessions(self.engine)
        self.requests = Requests(self.engine, self.truth, self.sessions, self.budget)
        self.jobs = ForeignJobs(self.engine, self.truth, self.requests)
        self.checks = Checks(self.engine, self.truth, self.medium)
        self.checks.gone.update(self.gone)
        self.blamed: set[StoreKey] = set()
        self.scrubbing = Scrubbing(self.engine)
        self.questions = Questions(self.engine, self.truth, self.checks, self.blamed, self.gone)
        self.deaf = 0  # operations during which nobody fetches answers
        self._late = False
        self._circuit = Circuit.CLOSED

    # ------------------------------------------------------------ prompts

    def keys_of(self, family: int, depth: int, branch: int) -> Keys:
        """Prompts share prefixes: so many blocks of a family, the last of them of one of its branches."""
        size = max(tokens for tokens, _ in self.setup.groups)
        tokens = [family * 100 + i for i in range((depth - 1) * size)] + [1000 + branch] * size
        return hash_blocks(tokens, self.engine.core.model)

    def blocks_of(self, keys: Keys) -> int:
        """How many blocks of group 0 they are."""
        return len(keys.groups[0])

    # ------------------------------------------------------------ requests

    def request(self, match: Match, blocks: int, deadline_s: float, *, streamed: bool = False) -> str:
        """Reserve over a match."""
        keys = [key for row in match.keys.groups for key in row]
        filling = {key for key in keys if self._state(key, self.engine.goal) is State.FILLING}
        on_disk = {key for key in keys if self.lies_only_on_disk(key)}
        try:
            ticket = self.requests.reserve(match, blocks, deadline_s, streamed=streamed)
        except UsageError as error:
            if isinstance(error, Asleep):
                raise
            assert blocks * self.setup.groups[0][0] < match.tokens, "a reservation was refused as a mistake"
            return "refused: fewer blocks than the match has"
        if ticket in self.requests.pending:
            note_waiting(self.engine, self.requests.pending[ticket], filling, on_disk)
        return f"ticket {ticket}: {blocks} blocks over {match.tokens} tokens, within {deadline_s} s"

    def _state(self, key: BlockKey, tier: int) -> State:
        handle = self._handle(key)
        return State.GONE if handle is None else self.engine.directory.state(handle, tier)

    def _top(self, key: BlockKey) -> int | None:
        handle = self._handle(key)
        return None if handle is None else self.engine.directory.top(handle)

    def lies_only_on_disk(self, key: BlockKey) -> bool:
        """Whether its fastest copy lies there."""
        return self.engine.disk is not None and self.lies_in(self.engine.disk, key)

    def lies_in(self, tier: int, key: BlockKey) -> bool:
        """Whether its fastest copy lies in this tier."""
        return self._top(key) == tier

    def _handle(self, key: BlockKey) -> int | None:
        return self.engine.directory.find(StoreKey(self.engine.namespace.to_bytes(4, "big") + key))

    def cancel(self, ticket: int) -> str:
        point = self.requests.cancel(ticket)
        self.coverage.cancelled(point)
        return f"ticket {ticket}, {point}"

    def release_owner(self, owner: str) -> int:
        """Its owner is dead. Returns how many leases and jobs it had."""
        matches = [match for match in self.requests.matches if match.owner == owner]
        self.engine.core.release_owner(owner)
        assert not any(match.pins for match in matches), "a match pins for a dead owner"
        held = self.requests.release_owner(owner) + self.jobs.release_owner(owner)
        assert self.engine.core.release_owner(owner) == 0, "something of a dead owner's is left"
        if held:
            self.coverage.happened("owner died with leases")
        return held

    # ------------------------------------------------------------ answers

    def listen(self) -> list[str]:
        """Fetch the answers and look at each."""
        heard = []
        for ticket, answer in self.engine.poll():
            heard.append(self._heard(ticket, answer))
        self._late = False
        return heard

    def be_deaf(self, operations: int) -> None:
        """Nobody fetches answers for a while."""
        self.deaf, self._late = operations, True

    def _heard(self, ticket: int, answer: Answer | Job) -> str:
        if isinstance(answer, Job):
            return self.jobs.started(ticket, answer, late=self._late)
        if isinstance(answer, Lease | NoRoom):
            self.jobs.refused(ticket)
            return self.requests.answered(ticket, answer, late=self._late)
        if isinstance(answer, DeviceLost):
            return self._device_lost(ticket)
        self.questions.answered(ticket, answer, late=self._late)
        return f"ticket {ticket}: {answer}"

    def _device_lost(self, ticket: int) -> str:
        assert self.lost, f"ticket {ticket} hears of a lost device that works"
        if ticket in self.questions.of_the_top:
            self.questions.device_lost(ticket)
        else:
            self.jobs.refused(ticket)
            self.requests.pending.pop(ticket)
        return f"ticket {ticket}: the device is lost"

    @property
    def lost(self) -> bool:
        """Whether the device of the top tier is."""
        return self.engine.core.residency.levels[0].lost

    @property
    def asked(self) -> set[int]:
        """Tickets without an answer that somebody waits for."""
        waiting = {ticket for ticket, pending in self.requests.pending.items() if not pending.cancelled}
        return waiting | self.questions.asked

    # ------------------------------------------------------------ movement

    def set_epoch(self, epoch: str) -> None:
        self.epoch = epoch
        self.engine.core.set_weights_epoch(epoch)

    def plan(self) -> list[TransferBatch]:
        expiring = [match for match in self.requests.matches if match.expires_at_s <= self.clock.now()]
        prefetching = self._prefetching()
        self.requests.admitted.planning()
        batches = self.engine.plan()
        self.requests.admitted.planned(batches, self.clock.now())
        self.scrubbing.planned(batches, self.clock.now())
        self.sessions.passed(self.clock.now())
        self._note_circuit()
        self.orders.planned([batch.batch_id for batch in batches if batch.sidecar and batch.target == self.engine.disk])
        for match in expiring:
            assert not match.pins, f"{match!r} pins after its time"
            self.coverage.cancelled("match expiry")
        if prefetching > self._prefetching():
            self.coverage.cancelled("prefetch")
        return batches

    def _note_circuit(self) -> None:
        """The disk's breaker may have moved."""
        if self.engine.disk is not None:
            circuit = self.engine.core.planner.breakers.circuit(self.engine.disk)
            if circuit is not self._circuit:
                self.coverage.happened(f"breaker: {circuit.value}")
            self._circuit = circuit

    def _prefetching(self) -> int:
        """Blocks that were brought up for a hint and that nobody came for yet."""
        counters = self.engine.core.counters.engine()
        settled = counters["prefetch_useful"] + counters["prefetch_late"] + counters["prefetch_wasted"]
        return counters["prefetched_blocks"] - settled

    def carry(self, flying: Flying) -> None:
        """A batch is carried out; nobody knows yet."""
        batch, meter = flying.batch, self.engine.meter
        budget = self.budget if batch.target == self.engine.disk else None
        before_bytes = written_bytes(meter) if budget and meter else 0
        self.engine.underway.carry(flying)
        assert flying.done is not None
        if budget:
            length_bytes = written_bytes(meter) - before_bytes if meter else done_bytes(flying)
            budget.carried(batch, flying.done, length_bytes, self.clock.now())
        if batch.sidecar and batch.target == self.engine.disk:
            if flying.done.outcomes[-1].done:
                self.orders.carried(batch.batch_id, batch.sidecar)
            else:
                self.orders.disturbed()
        for transfer, outcome in zip(batch.scrub or batch.transfers, flying.done.outcomes, strict=False):
            if batch.source == self.engine.disk and outcome.status in BLAMED:
                self._expect_blame(transfer, outcome)
                self.blamed.add(transfer.key)

    def _expect_blame(self, transfer: Transfer, outcome: Outcome) -> None:
        """A block that can be found is where the directory says, unless the fault was made or its namespace erased."""
        real = outcome.status is Status.MISSING and outcome.detail != INJECTED
        there = self.scrubbing.is_there(transfer)
        assert not (real and there), f"the disk does not find what the directory knows at {transfer.source_place}"

    def end(self, flying: Flying) -> None:
        if flying.done is None:
            self.carry(flying)
        self._note_failed(flying)
        self.scrubbing.end(flying)
        self._note_circuit()

    def _note_failed(self, flying: Flying) -> None:
        batch, done = flying.batch, flying.done
        assert done is not None
        if batch.target < batch.source or batch.scrub:
            ends = zip(batch.scrub or batch.transfers, done.outcomes, strict=False)
            self.requests.note_failed({block_key_of(transfer.key) for transfer, outcome in ends if not outcome.done})

    def run(self) -> int:
        """Plan and end what is due until nothing moves; returns how many batches ended."""
        for ended in range(BATCHES_MAX):
            self.plan()
            endable = self.engine.underway.endable(self.clock.now())
            if not endable:
                self._look_at_order()
                return ended
            self._end_or_take(self.rng.choice(endable))
            if not self.deaf:
                self.listen()
        raise AssertionError(f"still moving after {BATCHES_MAX} batches")

    def _end_or_take(self, flying: Flying) -> None:
        if flying in self.engine.underway.takeable() and self.rng.random() < TAKEN_FIRST:
            self.engine.enqueue(flying)
        else:
            self.end(flying)

    def _look_at_order(self) -> None:
        """If nothing is in its way, the order of the disk is written down in time."""
        tier, residency = self.engine.disk, self.engine.core.residency
        if tier is None:
            return
        level = residency.levels[tier]
        blocked = level.blocked_until_s > self.clock.now() or bool(level.room and level.room.excess_bytes())
        blocked |= residency.orders[tier].paused
        if blocked or self.odds != Odds() or self.engine.underway.flying:
            self.orders.disturbed()
        elif self.orders.quiet(residency, tier, self.clock.now()):
            self.coverage.happened("order noted in time")

    def mend(self) -> None:
        """The disk works again."""
        self.odds.mend()

    # ------------------------------------------------------------ the process ends

    def end_engine(self) -> None:
        """Its memory and its counters end with it."""
        self.coverage.counters.update(self.engine.counters())
        self.engine.close()

    def expect_restored(self, rows: int) -> None:
        """The directory has what the disk has, in the order of the last commit."""
        engine = self.engine
        if engine.disk is None:
            return
        core, tier = engine.core, engine.disk
        found = len(engine.directory.ready_in(tier))
        level = core.residency.levels[tier]
        if isinstance(self.medium, GlassDisk):
            stored = list(self.medium.rows())
            assert found == len(stored) <= rows, f"{len(stored)} blocks were stored, {found} restored"
            expected = self.orders.expected(level.policy_name, level.policy_blocks, stored, engine.namespaces)
            restored = self.orders.of(core.residency, tier)
            assert restored == expected, f"the order of eviction is {restored}, expected {expected}"
        self.orders.observe(core.residency, tier, self.clock)

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Everything that must hold between two operations."""
        rows = [row for held in self.requests.leases.values() for row in held.lease.record.slots]
        slots = [slot for row in rows for slot in row if slot >= 0]
        job_slots = [slot for running in self.jobs.running.values() for slot in running.job.slots]
        waiting = [pending for pending in self.requests.pending.values() if not pending.cancelled]
        unanswered = sum(p.slots for p in [*waiting, *(running.pending for running in self.jobs.running.values())])
        self.checks.all(self.checks.private(slots + job_slots), unanswered)
        for held in self.requests.leases.values():
            self.requests.compare(held)
        self.jobs.compare()
        self.requests.check_matches(self.blamed)
        self.sessions.check()
