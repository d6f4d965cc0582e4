"""Batches that are under way: who made them, what they hold, and how many run in each lane.

A lane is a (source, target) pair of tiers. While a transfer is in flight both its copies are held, so that neither
place is used for anything else before the terminal acknowledgement. Units: batches, blocks, bytes, seconds of the
engine's clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cache.residency import Leaving, Residency
from kvtier.engine.rates import Lane, Rates
from kvtier.engine.sidecar import Sidecars
from kvtier.types import BatchDone, EvictItem, LayerPart, Remap, Transfer, TransferBatch


@dataclass(frozen=True, slots=True)
class Underway:
    """A batch and the copies that leave with it (one by one, or with their namespace)."""

    batch: TransferBatch
    leaving: tuple[Leaving, ...]
    since_s: float

    @property
    def bytes(self) -> int:
        return sum(transfer.length_bytes for transfer in self.batch.transfers)


class Flight:
    """Numbers batches, keeps them until they are acknowledged, and counts them by lane."""

    def __init__(self, residency: Residency, sidecars: Sidecars, rates: Rates) -> None:
        self._residency = residency
        self._sidecars = sidecars
        self._underway: dict[int, Underway] = {}
        self._next_id = 0
        self.now_s = 0.0  # what departs or arrives does so now; the planner sets it first of all
        self.rates = rates
        self.arrivals = 0  # batches acknowledged so far
        self.batches: Counter[Lane] = Counter()
        self.blocks: Counter[Lane] = Counter()
        self.bytes: Counter[Lane] = Counter()
        self.evictions: Counter[int] = Counter()  # copies leaving, by tier

    def __len__(self) -> int:
        return len(self._underway)

    def depart(
        self,
        lane: Lane,
        handles: Sequence[int],
        leaving: Sequence[Leaving] = (),
        parts: tuple[LayerPart, ...] = (),
    ) -> TransferBatch:
        """Make a batch of copies that are placed and held already; the target's sidecar goes along."""
        source, target = lane
        transfers = tuple(self._transfer(handle, source, target) for handle in handles)
        writing_bytes = self.writing_bytes(target) + sum(transfer.length_bytes for transfer in transfers)
        batch = TransferBatch(
            self.number(),
            source,
            target,
            transfers,
            tuple(self._eviction(copy.handle, target) for copy in leaving),
            sidecar=self._sidecars.rows(target, self.now_s, writing_bytes),
            parts=parts,
        )
        return self._enter(Underway(batch, tuple(leaving), self.now_s))

    def depart_question(self, tier: int) -> TransferBatch:
        """Make a batch of nothing: whoever acknowledges it has looked how the tier is doing."""
        return self._enter(Underway(TransferBatch(self.number(), tier, tier, ()), (), self.now_s))

    def depart_drop(self, tier: int, namespace: int, leaving: Sequence[Leaving]) -> TransferBatch:
        """Make the batch that erases a namespace, and with it the copies `leaving`, from a persistent tier."""
        batch = TransferBatch(self.number(), tier, tier, (), (), namespace)
        return self._enter(Underway(batch, tuple(leaving), self.now_s))

    def depart_remap(self, tier: int, remap: Remap) -> TransferBatch:
        """Make the batch that changes a memory tier's granules."""
        batch = TransferBatch(self.number(), tier, tier, (), remap=remap)
        return self._enter(Underway(batch, (), self.now_s))

    def depart_capacity(self, tier: int, capacity_bytes: int) -> TransferBatch:
        """Make the batch that lets a persistent tier take so much of its disk."""
        batch = TransferBatch(self.number(), tier, tier, (), capacity_bytes=capacity_bytes)
        return self._enter(Underway(batch, (), self.now_s))

    def arrive(self, done: BatchDone) -> Underway | None:
        """Take an acknowledged batch out; None if it is not (or no longer) known."""
        underway = self._underway.pop(done.batch_id, None)
        if underway is not None:
            self.arrivals += 1
            lane = (underway.batch.source, underway.batch.target)
            self.batches[lane] -= 1
            self.blocks[lane] -= len(underway.batch.transfers)
            self.bytes[lane] -= underway.bytes
            self.evictions[underway.batch.target] -= len(underway.leaving)
            if underway.batch.transfers:
                well = any(outcome.done for outcome in done.outcomes[: len(underway.batch.transfers)])
                self.rates.arrived(lane, underway.bytes, self.now_s, done=well)
        return underway

    def handles_of(self, batch_id: int) -> tuple[int, ...]:
        """The blocks of a batch under way."""
        underway = self._underway.get(batch_id)
        return tuple(transfer.handle for transfer in underway.batch.transfers) if underway else ()

    def moving(self, tier: int) -> set[int]:
        """Blocks whose copy in this tier is read or written by a batch under way."""
        batches = (underway.batch for underway in self._underway.values())
        return {t.handle for batch in batches if tier in (batch.source, batch.target) for t in batch.transfers}

    def loads(self, tier: int) -> int:
        """Batches under way from this tier upwards."""
        return sum(count for (source, target), count in self.batches.items() if source == tier > target)

    def oldest_load_s(self, tier: int) -> float | None:
        """Since when the oldest load from this tier is under way."""
        return min(
            (u.since_s for u in self._underway.values() if u.batch.source == tier > u.batch.target), default=None
        )

    def writes(self, tier: int) -> int:
        """Batches under way into this tier."""
        return sum(count for (_, target), count in self.batches.items() if target == tier)

    def writing_bytes(self, tier: int) -> int:
        """Bytes of blocks under way into this tier."""
        return sum(length_bytes for (_, target), length_bytes in self.bytes.items() if target == tier)

    def _enter(self, underway: Underway) -> TransferBatch:
        batch = underway.batch
        lane = (batch.source, batch.target)
        self._underway[batch.batch_id] = underway
        self.batches[lane] += 1
        self.blocks[lane] += len(batch.transfers)
        self.bytes[lane] += underway.bytes
        self.evictions[batch.target] += len(underway.leaving)
        if batch.transfers:
            self.rates.departed(lane, underway.bytes, self.now_s)
        return batch

    def number(self) -> int:
        """A batch's, which no other has."""
        self._next_id += 1
        return self._next_id

    def _transfer(self, handle: int, source: int, target: int) -> Transfer:
        directory = self._residency.directory
        return Transfer(
            handle,
            directory.key(handle),
            directory.place(handle, source),
            directory.generation(handle, source),
            directory.place(handle, target),
            directory.length_bytes(handle),
        )

    def _eviction(self, handle: int, tier: int) -> EvictItem:
        directory = self._residency.directory
        return EvictItem(
            directory.key(handle),
            directory.place(handle, tier),
            directory.generation(handle, tier),
        )
