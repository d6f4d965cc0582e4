"""The transactional index of a store: an LMDB environment with five small tables.

Owns: the environment. Knows rows as bytes; what they mean is `layout`'s business.
Always: one `commit` is one transaction, all or nothing, made inside one call on whatever thread calls it; reads
are short transactions; no transaction is open across payload I/O or a change of the map's size.
Units: bytes.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from kvtier.errors import CorruptBlock, StoreError, StoreFormatError
from kvtier.tiers.lmdb.blockfile import claim, disk_bytes, is_deleted
from kvtier.tiers.lmdb.environment import Opening
from kvtier.tiers.lmdb.layout import TABLES
from kvtier.tiers.lmdb.pages import check_index
from kvtier.tiers.lmdb.records import Records
from kvtier.tiers.lmdb.remedies import remedy_of
from kvtier.types import PAGE_BYTES

_log = logging.getLogger(__name__)

# durability -> (sync, metasync). Syncing by hand after commits without sync=True is not the same: it lost whole
# indexes in simulated power cuts. writemap is never used: power loss would corrupt the file.
SYNC_MODES = {"none": (False, False), "batch": (True, False), "strict": (True, True)}

DATA_NAME = "data.mdb"
LOCK_TABLE_NAME = "lock.mdb"
_READERS_MAX = 126
_READERS_BYTES = 3 * PAGE_BYTES  # 64 bytes each, and a head
CHUNK_ROWS = 1000
_NOT_DAMAGE = (lmdb.MemoryError, lmdb.DiskError, lmdb.ReadonlyError, lmdb.LockError, lmdb.ReadersFullError)
DAMAGE_REMEDY = "Delete the folder to start with an empty store; blocks are recomputed"

Rows = Mapping[bytes, bytes | None]  # None deletes


@dataclass(slots=True)
class Change:
    """The rows of one transaction, by table."""

    meta: dict[bytes, bytes | None] = field(default_factory=dict)
    namespaces: dict[bytes, bytes | None] = field(default_factory=dict)
    extents: dict[bytes, bytes | None] = field(default_factory=dict)
    blocks: dict[bytes, bytes | None] = field(default_factory=dict)
    sidecar: Rows = field(default_factory=dict)


class DamagedStore(StoreFormatError):
    """A store that was one, and whose files contradict themselves."""


class IndexFull(Exception):
    """The transaction does not fit into the map, and was not applied."""


class Index:
    """The tables of one store. Reads from any thread; `commit`, `grow` and `sync` from one at a time."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._opening: Opening | None = None
        self._map_bytes = int(env.info()["map_size"])  # known also when LMDB has failed
        self._found = Records()  # at the opening
        self._data = -1  # the file that LMDB keeps its pages in, if we may write
        self._gate = threading.Lock()  # LMDB must not change its map while a transaction of ours reads it
        with self._begin() as txn:
            names = {bytes(key) for key, _ in txn.cursor()}
        missing = [name for name in TABLES if name.encode() not in names]
        readonly = env.flags()["readonly"]
        if missing and readonly:
            raise CorruptBlock(f"the index lacks its table {missing[0]}")
        self._tables = self._open_tables(create=not readonly)

    @classmethod
    def open(cls, folder: Path, durability: str, index_bytes: int) -> "Index":
        """Open for writing, create if absent. index_bytes: the hard limit of the file, unless it is longer already.

        Raises StoreFormatError if the files are damaged, StoreError or OSError if they cannot be opened.
        """
        sync, metasync = SYNC_MODES[durability]
        folder.mkdir(mode=0o700, exist_ok=True)
        claim_readers(folder)
        options = {"map_size": index_bytes, "sync": sync, "metasync": metasync, "mode": 0o600, "readahead": False}
        index = _opened(folder, check=True, collect=True, **options)
        try:
            index._data = os.open(folder / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)  # the folder may move while it is open
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def open_readonly(cls, folder: Path, live: bool) -> "Index":
        """Open for a look. With a live writer a slot in LMDB's reader table is taken, for moments; with none
        nothing is written or locked. Raises StoreFormatError."""
        return _opened(folder, check=not live, readonly=True, lock=live, create=False, readahead=False)

    # ------------------------------------------------------------ reads

    def found(self) -> Records:
        """The records that were there when the index was opened for writing; once, before the first commit."""
        found, self._found = self._found, Records()
        return found

    def find_again(self) -> None:
        """What the opening found has changed since."""
        self._found = self.records()

    def records(self) -> Records:
        """The records of now."""
        records = Records()
        records.add_rows(self.rows("blocks"))
        return records

    def get(self, table: str, key: bytes) -> bytes | None:
        with self._gate, self._begin(self._tables[table]) as txn:
            row: bytes | None = txn.get(key)
            return row

    def fetch(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The records at these places."""
        with self._gate, self._begin(self._tables["blocks"]) as txn:
            return [txn.get(key) for key in keys]

    def rows(self, table: str, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All rows from key `after` on, in key order; the transaction is renewed every 1000 rows, so that rows
        that change meanwhile may be seen old or new."""
        start, skip = after, False
        while chunk := self._chunk(table, start, skip):
            yield from chunk
            if skip and chunk[-1][0] <= start:
                return  # keys out of order: damage, which must not become an endless loop
            start, skip = chunk[-1][0], True

    def count(self, table: str) -> int:
        """How many rows a table has."""
        with self._gate, self._begin() as txn:
            return int(txn.stat(self._tables[table])["entries"])

    def transaction_id(self) -> int:
        """Grows with every commit, whoever makes it."""
        return int(self._env.info()["last_txnid"])

    def file_bytes(self) -> int:
        info = self._env.info()
        return (int(info["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def used_bytes(self) -> int:
        """What the rows take, and would take if the file held nothing else."""
        with self._gate, self._begin() as txn:
            stats = [self._env.stat(), *(txn.stat(table) for table in self._tables.values())]
        pages = sum(stat[kind] for stat in stats for kind in ("branch_pages", "leaf_pages", "overflow_pages"))
        return int(pages * stats[0]["psize"])

    def disk_bytes(self) -> int:
        """What the filesystem has claimed for the file."""
        return disk_bytes(self._data)

    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        return is_deleted(self._data)

    def map_bytes(self) -> int:
        """The hard limit of the file. No I/O, never raises."""
        return self._map_bytes

    # ------------------------------------------------------------ writes

    def commit(self, change: Change) -> None:
        """Apply all rows or none. Raises IndexFull, or lmdb.Error if the disk refused."""
        try:
            with self._env.begin(write=True) as txn:
                for name, table in self._tables.items():
                    rows: Rows = getattr(change, name)
                    for key, row in rows.items():
                        if row is None:
                            txn.delete(key, db=table)
                        else:
                            txn.put(key, row, db=table)
        except lmdb.MapFullError as error:
            raise IndexFull(str(error)) from error

    def commit_growing(self, change: Change, step_bytes: int) -> None:
        """Commit what must be, and let the file grow for it: deleting needs new pages first, too.

        Raises lmdb.Error or OSError; nothing was applied then.
        """
        while True:
            try:
                self.commit(change)
            except IndexFull:
                wanted = self.map_bytes() + step_bytes
                self.claim(wanted)
                self.grow(wanted)
            else:
                return

    def is_writable(self) -> bool:
        """Whether a transaction can still begin; after a half-written meta page LMDB refuses until reopened."""
        try:
            with self._env.begin(write=True):
                return True
        except lmdb.Error:
            return False

    def release_dead_readers(self) -> int:
        """Readers that died keep old pages from being reused; also done before an index counts as full. How many."""
        return int(self._env.reader_check())

    def claim(self, index_bytes: int) -> None:
        """Claim the disk space of the file's first bytes, so that no commit runs out of it. Raises OSError."""
        claim(self._data, index_bytes)

    def grow(self, index_bytes: int) -> None:
        """Set the hard limit of the file. Raises lmdb.Error; it is what it was then."""
        with self._gate:
            try:
                self._env.set_mapsize(index_bytes)
            except lmdb.Error:
                self._open_again()
                raise
            self._map_bytes = int(self._env.info()["map_size"])

    def claim_only(self, index_bytes: int) -> None:
        """Let go of the disk that is claimed behind the file's first bytes, and its end. Never raises."""
        with suppress(OSError):
            os.truncate(self._data, os.fstat(self._data).st_size)
            self.claim(index_bytes)

    def trim(self) -> None:
        """Give back what was claimed and never used, and forbid to use it. Raises OSError, lmdb.Error."""
        os.truncate(self._data, self.file_bytes())
        self.grow(self.file_bytes())

    def copy_to(self, fd: int) -> None:
        """Write the rows, and nothing else, as an index of their own. Raises lmdb.Error or OSError."""
        self._env.copyfd(fd, compact=True)

    def sync(self) -> None:
        """Make everything committed durable. Raises lmdb.Error."""
        self._env.sync(True)

    def close(self) -> None:
        """Idempotent."""
        self._env.close()
        if self._data >= 0:
            os.close(self._data)
            self._data = -1

    def _open_again(self) -> None:
        """LMDB has closed the environment: go on as before, or, if that fails, let every call raise lmdb.Error."""
        if self._opening is None:
            return
        try:
            self._env = self._opening.again(self._env, self._data, self._map_bytes)
            self._tables = self._open_tables(create=False)
        except (OSError, lmdb.Error) as error:
            _log.error("%s: the index is closed: %s", self._opening.data, error)

    def _open_tables(self, create: bool) -> dict[str, Any]:
        return {name: self._following(partial(self._env.open_db, name.encode(), create=create)) for name in TABLES}

    def _begin(self, table: Any = None) -> Any:
        """A read transaction."""
        return self._following(partial(self._env.begin, db=table))

    def _following(self, start: Callable[[], Any]) -> Any:
        """Start something; if another process has let the file outgrow our map, the map follows first."""
        while True:
            try:
                return start()
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)

    def _chunk(self, table: str, start: bytes, skip: bool) -> list[tuple[bytes, bytes]]:
        chunk = []
        with self._gate, self._begin(self._tables[table]) as txn, txn.cursor() as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            if found and skip and cursor.key() == start:
                found = cursor.next()
            if found:
                for _, row in zip(range(CHUNK_ROWS), cursor, strict=False):
                    chunk.append(row)
        return chunk


def claim_readers(folder: Path) -> None:
    """Claim the disk of LMDB's reader table. LMDB maps it: on a full disk the first touch would kill the process.

    Before LMDB opens it: closing any handle of a file lets go of the process's record locks on it.
    """
    table = folder / LOCK_TABLE_NAME
    if table.exists() and table.stat().st_blocks * 512 >= _READERS_BYTES:
        return
    fd = os.open(table, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        claim(fd, _READERS_BYTES)
    except OSError:
        if not disk_bytes(fd):  # one page is enough for sixty threads
            raise
    finally:
        os.close(fd)


def _opened(folder: Path, *, check: bool, collect: bool = False, **options: Any) -> Index:
    """folder: the index's, within the store's."""
    data = folder / DATA_NAME
    found = Records()
    try:
        if check and data.exists():
            found = check_index(data, "blocks" if collect else None)
        map_bytes = {"map_size": options.pop("map_size")} if "map_size" in options else {}
        options |= {"max_dbs": len(TABLES), "max_readers": _READERS_MAX}
        env = lmdb.open(str(folder), **map_bytes, **options)
    except (CorruptBlock, lmdb.Error) as error:
        raise refused(folder.parent, "index", error) from error
    try:
        env.reader_check()  # whoever died before us may have filled the reader table
        index = Index(env)
        index._found, index._opening = found, Opening(data, options)
        return index
    except (CorruptBlock, lmdb.Error) as error:
        env.close()
        raise refused(folder.parent, "index", error) from error


def errno_of(error: Exception) -> int:
    """What the operating system said, 0 if LMDB itself is the one that complains (its own codes are negative)."""
    return max(0, int(getattr(error, "code", 0) or 0))


def refused(folder: Path, what: str, error: Exception) -> StoreError:
    """What an error of LMDB at opening the index, or the payloads, means. Never call a store damaged that only this
    process cannot open."""
    if isinstance(error, lmdb.Error) and "already open" in str(error):
        return StoreFormatError(str(folder), "this process has the store open already", "Look at it from another one")
    if isinstance(error, _NOT_DAMAGE) or errno_of(error) not in (0, errno.EINVAL):
        remedy = remedy_of(errno_of(error), "Mend that and try again")
        return StoreError(str(folder), f"the {what} cannot be opened: {error}", remedy)
    return DamagedStore(str(folder), f"the {what} cannot be read: {error}", DAMAGE_REMEDY)
