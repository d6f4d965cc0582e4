"""TierMover: carries out moves between the pages that a block manager runs and the memory tier below them.

Owns: a thread that copies. Always: a move that was started ends, whatever happens to the memory; on a device it begins
when the work behind which it was started is over, and nothing is copied to or from one that was lost. Units: bytes.

The pages' tier works and the one below lends its slots, as everywhere: only the upper one knows how to reach a device.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from kvtier.engine.executor import credible
from kvtier.engine.moves import Move
from kvtier.errors import DeviceLost, KvtierError
from kvtier.tiers.base import SupportsFences, SupportsSlots, Tier
from kvtier.types import BatchDone, Outcome, ReadItem, Status, WriteBatch, WriteItem, group_of, store_key

log = logging.getLogger("kvtier")


class SlotTier(Tier, SupportsSlots, Protocol):
    """A tier with slots in memory."""


class TierMover:
    """Copies between two memory tiers, in a thread of its own. `lengths_bytes`: of a block, by group."""

    def __init__(self, pages: Tier, below: SlotTier, lengths_bytes: Sequence[int]) -> None:
        self._pages, self._below, self._lengths = pages, below, tuple(lengths_bytes)
        self._device = pages if isinstance(pages, SupportsFences) else None
        self._after: Any = None
        self._thread = ThreadPoolExecutor(1, "kvtier-mover")
        self._done: SimpleQueue[BatchDone] = SimpleQueue()
        self.device_lost = False

    def follow(self, after: Any) -> None:
        """Moves started from now on copy behind the work before `after`; None: that is over.

        The event is asked for the work that is before it when a move starts. On host memory it is ignored.
        """
        self._after = after

    def start(self, move: Move) -> None:
        try:
            if self.device_lost:
                raise DeviceLost("it was lost before")
            device = self._device if self._after is not None else None
            fence = device.fence(self._after) if device else None
        except KvtierError as error:
            self._end(move, self._nothing(move, error))
        else:
            self._thread.submit(self._carry_out, move, fence)

    def finished(self) -> list[BatchDone]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    def close(self) -> None:
        """Wait for what has been started."""
        self._thread.shutdown()

    def _carry_out(self, move: Move, fence: Any) -> None:
        try:
            if fence is not None and self._device is not None:
                self._device.passed(fence)
            outcomes = credible(self._store(move) if move.kind == "store" else self._load(move), len(move.keys))
        except BaseException as error:  # noqa: BLE001  memory that went away: these blocks are not there, nobody waits
            outcomes = self._nothing(move, error)
        self._end(move, outcomes)

    def _nothing(self, move: Move, error: BaseException) -> list[Outcome]:
        """No block was copied."""
        log.error("%s %d of %d blocks: %r", move.kind, move.move_id, len(move.keys), error)
        self.device_lost |= isinstance(error, DeviceLost)
        status = Status.DEVICE_LOST if isinstance(error, DeviceLost) else Status.FAILED
        return [Outcome(status, detail=repr(error)) for _ in move.keys]

    def _end(self, move: Move, outcomes: Sequence[Outcome]) -> None:
        self._done.put(BatchDone(move.move_id, tuple(outcomes)))

    def _store(self, move: Move) -> list[Outcome]:
        items = [
            ReadItem(store_key(0, key), block, 0, self._lengths[group_of(key)], self._below.slot(slot))
            for key, block, slot in zip(move.keys, move.blocks, move.slots, strict=True)
        ]
        return self._pages.read(items)

    def _load(self, move: Move) -> list[Outcome]:
        items = [
            WriteItem(store_key(0, key), self._lengths[group_of(key)], self._below.slot(slot), block)
            for key, block, slot in zip(move.keys, move.blocks, move.slots, strict=True)
        ]
        return self._pages.write(WriteBatch(items))
