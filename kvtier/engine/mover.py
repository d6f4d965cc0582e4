"""TierMover: carries out moves between two memory tiers.

Owns: a thread that copies. Always: a move that was started ends, whatever happens to the memory. Units: bytes.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtier.engine.executor import credible
from kvtier.engine.moves import Move
from kvtier.tiers.base import SupportsSlots, Tier
from kvtier.types import BatchDone, Outcome, ReadItem, Status, WriteBatch, WriteItem, group_of, store_key


class SlotTier(Tier, SupportsSlots, Protocol):
    """A tier with slots in memory."""


class TierMover:
    """Copies between two memory tiers, in a thread of its own. `lengths_bytes`: of a block, by group."""

    def __init__(self, pages: SlotTier, below: SlotTier, lengths_bytes: Sequence[int]) -> None:
        self._pages, self._below, self._lengths = pages, below, tuple(lengths_bytes)
        self._thread = ThreadPoolExecutor(1, "kvtier-mover")
        self._done: SimpleQueue[BatchDone] = SimpleQueue()

    def start(self, move: Move) -> None:
        self._thread.submit(self._carry_out, move)

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

    def _carry_out(self, move: Move) -> None:
        try:
            outcomes = credible(self._store(move) if move.kind == "store" else self._load(move), len(move.keys))
        except BaseException as error:  # noqa: BLE001  memory that went away: these blocks are not there, nobody waits
            outcomes = [Outcome(Status.FAILED, detail=repr(error)) for _ in move.keys]
        self._done.put(BatchDone(move.move_id, tuple(outcomes)))

    def _store(self, move: Move) -> list[Outcome]:
        items = [
            WriteItem(store_key(0, key), self._lengths[group_of(key)], self._pages.slot(block), slot)
            for key, block, slot in zip(move.keys, move.blocks, move.slots, strict=True)
        ]
        return self._below.write(WriteBatch(items))

    def _load(self, move: Move) -> list[Outcome]:
        items = [
            ReadItem(store_key(0, key), slot, 0, self._lengths[group_of(key)], self._pages.slot(block))
            for key, block, slot in zip(move.keys, move.blocks, move.slots, strict=True)
        ]
        return self._below.read(items)
