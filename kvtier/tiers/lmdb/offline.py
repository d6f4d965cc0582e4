"""Looks at a store without being its writer: read-only, lock-free, beside a live writer or with none.

Owns: read handles, and what was found damaged on the way. Always: writes nothing to the store, takes no lock of
it; what it holds in memory does not grow with the store. Rows that change meanwhile are seen old or new.
Units: bytes, pages of 4096 bytes, milliseconds since 1970.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.folder import (
    expect_access,
    expect_store,
    expect_trust,
    has_writer,
    stamp_of,
    state_of,
    without_header,
)
from kvtier.tiers.lmdb.foreign import ForeignIndex, RowSource
from kvtier.tiers.lmdb.index import DATA_NAME
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import (
    GENERATION_KEY,
    ID_KEY,
    INDEX_NAME,
    LOCK_NAME,
    NAMESPACE_KEY,
    PLACE_KEY,
    Header,
    Record,
    UnknownVersion,
    decode_extent,
    decode_limit,
    decode_namespace,
    decode_record,
    encode_record,
)
from kvtier.tiers.lmdb.lock import WriterState
from kvtier.tiers.lmdb.payloads import open_to_look, payload_path
from kvtier.tiers.lmdb.slab import Slab
from kvtier.types import PAGE_BYTES

FINDINGS_KEPT = 1000
LOCK_SAYS_NOTHING = "lock: it does not say how the last writer left the store"
UNKNOWN = 2**64  # a limit that could not be read: above every id


class StoredRecord(NamedTuple):
    """A record that can be believed, and where its block lies."""

    place_key: bytes
    record: Record
    extent: int
    slot: int
    stride_bytes: int


class StoreReader:
    """A read-only look at one store. `findings` grows as damaged rows are met, up to FINDINGS_KEPT.

    Its verbs raise Overtaken if it was opened with no writer there and one came, StoreError if the store turns
    out to be damaged, or went away.
    """

    def __init__(self, index: RowSource, slab: Slab | InlineSlab, header: Header, state: WriterState) -> None:
        self.folder = index.folder
        self.live = index.live
        self.header = header
        self.state = state
        self.slab = slab
        self.findings: dict[str, None] = {}
        self.findings_left_out = 0
        self.damaged_rows: set[tuple[str, bytes]] | None = None  # a set: remember table and key of every finding
        self.dropped_records = 0  # met so far: left behind by a drop, and nobody's
        self.unknown_records = 0  # met so far: of versions that this one does not read, to be left alone
        self.unknown_extents: set[int] = set()  # where they lie
        self.namespace_newest = 0  # the highest id that a record named
        self.names: dict[int, tuple[bytes, bytes]] = {}  # tier id -> (fingerprint, description), of all met so far
        self._index = index
        if not state.pid and not self.live:  # beside a writer it is one that has just begun
            self.note(LOCK_SAYS_NOTHING)

    @classmethod
    def open(cls, folder: Path, live: bool = False) -> "StoreReader":
        """live: read as beside a writer even if none is seen.

        Raises StoreError if the folder is not a store that this version reads, or damaged; OSError if it is not
        readable.
        """
        expect_store(folder)
        stamp = stamp_of(folder)
        live = live or has_writer(folder / LOCK_NAME)
        state = state_of(folder)
        expect_trust(folder, state, state.durability, live)
        expect_access(folder, live)
        with ExitStack() as undo:
            index = ForeignIndex(folder, live, stamp)
            undo.callback(index.close)
            header = index.header()
            if header is None:
                raise without_header(folder)
            if not state.pid:
                expect_trust(folder, state, header.durability, live)
            slab = open_to_look(folder, header, live)
            undo.pop_all()
            return cls(index, slab, header, state)

    def expect_undisturbed(self) -> None:
        """Raises Overtaken or StoreError if what was read so far is not to be believed."""
        self._index.expect_undisturbed()

    # ------------------------------------------------------------ tables

    def namespaces(self) -> dict[int, tuple[bytes, bytes]]:
        """Tier id -> (fingerprint, description), of those that exist now."""
        found = {}
        for key, row in self._rows("namespaces"):
            try:
                tier_id, fingerprint, description = decode_namespace(key, row)
            except CorruptBlock as error:
                self.note(f"namespace {key.hex()}: {error}", ("namespaces", key))
            else:
                found[tier_id] = (fingerprint, description)
        self.names |= found
        return found

    def extents(self) -> dict[int, int]:
        """Extent -> stride in pages."""
        found = {}
        for key, row in self._rows("extents"):
            try:
                extent, stride_pages = decode_extent(key, row)
            except CorruptBlock as error:
                self.note(f"extent {key.hex()}: {error}", ("extents", key))
            else:
                found[extent] = stride_pages
        return found

    def has_namespace(self, tier_id: int) -> bool:
        """Whether it has a row now."""
        return self._index.get("namespaces", ID_KEY.pack(tier_id)) is not None

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        """The engine's rows, in key order."""
        return self._rows("sidecar")

    def generation_limit(self) -> int:
        """No record has a generation at or above it; UNKNOWN if its row is damaged."""
        return self._limit(GENERATION_KEY)

    def namespace_limit(self) -> int:
        """No namespace has, or ever had, an id at or above it; UNKNOWN if its row is damaged."""
        return self._limit(NAMESPACE_KEY)

    # ------------------------------------------------------------ blocks

    def records(self, dropped: list[bytes] | None = None) -> Iterator[StoredRecord]:
        """Every record of a namespace that exists, in the order of the slab; damaged ones become findings.

        dropped: takes the place keys of what drops left behind.
        """
        self.dropped_records = self.unknown_records = 0
        extents, limit, known = self.extents(), self.namespace_limit(), self.namespaces()
        for chunk in self._index.chunks("blocks"):
            found = [stored for key, row in chunk if (stored := self._decoded(key, row)) is not None]
            if self.live and any(stored.record.namespace not in known for stored in found):
                known = self.namespaces()  # one may be new since; the others were dropped
            slab_bytes = self.slab.file.length_bytes()
            for stored in found:
                self.namespace_newest = max(self.namespace_newest, stored.record.namespace)
                if stored.record.namespace in known:
                    problem = self._misplaced(stored, extents, slab_bytes)
                elif stored.record.namespace >= limit and not self.live:
                    problem = f"namespace {stored.record.namespace} is unknown"
                else:
                    self.dropped_records += 1
                    if dropped is not None:
                        dropped.append(stored.place_key)
                    continue
                if problem:
                    self.note(f"record {stored.place_key.hex()}: {problem}", ("blocks", stored.place_key))
                else:
                    yield stored

    def records_about(self) -> int:
        """How many rows `records` will look at."""
        return self._index.count("blocks")

    def records_at(self, place_keys: Sequence[bytes]) -> list[StoredRecord | None]:
        """The records at these places now, None where there is none to believe."""
        pairs = zip(place_keys, self._index.fetch(place_keys), strict=True)
        return [None if row is None else self._decoded(key, row) for key, row in pairs]

    def still_there(self, found: Sequence[StoredRecord]) -> list[bool]:
        """Whether each record is what it was, and its namespace exists: then its slot was free at no time before.

        The record is asked for first. An id is never given twice, so a namespace that is there afterwards was
        there then, and the record was nobody's leftover.
        """
        rows = self._index.fetch([stored.place_key for stored in found])
        ids = {stored.record.namespace for stored in found}
        alive = {tier_id for tier_id in ids if self.has_namespace(tier_id)}
        return [
            stored.record.namespace in alive and row == encode_record(stored.place_key, stored.record)
            for stored, row in zip(found, rows, strict=True)
        ]

    def offset_of(self, stored: StoredRecord) -> int:
        """Where the block begins in the slab."""
        return stored.extent * self.header.extent_bytes + stored.slot * stored.stride_bytes

    # ------------------------------------------------------------ the rest

    def disk_bytes(self) -> dict[str, int]:
        """Disk space that slab and index take."""
        paths = {"slab": payload_path(self.folder, self.header), "index": self.folder / INDEX_NAME / DATA_NAME}
        return {name: path.stat().st_blocks * 512 for name, path in paths.items()}

    def note(self, finding: str, row: tuple[str, bytes] | None = None) -> None:
        """Remember what is wrong with a row; each finding once, and not without end."""
        if row is not None and self.damaged_rows is not None:
            self.damaged_rows.add(row)
        if len(self.findings) < FINDINGS_KEPT:
            self.findings[finding] = None
        elif finding not in self.findings:
            self.findings_left_out += 1

    def close(self) -> None:
        self._index.close()
        self.slab.close()

    # ------------------------------------------------------------ inside

    def _rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        for chunk in self._index.chunks(table):
            yield from chunk

    def _decoded(self, place_key: bytes, row: bytes) -> StoredRecord | None:
        """None for a damaged record, which becomes a finding, and for one of a later version, which is none."""
        try:
            if len(place_key) != PLACE_KEY.size:
                raise CorruptBlock("record at no place")
            record = decode_record(place_key, row)
            extent, slot = PLACE_KEY.unpack(place_key)
            return StoredRecord(place_key, record, extent, slot, record.stride_bytes)
        except UnknownVersion:
            self.unknown_records += 1
            self.unknown_extents.add(PLACE_KEY.unpack(place_key)[0])
            return None
        except CorruptBlock as error:
            self.note(f"record {place_key.hex()}: {error}", ("blocks", place_key))
            return None

    def _misplaced(self, stored: StoredRecord, extents: dict[int, int], slab_bytes: int) -> str:
        """Why the block cannot lie where its record says; empty if it can."""
        stride_pages = extents.get(stored.extent)  # beside a writer it may be older than the record
        if not self.live and (stride_pages is None or stride_pages * PAGE_BYTES != stored.stride_bytes):
            return f"length {stored.record.length_bytes} in an extent of {stride_pages} pages per slot"
        inside = (stored.slot + 1) * stored.stride_bytes <= self.header.extent_bytes
        if not inside or self.offset_of(stored) + stored.stride_bytes > slab_bytes:
            return "its slot lies outside the slab"
        return ""

    def _limit(self, key: bytes) -> int:
        row = self._index.get("meta", key)
        try:
            return 1 if row is None else decode_limit(key, row)
        except CorruptBlock as error:
            self.note(f"meta {key.decode()}: {error}", ("meta", key))
            return UNKNOWN
