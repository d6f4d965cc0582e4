"""Carries batches out: the only place that touches worker threads.

Of the two tiers of a batch one works and the other lends its slots: a disk works for memory, the upper of two memory
tiers for the lower. Between memory tiers whose codecs differ `Recoding` works; a disk is told what the slots hold.
Each (tier, direction) has its own threads, so that loads never queue behind stores. Writes to
a tier run one at a time and in order; those that wait for a tier which can commit several at once go to it together
(group commit). Whatever happens, every batch is reported exactly once.

Units: bytes. Owns its threads; does not own the tiers.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from kvtier.blocks.coding import NONE
from kvtier.cache.leases import Arrival
from kvtier.engine.recoding import Recoding
from kvtier.engine.write_queue import WriteQueue
from kvtier.errors import DeviceLost, KvtierError
from kvtier.tiers.base import (
    SupportsCapacity,
    SupportsDrop,
    SupportsFences,
    SupportsGroups,
    SupportsRemap,
    SupportsScrub,
    SupportsSlots,
    SupportsStreaming,
    Tier,
)
from kvtier.types import (
    BatchDone,
    Outcome,
    ReadItem,
    Status,
    StoredBlock,
    Transfer,
    TransferBatch,
    WriteBatch,
    WriteItem,
)

PLACES, GENERATIONS = 1 << 32, 1 << 64  # as the directory's columns are wide

log = logging.getLogger("kvtier")


class Executor:
    """Runs batches over `tiers` (fastest first) and calls `report` from a worker thread with each one's outcome.

    `enqueued` hears before that, with its number and what to wait for, of a streamed batch that a device has taken.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        report: Callable[[BatchDone], None],
        enqueued: Callable[[int, Arrival], None] | None = None,
        recoding: Recoding | None = None,
    ) -> None:
        """recoding: for memory tiers whose codecs differ."""
        self._tiers = tiers
        self._report = report
        self._enqueued = enqueued
        self._recoding = recoding
        self._threads: dict[tuple[int, str], ThreadPoolExecutor] = {}
        self._fences = ThreadPoolExecutor(1, "kvtier-fences")  # starts its thread when there is a fence
        self._queues = {(i, "write"): WriteQueue() for i, tier in enumerate(tiers) if isinstance(tier, SupportsGroups)}
        for index, tier in enumerate(tiers):
            for direction, count in (("read", tier.traits.readers), ("write", 1)):
                name = f"kvtier-{tier.name}-{direction}"
                self._threads[index, direction] = ThreadPoolExecutor(count, thread_name_prefix=name)

    def submit(self, batch: TransferBatch) -> bool:
        """Start a batch. Returns at once: False if the interpreter ends, and nothing runs any more."""
        lane = lane_of(self._tiers, batch)
        queue = self._queues.get(lane)
        if queue is not None:
            queue.put(batch)
        try:
            if queue is None:
                self._threads[lane].submit(self._run, batch)
            else:
                self._threads[lane].submit(self._run_waiting, queue)
        except RuntimeError:  # all that threads which nobody has shut down can say
            return queue is not None and not queue.take_back(batch)
        return True

    def once_passed(self, fence: Any, then: Callable[[bool], None]) -> None:
        """Call `then` from a worker thread once a fence of the top tier has passed, in the order of these calls.

        fence: None passes when all before it have. `then` hears whether the device was lost meanwhile.
        """
        self._fences.submit(self._await, fence, then)

    def close(self) -> None:
        """Wait until everything that was submitted is reported, and end the threads. Idempotent."""
        for threads in (self._fences, *self._threads.values()):
            threads.shutdown(wait=True)

    def _await(self, fence: Any, then: Callable[[bool], None]) -> None:
        lost = False
        try:
            if fence is not None:
                top = self._tiers[0]
                assert isinstance(top, SupportsFences)
                top.passed(fence)
        except KvtierError as error:
            log.error("the work before a fence did not end well: %s", error)
            lost = True
        then(lost)

    def _run(self, batch: TransferBatch) -> None:
        enqueued = partial(self._enqueued, batch.batch_id) if self._enqueued else None
        self._report(carry_out(self._tiers, batch, enqueued, self._recoding))

    def _run_waiting(self, queue: WriteQueue) -> None:
        batches = queue.take()
        if len(batches) == 1:
            self._run(batches[0])
        elif batches:
            for done in carry_out_together(self._tiers, batches, self._recoding):
                self._report(done)


def lane_of(tiers: Sequence[Tier], batch: TransferBatch) -> tuple[int, str]:
    """The tier that works for a batch, and in which direction."""
    source, target = batch.source, batch.target
    if batch.scrub:
        return target, "read"  # stores need not wait for it
    if source == target or tiers[target].traits.persistent:
        return target, "write"
    if tiers[source].traits.persistent or source < target:
        return source, "read"
    return target, "write"


def carry_out(
    tiers: Sequence[Tier],
    batch: TransferBatch,
    enqueued: Callable[[Arrival], None] | None = None,
    recoding: Recoding | None = None,
) -> BatchDone:
    """Execute a batch and say how each item ended. Blocks for the I/O; raises nothing.

    enqueued: called meanwhile, once or never, when nothing but the loss of the device keeps a streamed batch away.
    """
    try:
        outcomes = credible(_outcomes(tiers, batch, enqueued, recoding), batch.outcomes)
    except DeviceLost as error:
        log.error("batch %d from tier %d to %d: %s", batch.batch_id, batch.source, batch.target, error)
        outcomes = [Outcome(Status.DEVICE_LOST, detail=repr(error))] * batch.outcomes
    except BaseException as error:  # SystemExit too: it would end nothing but this batch's acknowledgement
        # A tier that breaks its promise must not hang those who wait for the batch.
        log.exception("batch %d from tier %d to %d failed", batch.batch_id, batch.source, batch.target)
        outcomes = [Outcome(Status.FAILED, detail=repr(error))] * batch.outcomes
    return BatchDone(batch.batch_id, tuple(outcomes))


