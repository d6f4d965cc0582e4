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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lmdb

from kvtier.blocks.coding import NONE
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.coding import BlockCoding
from kvtier.tiers.lmdb.layout import PLACE_KEY, Record, decode_record
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab
from kvtier.types import (
    DONE,
    NAMESPACE_BYTES,
    PAGE_BYTES,
    EvictItem,
    Outcome,
    ReadItem,
    Status,
)

MISSING = Outcome(Status.MISSING)
Found = tuple[bytes, Record] | Outcome  # a place's key and record, or why there is none


@dataclass(slots=True)
class _Reading:
    """One item on its way: what the index said, the transfer, and the end once it is known."""

    item: ReadItem
    place_key: bytes
    record: Record
    io: SlotIO
    decodes: bool  # the transfer ends in scratch memory, and its item wants the block as it was
    outcome: Outcome | None = None


class BlockReader:
    """Reads from one open store."""

    def __init__(self, store: OpenStore, verify: bool, coding: BlockCoding) -> None:
        self._store = store
        self._verify = verify
        self._coding = coding

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """One outcome per item, in order."""
        try:
            found = lookup(self._store, items)
            with self._coding.scratch(_scratch_bytes(items, found)) as scratch:
                return self._read(items, found, scratch)
        except lmdb.Error as error:
            return [Outcome(Status.FAILED, detail=f"index: {error}")] * len(items)

    def _read(self, items: Sequence[ReadItem], found: Sequence[Found], scratch: memoryview) -> list[Outcome]:
        prepared: list[_Reading | Outcome] = []
        readings = []
        for item, entry in zip(items, found, strict=True):
            one = entry if isinstance(entry, Outcome) else _prepare(item, *entry, scratch)
            prepared.append(one)
            if isinstance(one, _Reading):
                readings.append(one)
                if one.decodes:
                    scratch = scratch[one.record.stride_bytes :]
        self._fill(readings)
        if coded := [reading for reading in readings if reading.decodes and reading.outcome is DONE]:
            self._decode(coded)
        return [_end_of(entry) for entry in prepared]

    def _decode(self, readings: Sequence[_Reading]) -> None:
        """Out of scratch memory into the items' views. What does not decode was stored wrong, whatever its checksum."""
        blocks = [(r.item.key, r.record.coded, r.io.view[: r.record.length_bytes], r.item.into) for r in readings]
        sound = self._coding.decode([(k, coded, block, into) for k, coded, block, into in blocks if coded is not None])
        for reading, is_sound in zip(readings, sound, strict=True):
            if not is_sound:
                reading.outcome = Outcome(Status.CORRUPT, detail="its coded form cannot be decoded")

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
        if error is None:
            if not self._verify or reading.io.checksum != reading.record.checksum:
                return False
            reading.outcome = DONE
        elif isinstance(error, TruncatedSlab):
            reading.outcome = Outcome(Status.CORRUPT, detail=str(error))
        else:
            reading.outcome = Outcome(Status.FAILED, detail=str(error))
        return True

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


def _prepare(item: ReadItem, place_key: bytes, record: Record, scratch: memoryview) -> _Reading | Outcome:
    """The transfer, into the item's view or, if it ends in decoding, to the head of `scratch`."""
    length_bytes, codec, view, decodes = record.length_bytes, NONE, item.into, False
    if record.coded is not None and _decodes(item, record):
        length_bytes, view, decodes = record.coded.raw_bytes, scratch[: record.coded.stride_bytes], True
    elif record.coded is not None:
        codec = record.coded.codec
    if length_bytes != item.length_bytes or codec != item.codec:
        return Outcome(Status.MISSING, detail=f"the block has {length_bytes} bytes in codec {codec}")
    if len(item.into) < length_bytes or item.into.readonly:
        return Outcome(Status.FAILED, detail=f"a view of {len(item.into)} bytes cannot take the block")
    io = SlotIO(record.key, item.place * PAGE_BYTES, record.stride_bytes, record.length_bytes, view)
    return _Reading(item, place_key, record, io, decodes)


def _decodes(item: ReadItem, record: Record) -> bool:
    return record.coded is not None and item.codec == NONE


def _scratch_bytes(items: Sequence[ReadItem], found: Sequence[Found]) -> int:
    """What the blocks need that are decoded."""
    records = [(item, entry[1]) for item, entry in zip(items, found, strict=True) if not isinstance(entry, Outcome)]
    return sum(record.stride_bytes for item, record in records if _decodes(item, record))


def rows_at(store: OpenStore, slots: Iterable[tuple[int, int] | None]) -> list[tuple[bytes, bytes | None]]:
    """The key of each slot's record, and what the index has there; an empty key for none.

    One short transaction. Raises lmdb.Error.
    """
    keys = [b"" if slot is None else PLACE_KEY.pack(*slot) for slot in slots]
    rows = iter(store.index.fetch(filter(None, keys)))
    return [(key, next(rows) if key else None) for key in keys]


def lookup(store: OpenStore, items: Sequence[ReadItem | EvictItem]) -> list[Found]:
    """Per item the place's key and record if they are still the item's own, else MISSING or CORRUPT.

    One short transaction. Raises lmdb.Error.
    """
    names = store.names.to_tier_by_prefix(item.key for item in items)
    rows = rows_at(store, store.allocator.slots_of([item.place for item in items]))
    return [
        MISSING if row is None else judged(key, row, item, names[item.key[:NAMESPACE_BYTES]])
        for item, (key, row) in zip(items, rows, strict=True)
    ]


def judged(place_key: bytes, row: bytes, item: ReadItem | EvictItem, namespace: int | None) -> Found:
    """What a row says of the item; namespace: the item's, in the tier's own ids."""
    try:
        record = decode_record(place_key, row)
    except CorruptBlock as error:
        return Outcome(Status.CORRUPT, detail=str(error))
    same = record.generation == item.generation and record.namespace == namespace
    return (place_key, record) if same and record.key == item.key[NAMESPACE_BYTES:] else MISSING


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
