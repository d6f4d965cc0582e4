"""`PolledEngine`: the production core and tiers with no thread, loop or clock of their own.

Batches are held until the test lets one end, in any order; time moves when the test says so. It is what makes a race
a list of events. Units: seconds of the manual clock.
"""

from collections.abc import Sequence
from typing import TypeVar

from kvtier.blocks.hashing import Keys
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.leases import Arrival, Lease, Match, NoRoom
from kvtier.cache.level import Level
from kvtier.clock import ManualClock
from kvtier.engine.answers import Answer
from kvtier.engine.core import Core
from kvtier.engine.executor import carry_out
from kvtier.tiers.base import SupportsScan, SupportsSidecar, Tier
from kvtier.types import BatchDone, ModelSpec, Outcome, TransferBatch

T = TypeVar("T")
STEPS_MAX = 10_000


class PolledEngine:
    """A core over `tiers`; `held` are the batches that were planned and not let go yet, oldest first."""

    def __init__(
        self,
        model: ModelSpec,
        tiers: Sequence[Tier],
        levels: Sequence[Level],
        namespaces: NamespaceTable | None = None,
        prefetch_budget: float = 0.5,
    ) -> None:
        self.tiers = tiers
        self.clock = ManualClock()
        self.core = Core(model, levels, namespaces or NamespaceTable(), prefetch_budget=prefetch_budget)
        self.held: list[TransferBatch] = []
        self.answers: dict[int, Answer] = {}
        for index, tier in enumerate(tiers):
            if isinstance(tier, SupportsScan):
                self.core.adopt(index, tier.scan(), tier.sidecar() if isinstance(tier, SupportsSidecar) else ())

    def plan(self) -> list[TransferBatch]:
        """Let the core plan; its new batches join `held`."""
        batches = self.core.plan(self.clock.now())
        self.held += batches
        self._collect()
        return batches

    def finish(self, batch: TransferBatch, outcomes: Sequence[Outcome] | None = None) -> None:
        """Carry a held batch out (or pretend to, with these outcomes) and acknowledge it."""
        self.held.remove(batch)
        done = carry_out(self.tiers, batch) if outcomes is None else BatchDone(batch.batch_id, tuple(outcomes))
        self.core.apply(done, self.clock.now())
        self._collect()

    def enqueue(self, batch: TransferBatch, arrival: Arrival) -> None:
        """Say of a held batch that a device's stream has taken it; `finish` follows."""
        self.core.enqueued(batch.batch_id, arrival)
        self._collect()

    def run(self) -> None:
        """Plan and finish, oldest first, until nothing moves."""
        for _ in range(STEPS_MAX):
            self.plan()
            if not self.held:
                return
            self.finish(self.held[0])
        raise AssertionError(f"still moving after {STEPS_MAX} batches")

    def _collect(self) -> None:
        self.answers.update(self.core.poll())

    # ------------------------------------------------------------ verbs

    def match(self, keys: Keys, tokens_max: int | None = None, ttl_s: float = 30.0) -> Match:
        return self.core.match(keys, "test", tokens_max, self.clock.now() + ttl_s)

    def submit_reserve(
        self, match: Match, blocks_total: int, deadline_s: float = 1.0, *, streamed: bool = False
    ) -> int:
        now_s = self.clock.now()
        ticket = self.core.submit_reserve(match, blocks_total, now_s + deadline_s, now_s, streamed=streamed)
        self._collect()
        return ticket

    def reserve(self, match: Match, blocks_total: int) -> Lease | NoRoom:
        """Reserve and run until the answer is there."""
        ticket = self.submit_reserve(match, blocks_total)
        for _ in range(STEPS_MAX):
            if ticket in self.answers:
                break
            self.plan()
            if self.held:
                self.finish(self.held[0])
        answer = self.answers.pop(ticket)
        assert isinstance(answer, Lease | NoRoom)
        return answer

    def reserve_now(self, match: Match, blocks_total: int) -> Lease | NoRoom | None:
        """Reserve, and take the answer if it needs no transfer; None if it does."""
        answer = self.answers.pop(self.submit_reserve(match, blocks_total), None)
        assert answer is None or isinstance(answer, Lease | NoRoom)
        return answer

    def release(self, lease: Lease) -> None:
        self.core.release_lease(lease)
        self._collect()

    def close(self) -> None:
        """Close the tiers; a `DictTier` can be used by another engine after it."""
        for tier in self.tiers:
            tier.close()

    def check(self) -> None:
        """Raise AssertionError with the findings if any invariant is broken."""
        findings = self.core.check()
        assert not findings, findings
