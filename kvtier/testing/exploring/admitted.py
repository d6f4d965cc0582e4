"""`Admitted`: who may be copied down into a tier that does not take everybody, looked at from the outside.

Owns: how often each block was used, and which were refused, in the life of one engine. Always: it has seen at least the
uses that the tier's gate has. A block that goes down uninvited was used as often as the rule and what is left of the
budget demand; one that is refused is clean from that moment on, in every tier above. A flush asks nobody.

Units: uses, bytes, seconds of simulated time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvtier.testing.exploring.budget import Budget, bytes_of
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.types import StoreKey, TransferBatch

SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the burst, at each of which one more use is needed


class Admitted:
    """Of one engine. `expected`: uses that the engine may know of before anybody has fetched the answer."""

    def __init__(
        self, engine: ExploredEngine, budget: Budget | None, expected: Callable[[], Counter[StoreKey]]
    ) -> None:
        self._engine = engine
        self._budget = budget
        self._expected = expected
        self._uses: Counter[StoreKey] = Counter()
        self._refused: set[StoreKey] = set()
        self._just_refused: set[int] = set()
        self._observe()

    def _observe(self) -> None:
        residency = self._engine.core.residency
        refuse = residency.refuse

        def noted(handles: Sequence[int], tier: int) -> None:
            refuse(handles, tier)
            self._refused.update(map(residency.directory.key, handles))
            self._just_refused.update(handles)
            for handle in handles:
                dirty = [t for t in range(tier) if not residency.directory.is_clean(handle, t)]
                assert not dirty, f"tier {tier} has refused a block that is to be saved in tiers {dirty}"

        setattr(residency, "refuse", noted)  # noqa: B010  an observer, on this object alone

    def used(self, keys: Iterable[StoreKey]) -> None:
        """A request has found these, or made them."""
        self._uses.update(keys)

    # ------------------------------------------------------------ what goes down

    def planning(self) -> None:
        """The engine is about to."""
        self._just_refused.clear()

    def planned(self, batches: Sequence[TransferBatch], now_s: float) -> None:
        """These were planned now, in this order."""
        setup = self._engine.setup
        for batch in batches:
            disk = batch.target == self._engine.disk
            budget = self._budget if disk else None
            before_bytes = self._underway_bytes(batch) if budget else 0
            if batch.target > batch.source and (budget or setup.admissions[batch.target] != "always"):
                left_bytes = budget.left_bytes(now_s) - before_bytes if budget else 0.0
                self._expect_let_in(batch, setup.admissions[batch.target], budget, left_bytes)
            if budget and batch.sidecar:
                budget.planned(batch, before_bytes, now_s)

    def _underway_bytes(self, batch: TransferBatch) -> int:
        """Of blocks on their way to the disk that nobody has written yet, planned before this batch."""
        flying = (f for f in self._engine.underway.flying if f.batch.target == self._engine.disk and f.done is None)
        return sum(bytes_of(f.batch) for f in flying if f.batch.batch_id < batch.batch_id)

    def _expect_let_in(self, batch: TransferBatch, rule: str, budget: Budget | None, left_bytes: float) -> None:
        expected, number = self._expected(), f"batch {batch.batch_id}"
        for transfer in batch.transfers:
            if self._engine.core.planner.demotions.flushes.owes(transfer.handle):
                continue
            uses = self._uses[transfer.key] + expected[transfer.key]
            needed = 2 if rule == "second_access" else 0
            if budget:
                assert left_bytes > 0, f"{number} is written with {left_bytes:.0f} bytes left of the budget"
                tight = sum(left_bytes <= share * budget.burst_bytes for share in SHARES)
                needed = max(needed, tight + 1 if tight else 0)
                left_bytes -= transfer.length_bytes
            assert uses >= needed, f"{number} takes a block that was used {uses} times, {needed} are needed"
            new = rule == "ghost_hit" and transfer.key not in self._refused
            assert not new, f"{number} takes a block that was never offered before"

    def expect_asked_again(self) -> None:
        """The budget was saved up before the plan just now: whom it had refused, that has asked about again."""
        disk, directory = self._engine.disk, self._engine.directory
        if self._budget is not None and disk is not None:
            forgotten = {*directory.refused_by(disk)} - self._just_refused
            assert not forgotten, f"{len(forgotten)} blocks are refused for a budget that is full"
