"""Reads the blocks of a store in the order in which they were written, each checked, beside a writer or with none.

Owns: one buffer, used again for every batch. Always: no transaction is open while payload moves; a block is handed out
only with bytes that match its checksum and a record that names it. Memory: 16 bytes a block, and a batch.
Units: bytes.
"""

import mmap
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.lmdb.audit import BATCH_BYTES, Audit, Verdict, batches
from kvtier.tiers.lmdb.layout import PLACE_KEY
from kvtier.tiers.lmdb.offline import StoredRecord, StoreReader
from kvtier.tiers.lmdb.slab import SlotIO

BATCH_BLOCKS = 1024


class Block(NamedTuple):
    """A block's record and its payload, a view of the batch's buffer."""

    stored: StoredRecord
    payload: memoryview


class OutgoingBlocks:
    """All blocks of some namespaces (the store's ids) with a generation above `after`.

    `verdicts`: what became of them.
    """

    def __init__(self, reader: StoreReader, namespaces: Collection[int], after: int, batch_bytes: int = BATCH_BYTES):
        self.verdicts: Counter[Verdict] = Counter()
        self._reader = reader
        self._namespaces = namespaces
        self._batch_bytes = batch_bytes
        self._buffer = mmap.mmap(-1, batch_bytes)
        self._generations, self._places = self._in_order(after)

    def __len__(self) -> int:
        return len(self._places)

    def batches(self) -> Iterator[list[Block]]:
        """The blocks, oldest first; a batch is valid until the next one is asked for. Those that moved meanwhile, and
        bad ones, are left out and counted."""
        for start in range(0, len(self._places), BATCH_BLOCKS):
            keys = [bytes(place) for place in self._places[start : start + BATCH_BLOCKS].tolist()]
            generations = self._generations[start : start + BATCH_BLOCKS].tolist()
            records = zip(self._reader.records_at(keys), generations, strict=True)
            found = [one for one, generation in records if one is not None and one.record.generation == generation]
            self.verdicts[Verdict.MOVED] += len(keys) - len(found)
            for batch in batches(found, self._batch_bytes, len(found)):
                yield self._read(batch)

    def _in_order(self, after: int) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
        """Generations and place keys."""
        generations, places = array("Q"), bytearray()
        for stored in self._reader.records():
            if stored.record.namespace in self._namespaces and stored.record.generation > after:
                generations.append(stored.record.generation)
                places += stored.place_key
        unordered = np.frombuffer(generations, np.uint64)
        order = np.argsort(unordered, kind="stable")
        return unordered[order], np.frombuffer(bytes(places), f"V{PLACE_KEY.size}")[order]

    def _read(self, batch: Sequence[StoredRecord]) -> list[Block]:
        if batch[0].stride_bytes > len(self._buffer):  # a single block, larger than a batch
            self._buffer = mmap.mmap(-1, batch[0].stride_bytes)
        blocks = self._attempt(batch)
        good = {block.stored.place_key for block in blocks}
        wrong = [stored for stored in batch if stored.place_key not in good]
        self.verdicts[Verdict.SOUND] += len(blocks)
        for verdicts in Audit(self._reader, self._batch_bytes).run(wrong) if wrong else ():
            # One that is sound now is another block by now, or was misread: the next export has it.
            self.verdicts.update(Verdict.MOVED if one.verdict is Verdict.SOUND else one.verdict for one in verdicts)
        return blocks

    def _attempt(self, batch: Sequence[StoredRecord]) -> list[Block]:
        view, at = memoryview(self._buffer), 0
        ios = []
        for stored in batch:
            record = stored.record
            slot = view[at : at + stored.stride_bytes]
            ios.append(
                SlotIO(record.key, self._reader.offset_of(stored), stored.stride_bytes, record.length_bytes, slot)
            )
            at += stored.stride_bytes
        self._reader.slab.read(ios, verify=True)
        return [
            Block(stored, io.view[: stored.record.length_bytes])
            for stored, io in zip(batch, ios, strict=True)
            if io.error is None and io.checksum == stored.record.checksum
        ]
