"""Reads the blocks of a store that somebody may be writing to, and says of each whether its bytes are its own.

Owns: one buffer of `batch_bytes`, used again for every batch. Always: no transaction is open while payload moves;
a block is called corrupt only if its record and its namespace were there, unchanged, after each of two reads that
went wrong. Such a slot was not free at any time before, so nobody but the device can have changed its bytes.
Units: bytes.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.tiers.lmdb.coding import head_problem
from kvtier.tiers.lmdb.offline import StoredRecord, StoreReader
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab

BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 4096


class Verdict(Enum):
    """What became of one block."""

    SOUND = "sound"
    MOVED = "moved"  # its record changed or went while it was read
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"  # the device refused; it may not do so next time


class Audited(NamedTuple):
    """One block's verdict; `detail` says what is wrong with a bad one."""

    stored: StoredRecord
    verdict: Verdict
    detail: str = ""


class Audit:
    """Checks the payload of one store's records, batch by batch, in the order they are given."""

    def __init__(self, reader: StoreReader, batch_bytes: int = BATCH_BYTES) -> None:
        self._reader = reader
        self._batch_bytes = batch_bytes
        self._buffer = mmap.mmap(-1, batch_bytes)

    def run(self, records: Iterable[StoredRecord]) -> Iterator[list[Audited]]:
        """A verdict for each record's place, a batch at a time. Nothing is read ahead of what the caller has taken.

        Beside a writer a list is soon out of date: of a place that has another block by the time its turn comes,
        that block is checked.
        """
        for listed in batches(records, self._batch_bytes, _BATCH_BLOCKS):
            current, gone = self._renewed(listed)
            if gone:
                yield gone
            for batch in batches(current, self._batch_bytes, _BATCH_BLOCKS):
                yield self._judge(batch)

    def _renewed(self, listed: list[StoredRecord]) -> tuple[list[StoredRecord], list[Audited]]:
        """The records at the same places now, and a verdict for those without one."""
        if not self._reader.live:
            return listed, []
        now = self._reader.records_at([stored.place_key for stored in listed])
        gone = [stored for stored, current in zip(listed, now, strict=True) if current is None]
        return [current for current in now if current is not None], [Audited(stored, Verdict.MOVED) for stored in gone]

    def _judge(self, batch: Sequence[StoredRecord]) -> list[Audited]:
        if batch[0].stride_bytes > len(self._buffer):  # a single block, larger than a batch
            self._buffer = mmap.mmap(-1, batch[0].stride_bytes)
        verdicts = {stored.place_key: Audited(stored, Verdict.SOUND) for stored in batch}
        wrong = self._read(batch)
        for last in (False, True):
            if not wrong:
                break
            there = self._reader.still_there([audited.stored for audited in wrong])
            for audited, unchanged in zip(wrong, there, strict=True):
                verdicts[audited.stored.place_key] = audited if unchanged else Audited(audited.stored, Verdict.MOVED)
            if not last:
                again = [audited.stored for audited, unchanged in zip(wrong, there, strict=True) if unchanged]
                verdicts.update((stored.place_key, Audited(stored, Verdict.SOUND)) for stored in again)
                self._forget_cached(again)
                wrong = self._read(again)
        return list(verdicts.values())

    def _read(self, batch: Sequence[StoredRecord]) -> list[Audited]:
        """Read the blocks; returns those whose bytes are not what their record says, or did not come."""
        view, start = memoryview(self._buffer), 0
        ios = []
        for stored in batch:
            record, stride = stored.record, stored.stride_bytes
            slot = view[start : start + stride]
            ios.append(SlotIO(record.key, self._reader.offset_of(stored), stride, record.length_bytes, slot))
            start += stride
        self._reader.slab.read(ios, verify=True)
        wrong = []
        for stored, io in zip(batch, ios, strict=True):
            if isinstance(io.error, TruncatedSlab):
                wrong.append(Audited(stored, Verdict.CORRUPT, io.error.strerror or ""))
            elif io.error is not None:
                wrong.append(Audited(stored, Verdict.UNREADABLE, str(io.error)))
            elif io.checksum != stored.record.checksum:
                wrong.append(Audited(stored, Verdict.CORRUPT, "its bytes do not match their checksum"))
            elif problem := head_problem(stored.record, io.view):
                wrong.append(Audited(stored, Verdict.CORRUPT, problem))
        return wrong

    def _forget_cached(self, batch: Iterable[StoredRecord]) -> None:
        """Where reads go through the page cache, the second one shall see the device."""
        file = self._reader.slab.file
        if not file.direct:
            for stored in batch:
                file.forget_cached(self._reader.offset_of(stored), stored.stride_bytes)


def batches(records: Iterable[StoredRecord], bytes_max: int, blocks_max: int) -> Iterator[list[StoredRecord]]:
    """The records in their order, in lists of at most so many blocks and bytes of slots; a larger one by itself."""
    batch: list[StoredRecord] = []
    batch_bytes = 0
    for stored in records:
        if batch and (batch_bytes + stored.stride_bytes > bytes_max or len(batch) == blocks_max):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(stored)
        batch_bytes += stored.stride_bytes
    if batch:
        yield batch
