"""Checks blocks of an open store where they lie, in the form they lie there in.

Owns nothing. Always: a coded block is not decoded, for it may be of a model that this engine does not know; its
checksum and its head are looked at. Any thread.
Units: bytes.
"""

import mmap
from collections.abc import Sequence

import lmdb

from kvtier.blocks.coding import NONE
from kvtier.tiers.lmdb.coding import BlockCoding, head_problem
from kvtier.tiers.lmdb.layout import Record
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.reader import BlockReader, lookup
from kvtier.types import PAGE_BYTES, EvictItem, Outcome, ReadItem, Status, StoredBlock


class Scrubber:
    """Reads for nobody, and verifies whatever the tier's own reads do."""

    def __init__(self, store: OpenStore, coding: BlockCoding) -> None:
        self._store = store
        self._reader = BlockReader(store, True, coding)

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        """One outcome per block, in order."""
        try:
            found = lookup(self._store, [EvictItem(block.key, block.place, block.generation) for block in blocks])
        except lmdb.Error as error:
            return [Outcome(Status.FAILED, detail=f"index: {error}")] * len(blocks)
        records = [entry[1] for entry in found if not isinstance(entry, Outcome)]
        there = [block for block, entry in zip(blocks, found, strict=True) if not isinstance(entry, Outcome)]
        read = iter(self._read(there, records))
        return [entry if isinstance(entry, Outcome) else next(read) for entry in found]

    def _read(self, blocks: Sequence[StoredBlock], records: Sequence[Record]) -> list[Outcome]:
        memory = memoryview(mmap.mmap(-1, max(PAGE_BYTES, sum(record.stride_bytes for record in records))))
        items, at = [], 0
        for block, record in zip(blocks, records, strict=True):
            slot = memory[at : at + record.stride_bytes]
            codec = NONE if record.coded is None else record.coded.codec
            items.append(ReadItem(block.key, block.place, block.generation, record.length_bytes, slot, codec))
            at += len(slot)
        outcomes = self._reader.read(items)
        problems = [head_problem(record, item.into) for item, record in zip(items, records, strict=True)]
        return [
            Outcome(Status.CORRUPT, detail=problem) if outcome.done and problem else outcome
            for outcome, problem in zip(outcomes, problems, strict=True)
        ]
