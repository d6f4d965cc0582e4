"""Records of the table `blocks`, decoded many at a time into columns.

Owns the columns: lengths as attention reads the blocks, and the pages of their slots. Always: a record is among them
only if `layout.decode_record` would give the same; a row that is not at once seen to be right goes to `doubtful`, by
its key, for whoever looks at it alone and says what is wrong.
Units: bytes.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.tiers.lmdb.layout import (
    CHECK_BYTES,
    CODEC_NAMES,
    CODED_RECORD_VERSION,
    GENERATION_MAX,
    PLACE_KEY,
    RECORD_HEAD_BYTES,
    RECORD_VERSION,
)
from kvtier.types import GROUP_BYTES, HASH_BYTES_MAX, PAGE_BYTES

# The place of a record, and its fields as `layout` packs them; a key of h + 4 bytes and the check follow.
_FIELDS = [
    ("extent", ">u4"),
    ("slot", ">u4"),
    ("version", "u1"),
    ("flags", "u1"),
    ("hash_bytes", "u1"),
    ("reserved", "u1"),
    ("namespace", "<u4"),
    ("length", "<u4"),
    ("generation", "<u8"),
    ("checksum", "<u8"),
    ("stored_ms", "<u8"),
]
_CODED_FIELDS = [("raw", "<u4"), ("pages", "<u4")]  # of a block that is kept coded
KEPT = ("extent", "slot", "namespace", "length", "generation", "key", "pages")
_VERSION_AT = PLACE_KEY.size

Columns = dict[str, NDArray[Any]]


class Records:
    """What a table of records holds. `doubtful`: keys of rows that are not decoded here."""

    def __init__(self) -> None:
        self.doubtful: list[bytes] = []
        self._chunks: list[Columns] = []

    def add(self, rows: NDArray[np.void]) -> None:
        """Rows that have one length, each behind its key of 8 bytes."""
        if rows.itemsize <= _VERSION_AT:
            self._doubt(rows)
            return
        versions = rows.view(np.uint8).reshape(len(rows), rows.itemsize)[:, _VERSION_AT]
        for coded, version in ((False, RECORD_VERSION), (True, CODED_RECORD_VERSION)):
            if (some := versions == version).any():
                self._add(rows[some], coded)
        self._doubt(rows[(versions != RECORD_VERSION) & (versions != CODED_RECORD_VERSION)])

    def _add(self, rows: NDArray[np.void], coded: bool) -> None:
        """Rows of one version."""
        more = _CODED_FIELDS if coded else []
        more_bytes = np.dtype(more).itemsize if more else 0
        hash_bytes = rows.itemsize - PLACE_KEY.size - RECORD_HEAD_BYTES - more_bytes - GROUP_BYTES - CHECK_BYTES
        if not 1 <= hash_bytes <= HASH_BYTES_MAX:
            self._doubt(rows)
            return
        key = [("key", f"V{hash_bytes + GROUP_BYTES}"), ("check", "<u8")]
        fields = rows.view(np.dtype(_FIELDS + more + key))
        sealed = rows.view(np.dtype([("body", f"V{rows.itemsize - CHECK_BYTES}"), ("check", "<u8")]))
        checks = np.fromiter(map(xxhash.xxh3_64_intdigest, sealed["body"].tolist()), np.uint64, len(rows))
        right = (checks == fields["check"]) & (fields["flags"] == 0)
        right &= (fields["hash_bytes"] == hash_bytes) & (fields["length"] != 0)
        right &= fields["generation"] <= GENERATION_MAX
        length_pages = -(-fields["length"].astype(np.int64) // PAGE_BYTES)
        sizes = {"length": fields["length"], "pages": length_pages}
        if coded:
            sizes = {"length": fields["raw"], "pages": fields["pages"].astype(np.int64)}
            right &= np.isin(fields["reserved"], list(CODEC_NAMES)) & (fields["raw"] != 0)
            right &= length_pages <= sizes["pages"]
        else:
            right &= fields["reserved"] == 0
        self._doubt(rows[~right])
        columns = {name: fields[name] for name in KEPT if name not in sizes} | sizes
        self._chunks.append({name: column[right] for name, column in columns.items()})

    def add_rows(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Keys and values as LMDB gives them."""
        for (key_bytes, row_bytes), alike in groupby(rows, key=lambda row: (len(row[0]), len(row[1]))):
            if key_bytes == PLACE_KEY.size:
                joined = b"".join(key + row for key, row in alike)
                self.add(np.frombuffer(joined, f"V{key_bytes + row_bytes}"))
            else:
                self.doubtful += [key for key, _ in alike]

    def drain(self) -> Iterator[Columns]:
        """Columns (those of KEPT, equally long) of records that are right, in the order of adding; each once."""
        chunks, self._chunks = self._chunks, []
        chunks.reverse()
        while chunks:
            yield chunks.pop()

    def _doubt(self, rows: NDArray[np.void]) -> None:
        self.doubtful += [row[: PLACE_KEY.size] for row in rows.tolist()]