def carry_out_together(
    tiers: Sequence[Tier], batches: Sequence[TransferBatch], recoding: Recoding | None = None
) -> list[BatchDone]:
    """Write batches into one tier that takes several at once, and say how each one's items ended. Raises nothing."""
    try:
        tier = tiers[batches[0].target]
        assert isinstance(tier, SupportsGroups)
        written = tier.write_together([_to_write(tiers, batch, recoding) for batch in batches])
        return [
            BatchDone(batch.batch_id, tuple(credible(outcomes, batch.outcomes)))
            for batch, outcomes in zip(batches, written, strict=True)
        ]
    except BaseException as error:  # as in `carry_out`
        log.exception("batches %s to tier %d failed", [batch.batch_id for batch in batches], batches[0].target)
        failed = Outcome(Status.FAILED, detail=repr(error))
        return [BatchDone(batch.batch_id, (failed,) * batch.outcomes) for batch in batches]


def credible(outcomes: Sequence[object], count: int) -> list[Outcome]:
    """What a tier answered, and FAILED where that cannot be: it ends as a miss, not as a bug of the engine.

    Raises RuntimeError if there is not one outcome for each of `count` items.
    """
    if len(outcomes) != count:
        raise RuntimeError(f"{len(outcomes)} outcomes for {count} items")
    return [_credible(outcome) for outcome in outcomes]


def _credible(outcome: object) -> Outcome:
    if isinstance(outcome, Outcome) and isinstance(outcome.status, Status):
        place, generation = outcome.place, outcome.generation
        integers = type(place) is type(generation) is int
        if not outcome.done or (integers and 0 <= place < PLACES and 0 <= generation < GENERATIONS):
            return outcome
    log.error("a tier answered %.200r for a block", outcome)
    return Outcome(Status.FAILED, detail=f"the tier answered {outcome!r:.200}")


def _outcomes(
    tiers: Sequence[Tier],
    batch: TransferBatch,
    enqueued: Callable[[Arrival], None] | None,
    recoding: Recoding | None,
) -> list[Outcome]:
    worker, direction = lane_of(tiers, batch)
    tier = tiers[worker]
    if batch.remap is not None:
        assert isinstance(tier, SupportsRemap)
        return [tier.remap(batch.remap)]
    if batch.capacity_bytes is not None:
        assert isinstance(tier, SupportsCapacity)
        return [tier.change_capacity(batch.capacity_bytes)]
    if batch.scrub:
        assert isinstance(tier, SupportsScrub)
        return tier.scrub(
            [StoredBlock(t.key, t.source_place, t.source_generation, t.length_bytes) for t in batch.scrub]
        )
    if batch.drop is not None:
        assert isinstance(tier, SupportsDrop)
        return [tier.drop(batch.drop)]
    if not batch.transfers:
        return tier.write(_to_write(tiers, batch, recoding))
    source, target = tiers[batch.source], tiers[batch.target]
    lender = source if direction == "write" else target
    codec = lender.traits.codec
    recodes = recoding is not None and not tier.traits.persistent and codec != tier.traits.codec
    if recoding is not None and recodes and not recoding.tier_codes:
        return recoding.move(source, target, batch.transfers)
    if direction == "read":
        slots, lengths = _slots(lender), _lengths(lender, batch, recoding)
        return tier.read(
            [
                ReadItem(t.key, t.source_place, t.source_generation, length, slots.slot(t.target_place), codec)
                for t, length in zip(batch.transfers, lengths, strict=True)
            ]
        )
    written = _to_write(tiers, batch, recoding)
    if batch.parts and enqueued is not None and codec == NONE and isinstance(tier, SupportsStreaming):
        return tier.write_streamed(written, batch.parts, enqueued)
    return tier.write(written)


def _to_write(tiers: Sequence[Tier], batch: TransferBatch, recoding: Recoding | None) -> WriteBatch:
    """What the target of a batch is to write; its source lends the slots."""
    if not batch.transfers:
        return WriteBatch((), batch.evict, batch.sidecar)
    lender = tiers[batch.source]
    slots, codec = _slots(lender), lender.traits.codec
    items = [
        WriteItem(t.key, length, slots.slot(t.source_place), t.target_place, codec)
        for t, length in zip(batch.transfers, _lengths(lender, batch, recoding), strict=True)
    ]
    return WriteBatch(items, batch.evict, batch.sidecar)


def _lengths(lender: Tier, batch: TransferBatch, recoding: Recoding | None) -> list[int]:
    """How long each block is in the slots of this tier, in bytes."""
    if lender.traits.codec == NONE:
        return [transfer.length_bytes for transfer in batch.transfers]
    return [_coded_bytes(recoding, transfer) for transfer in batch.transfers]


def _coded_bytes(recoding: Recoding | None, transfer: Transfer) -> int:
    assert recoding is not None, "a memory tier codes, and nothing is there to do it"
    return recoding.coded_bytes(transfer)


def _slots(tier: Tier) -> SupportsSlots:
    assert hasattr(tier, "slot"), f"tier {tier.name} has no slots to lend"  # isinstance would cost 20 us a batch
    return cast(SupportsSlots, tier)
