"""`Underway`: the batches that a core has planned, in a world where every one of them ends when chance says so.

A batch is carried out and acknowledged at two different moments. Before it is carried out its target may hold
anything. Always: batches of one writing lane keep their order, those of a reading lane overtake each other; a slow
batch waits for its time, a hung one for `hurry`.

Units: seconds of simulated time.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from kvtier.engine.executor import carry_out, lane_of
from kvtier.testing.faulty import TORN
from kvtier.tiers.base import SupportsSlots, Tier
from kvtier.types import BatchDone, TransferBatch

RAISED = re.compile(r"\w+(Error|Exception|Iteration)\(")  # how `carry_out` reports what a tier must not raise
SLOW_S = (0.05, 0.6, 4.0, 20.0)


@dataclass(slots=True, eq=False)
class Flying:
    """A batch under way. `torn`: its target was touched; `taken`: a device's stream has it, and the core knows;
    `done`: it was carried out, and nobody knows yet."""

    batch: TransferBatch
    lane: tuple[int, str]
    due_s: float
    torn: bool = False
    taken: bool = False
    done: BatchDone | None = None

    def __repr__(self) -> str:
        batch = self.batch
        moved = [f"{len(batch.transfers)} blocks"] if batch.transfers else []
        moved += [f"{len(batch.evict)} evictions"] if batch.evict else []
        moved += ["drop"] if batch.drop is not None else []
        moved += ["remap"] if batch.remap is not None else []
        moved += [f"scrub of {len(batch.scrub)}"] if batch.scrub else []
        what = ", ".join(moved) or ("notes" if batch.sidecar else "question")
        return f"batch {batch.batch_id} ({batch.source}->{batch.target}: {what})"


class Underway:
    """All batches of one engine that are not acknowledged, oldest first."""

    def __init__(self, tiers: Sequence[Tier], rng: Random, slow: float, hung: float) -> None:
        self._tiers = tiers
        self._rng = rng
        self._slow = slow
        self._hung = hung
        self.flying: list[Flying] = []

    def depart(self, batches: Sequence[TransferBatch], now_s: float) -> None:
        """Planned; chance says how long each will take."""
        for batch in batches:
            due_s = now_s
            if self._rng.random() < self._slow:
                due_s += self._rng.choice(SLOW_S)
            if self._rng.random() < self._hung:
                due_s = inf
            self.flying.append(Flying(batch, lane_of(self._tiers, batch), due_s))

    def hurry(self) -> None:
        """Nothing takes time any more, and nothing hangs."""
        self._slow = self._hung = 0.0
        for flying in self.flying:
            flying.due_s = -inf

    def startable(self, now_s: float) -> list[Flying]:
        """Batches that may be carried out now."""
        return [f for f in self._movable(now_s, lambda f: f.done is None) if f.done is None]

    def endable(self, now_s: float) -> list[Flying]:
        """Batches whose acknowledgement may arrive now."""
        return self._movable(now_s, lambda f: True)

    def _movable(self, now_s: float, counts: Callable[[Flying], bool]) -> list[Flying]:
        """Those that are due and, in a writing lane, the first one of those that count."""
        seen: set[tuple[int, str]] = set()
        movable = []
        for flying in self.flying:
            first = flying.lane not in seen or flying.lane[1] == "read"
            if counts(flying):
                seen.add(flying.lane)
            if first and flying.due_s <= now_s:
                movable.append(flying)
        return movable

    def tear(self, flying: Flying) -> None:
        """Its target is being written: it may hold anything from now on, until it is acknowledged."""
        flying.torn = True
        target = self._tiers[flying.batch.target]
        if flying.batch.remap is None and isinstance(target, SupportsSlots):
            for transfer in flying.batch.transfers:
                target.slot(transfer.target_place)[: transfer.length_bytes] = TORN * transfer.length_bytes

    def takeable(self) -> list[Flying]:
        """Batches that a device's stream may take now."""
        return [f for f in self.flying if f.batch.parts and not f.taken and f.done is None]

    def carry(self, flying: Flying) -> None:
        """Do what it says; its acknowledgement is on its way."""
        self.tear(flying)
        flying.done = carry_out(self._tiers, flying.batch)
        raised = [o.detail for o in flying.done.outcomes if RAISED.match(o.detail)]
        assert not raised, f"{flying!r} raised in a tier: {raised[0]}"

    def end(self, flying: Flying) -> BatchDone:
        """Its acknowledgement arrives."""
        if flying.done is None:
            self.carry(flying)
        assert flying.done is not None
        self.flying.remove(flying)
        return flying.done

    def writes_to(self, tier: int) -> list[Flying]:
        """What writes to a persistent tier, in the order in which it is carried out."""
        return [flying for flying in self.flying if flying.lane == (tier, "write")]
