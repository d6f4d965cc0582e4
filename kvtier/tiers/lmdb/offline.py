"""Looks at a store without being its writer: read-only, lock-free, beside a live writer or with none.

Owns: read handles. Always: writes nothing and takes no lock of the store. With a live writer it uses LMDB's
reader table (for moments, so that it never keeps the writer from reusing pages), holds no transaction across
I/O, and re-reads a record before it calls a block corrupt.
Units: bytes, pages of 4096 bytes, milliseconds since 1970.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.codec import checksum
from kvtier.errors import CorruptBlock, StoreFormatError
from kvtier.tiers.lmdb.index import DATA_NAME, Index
from kvtier.tiers.lmdb.layout import (
    INDEX_NAME,
    LOCK_NAME,
    NAMESPACE_KEY,
    PLACE_KEY,
    SLAB_NAME,
    Header,
    Record,
    decode_extent,
    decode_limit,
    decode_namespace,
    decode_record,
)
from kvtier.tiers.lmdb.lock import WriterState, read_state
from kvtier.tiers.lmdb.opening import read_header
from kvtier.types import PAGE_BYTES, page_aligned

_NOT_A_STORE = "Name the folder of an lmdb tier (its `path` in the YAML)"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record that can be believed, and where its block lies."""

    place_key: bytes
    record: Record
    extent: int
    slot: int

    @property
    def stride_bytes(self) -> int:
        return page_aligned(self.record.length_bytes)


class StoreReader:
    """A read-only look at one store. `findings` grows as damage is met."""

    def __init__(self, folder: Path, index: Index, header: Header, state: WriterState, live: bool) -> None:
        self.folder = folder
        self.header = header
        self.state = state
        self.live = live
        self.findings: list[str] = []
        self._index = index
        self._transaction = index.transaction_id()
        self._slab = os.open(folder / SLAB_NAME, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def open(cls, folder: Path, live: bool = False) -> "StoreReader":
        """live: read as beside a writer even if none is seen.

        Raises StoreFormatError if the folder is not a store this version reads, OSError if it is not readable.
        """
        data = folder / INDEX_NAME / DATA_NAME
        if not data.is_file() or not (folder / SLAB_NAME).is_file() or not (folder / LOCK_NAME).is_file():
            what = (
                "it is not a store" if folder.is_dir() else "it is not a folder" if folder.exists() else "no such path"
            )
            raise StoreFormatError(str(folder), what, _NOT_A_STORE)
        live = live or has_writer(folder / LOCK_NAME)
        index = Index.open_readonly(data.parent, live)
        try:
            header = read_header(folder, index)
            if header is None:
                raise StoreFormatError(str(folder), "the index has no header", _NOT_A_STORE)
            return cls(folder, index, header, _state_of(folder), live)
        except BaseException:
            index.close()
            raise

    @property
    def overtaken(self) -> bool:
        """Whether a writer came after all: what was read without its knowledge may be nonsense. Open anew, live."""
        return not self.live and self._index.transaction_id() != self._transaction

    def namespaces(self) -> dict[int, tuple[bytes, bytes]]:
        """Tier id -> (fingerprint, description)."""
        found = {}
        for key, row in self._index.rows("namespaces"):
            try:
                tier_id, fingerprint, description = decode_namespace(key, row)
            except CorruptBlock as error:
                self.findings.append(f"namespace {key.hex()}: {error}")
            else:
                found[tier_id] = (fingerprint, description)
        return found

    def extents(self) -> dict[int, int]:
        """Extent -> stride in pages."""
        found = {}
        for key, row in self._index.rows("extents"):
            try:
                extent, stride_pages = decode_extent(key, row)
            except CorruptBlock as error:
                self.findings.append(f"extent {key.hex()}: {error}")
            else:
                found[extent] = stride_pages
        return found

    def records(self) -> Iterator[StoredRecord]:
        """Every record of a namespace that exists; damaged ones become findings, dropped ones are passed over."""
        namespaces, extents, limit = self.namespaces(), self.extents(), self._namespace_limit()
        for place_key, row in self._index.rows("blocks"):
            try:
                stored = _decoded(place_key, row)
                if stored.record.namespace in namespaces:
                    self._expect_place(stored, extents)
                elif stored.record.namespace >= limit and not self.live:
                    raise CorruptBlock(f"namespace {stored.record.namespace} is unknown")
                else:
                    continue
            except CorruptBlock as error:
                self.findings.append(f"record {place_key.hex()}: {error}")
            else:
                yield stored

    def verify(self, stored: StoredRecord) -> bool:
        """Whether the payload matches its record; False is also a finding. True for a block that moved meanwhile."""
        for _ in range(2):
            payload = os.pread(self._slab, stored.record.length_bytes, self._offset(stored))
            whole = len(payload) == stored.record.length_bytes
            if whole and checksum(stored.record.key, payload) == stored.record.checksum:
                return True
            if not self._is_unchanged(stored):
                return True
        self.findings.append(f"block at {stored.place_key.hex()}: its bytes do not match their checksum")
        return False

    def disk_bytes(self) -> dict[str, int]:
        """Disk space that slab and index take."""
        data = self.folder / INDEX_NAME / DATA_NAME
        return {"slab": os.fstat(self._slab).st_blocks * 512, "index": data.stat().st_blocks * 512}

    def close(self) -> None:
        self._index.close()
        os.close(self._slab)

    # ------------------------------------------------------------ inside

    def _expect_place(self, stored: StoredRecord, extents: dict[int, int]) -> None:
        """Raises CorruptBlock if the block cannot lie where its record says."""
        stride_pages = extents.get(stored.extent)
        if self.live:
            return  # the extent's row may be older than the record
        if stride_pages is None or stride_pages * PAGE_BYTES != stored.stride_bytes:
            raise CorruptBlock(f"length {stored.record.length_bytes} in an extent of {stride_pages} pages per slot")
        inside = (stored.slot + 1) * stored.stride_bytes <= self.header.extent_bytes
        if not inside or self._offset(stored) + stored.stride_bytes > os.fstat(self._slab).st_size:
            raise CorruptBlock("its slot lies outside the slab")

    def _offset(self, stored: StoredRecord) -> int:
        return stored.extent * self.header.extent_bytes + stored.slot * stored.stride_bytes

    def _is_unchanged(self, stored: StoredRecord) -> bool:
        row = self._index.fetch([stored.place_key])[0]
        try:
            return row is not None and decode_record(stored.place_key, row) == stored.record
        except CorruptBlock:
            return True

    def _namespace_limit(self) -> int:
        row = self._index.get("meta", NAMESPACE_KEY)
        try:
            return 1 if row is None else decode_limit(NAMESPACE_KEY, row)
        except CorruptBlock as error:
            self.findings.append(f"meta {NAMESPACE_KEY.decode()}: {error}")
            return 2**32


def _decoded(place_key: bytes, row: bytes) -> StoredRecord:
    if len(place_key) != PLACE_KEY.size:
        raise CorruptBlock("record at no place")
    return StoredRecord(place_key, decode_record(place_key, row), *PLACE_KEY.unpack(place_key))


def has_writer(lock: Path) -> bool:
    """Whether a process holds the store's lock, learnt without touching it: the kernel lists all locks.

    True where the kernel does not tell: then the careful way of reading is taken.
    """
    try:
        table = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return True
    found = lock.stat()
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any("FLOCK" in line and inode in line.split() for line in table)


def _state_of(folder: Path) -> WriterState:
    fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_state(fd)
    finally:
        os.close(fd)
