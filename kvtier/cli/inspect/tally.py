"""Counts a store's records as they stream by, in memory that does not grow with the store but for 8 bytes a record.

Owns: the sums. Units: bytes, milliseconds since 1970.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvtier.blocks.coding import NONE
from kvtier.tiers.lmdb.layout import PLACE_KEY, Record
from kvtier.tiers.lmdb.offline import StoredRecord

AGES_S = (60, 3600, 86_400, 7 * 86_400, 30 * 86_400)
_PLACE_PACKED = 32  # an extent and a slot, 32 bits each, are one number

T = TypeVar("T")


class Tally:
    """What all records seen so far add up to. `keep_places`: remember where they lie, for a sample afterwards."""

    def __init__(self, now_ms: int, keep_places: bool) -> None:
        self.blocks = 0
        self.payload_bytes = 0
        self.slot_bytes = 0
        self.oldest_ms: int | None = None
        self.newest_ms: int | None = None
        self.generation_newest = 0
        self.extents: set[int] = set()
        self.blocks_of: Counter[int] = Counter()  # by namespace id, as is the next
        self.payload_of: Counter[int] = Counter()
        self.coded: dict[str, list[int]] = {}  # codec -> blocks, bytes as attention reads them, as they are stored
        self.blocks_of_stride: Counter[int] = Counter()
        self._ages = [[0, 0] for _ in (*AGES_S, None)]  # blocks, payload bytes
        self._now_ms = now_ms
        self._keep_places = keep_places
        self._places = array("Q")

    def counted(self, records: Iterable[StoredRecord]) -> Iterator[StoredRecord]:
        """The same records, each counted as it passes."""
        for stored in records:
            self._count(stored)
            yield stored

    def sample(self, blocks: int) -> list[bytes]:
        """The place keys of up to `blocks` records, evenly spread over the slab."""
        mask = 2**_PLACE_PACKED - 1
        return [PLACE_KEY.pack(place >> _PLACE_PACKED, place & mask) for place in spread(self._places, blocks)]

    def ages(self) -> list[dict[str, Any]]:
        """How many blocks are younger than each bound, and not than the one before; the last has no bound."""
        bounds = (*AGES_S, None)
        return [
            {"below_s": bound, "blocks": blocks, "payload_bytes": payload_bytes}
            for bound, (blocks, payload_bytes) in zip(bounds, self._ages, strict=True)
        ]

    def _count(self, stored: StoredRecord) -> None:
        record, stride_bytes = stored.record, stored.stride_bytes
        self.blocks += 1
        self.payload_bytes += record.length_bytes
        self.slot_bytes += stride_bytes
        self.extents.add(stored.extent)
        self.blocks_of[record.namespace] += 1
        self.payload_of[record.namespace] += record.length_bytes
        self.blocks_of_stride[stride_bytes] += 1
        self._count_codec(record)
        stored_ms = record.stored_ms
        if self.oldest_ms is None or stored_ms < self.oldest_ms:
            self.oldest_ms = stored_ms
        if self.newest_ms is None or stored_ms > self.newest_ms:
            self.newest_ms = stored_ms
        if record.generation > self.generation_newest:
            self.generation_newest = record.generation
        age_s = (self._now_ms - stored_ms) / 1000
        age = self._ages[bisect_right(AGES_S, age_s)]
        age[0] += 1
        age[1] += record.length_bytes
        if self._keep_places:
            self._places.append(stored.extent << _PLACE_PACKED | stored.slot)

    def _count_codec(self, record: Record) -> None:
        codec = NONE if record.coded is None else record.coded.codec
        sums = self.coded.setdefault(codec, [0, 0, 0])
        sums[0] += 1
        sums[1] += record.raw_bytes
        sums[2] += record.length_bytes


def spread(items: Sequence[T], sample: int) -> list[T]:
    """Up to `sample` items, evenly spread; the first and the last are among them."""
    if sample >= len(items):
        return list(items)
    if sample == 1:
        return [items[0]]
    return [items[position * (len(items) - 1) // (sample - 1)] for position in range(sample)]
