"""Reads blocks by place, and never passes on bytes that are not the block's.

Owns nothing; any number of threads may read at once, beside the writer.
Always: DONE means that the record named this key and generation, and (with `verify`) that the bytes matched its
checksum, or (without) that the record was still the same after the bytes had come. No transaction is open while
payload moves.

    bytes right                                     DONE
    wrong, and the record changed meanwhile         MISSING    the slot has a newer occupant
    wrong, record unchanged, wrong again            CORRUPT
    the slab ends before the slot                   CORRUPT    they will not come back
    the device refused                              FAILED     they may
"""

from collections.abc import Sequence
from dataclasses import dataclass

import lmdb

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.layout import PLACE_KEY, Record, decode_record
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab
from kvtier.types import (
    DONE,
    PAGE_BYTES,
    EvictItem,
    Outcome,
    ReadItem,
    Status,
    block_key_of,
    namespace_of,
    page_aligned,
)

MISSING = Outcome(Status.MISSING)


@dataclass(slots=True)
class _Reading:
    """One item on its way: what the index said, the transfer, and the end once it is known."""

    item: ReadItem
    place_key: bytes
    record: Record
    io: SlotIO
    outcome: Outcome | None = None


class BlockReader:
    """Reads from one open store."""

    def __init__(self, store: OpenStore, verify: bool) -> None:
        self._store = store
        self._verify = verify

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """One outcome per item, in order."""
        try:
            records = lookup(self._store, items)
            prepared = [self._prepare(item, found) for item, found in zip(items, records, strict=True)]
            readings = [entry for entry in prepared if isinstance(entry, _Reading)]
            self._fill(readings)
        except lmdb.Error as error:
            return [Outcome(Status.FAILED, detail=f"index: {error}")] * len(items)
        return [_end_of(entry) for entry in prepared]

    def _prepare(self, item: ReadItem, found: tuple[bytes, Record] | Outcome) -> _Reading | Outcome:
        if isinstance(found, Outcome):
            return found
        place_key, record = found
        if record.length_bytes != item.length_bytes:
            return Outcome(Status.MISSING, detail=f"the block has {record.length_bytes} bytes")
        if len(item.into) < item.length_bytes or item.into.readonly:
            return Outcome(Status.FAILED, detail=f"a view of {len(item.into)} bytes cannot take the block")
        stride = page_aligned(record.length_bytes)
        io = SlotIO(record.key, item.place * PAGE_BYTES, stride, record.length_bytes, item.into)
        return _Reading(item, place_key, record, io)

    def _fill(self, readings: Sequence[_Reading]) -> None:
        """Read, and decide every reading's outcome."""
        self._store.slab.read([reading.io for reading in readings], self._verify)
        doubtful = [reading for reading in readings if not self._settled(reading)]
        if not doubtful:
            return
        again = self._still_there(doubtful)
        if self._verify:
            self._store.slab.read([reading.io for reading in again], verify=True)
            again = self._still_there([reading for reading in again if not self._settled(reading)])
        for reading in again:
            corrupt = Outcome(Status.CORRUPT, detail="the bytes do not match their checksum")
            reading.outcome = corrupt if self._verify else DONE

    def _settled(self, reading: _Reading) -> bool:
        """Whether the bytes that came decide the outcome by themselves."""
        error = reading.io.error
        if isinstance(error, TruncatedSlab):
            reading.outcome = Outcome(Status.CORRUPT, detail=str(error))
        elif error is not None:
            reading.outcome = Outcome(Status.FAILED, detail=str(error))
        elif self._verify and reading.io.checksum == reading.record.checksum:
            reading.outcome = DONE
        return reading.outcome is not None

    def _still_there(self, readings: list[_Reading]) -> list[_Reading]:
        """Those whose record is what it was before the bytes were read; the others are MISSING."""
        same = []
        rows = self._store.index.fetch([reading.place_key for reading in readings])
        for reading, row in zip(readings, rows, strict=True):
            named = self._store.names.to_local(reading.record.namespace) is not None  # a drop leaves its records behind
            if named and row is not None and decode_or_none(reading.place_key, row) == reading.record:
                same.append(reading)
            else:
                reading.outcome = MISSING
        return same


def lookup(store: OpenStore, items: Sequence[ReadItem | EvictItem]) -> list[tuple[bytes, Record] | Outcome]:
    """Per item the place's key and record if they are still the item's own, else MISSING or CORRUPT.

    One short transaction. Raises lmdb.Error.
    """
    slots = [store.allocator.slot_of(item.place) if item.place >= 0 else None for item in items]
    keys = [None if slot is None else PLACE_KEY.pack(*slot) for slot in slots]
    rows = iter(store.index.fetch([key for key in keys if key is not None]))
    return [
        MISSING if key is None else _judged(store, key, next(rows), item) for key, item in zip(keys, items, strict=True)
    ]


def _judged(
    store: OpenStore, place_key: bytes, row: bytes | None, item: ReadItem | EvictItem
) -> tuple[bytes, Record] | Outcome:
    if row is None:
        return MISSING
    try:
        record = decode_record(place_key, row)
    except CorruptBlock as error:
        return Outcome(Status.CORRUPT, detail=str(error))
    ours = store.names.to_tier(namespace_of(item.key)) == record.namespace
    same = ours and record.key == block_key_of(item.key) and record.generation == item.generation
    return (place_key, record) if same else MISSING


def decode_or_none(place_key: bytes, row: bytes) -> Record | None:
    try:
        return decode_record(place_key, row)
    except CorruptBlock:
        return None


def _end_of(entry: _Reading | Outcome) -> Outcome:
    if isinstance(entry, Outcome):
        return entry
    assert entry.outcome is not None, "every reading was decided"
    return entry.outcome
