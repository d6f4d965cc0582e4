"""Brings a store from a folder to a state in which it can be read and written, or says why it cannot.

Order: lock, then trust (may the index be looked at?), then header, budget, slab, stock; only then is anything
changed. Whatever fails, the lock is free again and no block is lost by it.
Units: bytes.
"""

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb

from kvtier.allocator.extents import ExtentAllocator
from kvtier.blocks.namespace import NamespaceTable
from kvtier.errors import ConfigError, CorruptBlock, StoreError, StoreFormatError
from kvtier.registry import suggestion
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, INDEX_BYTES_MIN, Budget, split
from kvtier.tiers.lmdb.index import DAMAGE_REMEDY, DATA_NAME, SYNC_MODES, DamagedStore, Index, IndexFull
from kvtier.tiers.lmdb.layout import (
    FORMAT_VERSION,
    GENERATION_KEY,
    HEADER_KEY,
    INDEX_NAME,
    LENGTH_BYTES_MAX,
    LOCK_NAME,
    NAMESPACE_KEY,
    SLAB_NAME,
    Header,
    decode_header,
    decode_limit,
    encode_header,
    encode_limit,
    format_of,
)
from kvtier.tiers.lmdb.loading import Stock, load_names, take_stock
from kvtier.tiers.lmdb.lock import StoreLock, WriterState, boot_id
from kvtier.tiers.lmdb.names import TierNames
from kvtier.tiers.lmdb.slab import Slab
from kvtier.types import PAGE_BYTES

_log = logging.getLogger(__name__)

GENERATION_STEP = 1 << 20  # generations are reserved in steps, so that their limit is seldom written
_HARMLESS = {LOCK_NAME, "lost+found"}  # of someone who opens it just now; in the root of a fresh filesystem


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says. `where` is the place in it, for messages."""

    where: str
    capacity_bytes: int
    length_bytes_max: int
    min_free_bytes: int
    durability: str
    io_threads: int

    def check(self) -> None:
        """Raises ConfigError."""
        if self.durability not in SYNC_MODES:
            raise ConfigError(
                self.where, f"durability {self.durability!r} is unknown", suggestion(self.durability, SYNC_MODES)
            )
        if not 1 <= self.length_bytes_max <= LENGTH_BYTES_MAX:
            raise ConfigError(
                self.where, f"blocks of {self.length_bytes_max} bytes", f"Use 1 to {LENGTH_BYTES_MAX} bytes"
            )
        if self.io_threads < 1:
            raise ConfigError(self.where, f"{self.io_threads} I/O threads", "Use at least 1")
        if self.min_free_bytes < 0:
            raise ConfigError(self.where, f"min_free of {self.min_free_bytes} bytes", "Use 0 or more")


@dataclass(slots=True)
class OpenStore:
    """The parts of an open store. The writer's thread changes them; readers look at index, slab and names."""

    folder: Path
    lock: StoreLock
    state: WriterState
    header: Header
    index: Index
    slab: Slab
    allocator: ExtentAllocator
    names: TierNames
    budget: Budget
    stock: Stock
    generation_next: int
    generation_limit: int

    def close(self) -> None:
        """Make everything durable, say that it is, and let go. Errors on the way leave the store unclean."""
        with ExitStack() as undo:
            undo.callback(self.lock.release)
            undo.callback(self.index.close)
            undo.callback(self.slab.close)
            try:
                self.slab.file.sync()
                self.index.sync()
                self.lock.write_state(replace(self.state, clean=True))
            except (OSError, lmdb.Error) as error:
                _log.warning("%s: closed without a last sync: %s", self.folder, error)


def open_store(
    folder: Path, namespaces: NamespaceTable, settings: Settings, open_file: Callable[[Path], BlockFile]
) -> OpenStore:
    """Open or create the store in `folder`. Raises ConfigError, StoreLocked, StoreFormatError or StoreError."""
    settings.check()
    try:
        if not (folder / LOCK_NAME).exists():
            split(settings.capacity_bytes, settings.length_bytes_max, settings.where)  # refuse before creating
            _make_folder(folder)
        with ExitStack() as undo:
            lock = StoreLock.acquire(folder)
            undo.callback(lock.release)
            store = _open_locked(folder, lock, namespaces, settings, open_file, undo)
            undo.pop_all()
            return store
    except OSError as error:
        raise StoreError(str(folder), f"cannot be opened: {error}", "Check its permissions and its disk") from error
    except (lmdb.Error, IndexFull) as error:
        raise DamagedStore(str(folder), f"the index cannot be read: {error}", DAMAGE_REMEDY) from error


def _open_locked(
    folder: Path,
    lock: StoreLock,
    namespaces: NamespaceTable,
    settings: Settings,
    open_file: Callable[[Path], BlockFile],
    undo: ExitStack,
) -> OpenStore:
    if _power_failed(lock.before, lock.before.durability):
        _wipe(folder)
    index, header = _open_index(folder, lock, settings)
    undo.callback(index.close)
    extent_bytes = header.extent_bytes if header else None
    lent = sum(1 for _ in index.rows("extents"))
    sizes = settings.capacity_bytes, settings.length_bytes_max
    budget = split(*sizes, settings.where, extent_bytes, index.file_bytes(), lent)
    header = _header_now(header, budget, settings)
    state = WriterState(os.getpid(), boot_id(), settings.durability, clean=False)
    lock.write_state(state)
    slab = Slab(open_file(folder / SLAB_NAME), settings.io_threads)
    undo.callback(slab.close)

    if budget.index_bytes > index.map_bytes():
        index.grow(budget.index_bytes)
    index.release_dead_readers()
    names = TierNames(namespaces, _limit(folder, index, NAMESPACE_KEY))
    findings = load_names(index, names)
    allocator = ExtentAllocator(header.extent_bytes // PAGE_BYTES, budget.extents_max)
    stock = take_stock(index, names, allocator, slab.file.length_bytes())
    stock.findings[:0] = findings
    generation = max(stock.generation_next, _limit(folder, index, GENERATION_KEY))
    store = OpenStore(folder, lock, state, header, index, slab, allocator, names, budget, stock, generation, generation)
    _settle(store)
    return store


def _settle(store: OpenStore) -> None:
    """Write down how the store is open now, forget what is not believed, give unlent extents' disk back."""
    store.generation_limit += GENERATION_STEP
    change = store.stock.change
    change.meta[HEADER_KEY] = encode_header(store.header)
    change.meta[GENERATION_KEY] = encode_limit(GENERATION_KEY, store.generation_limit)
    store.slab.file.sync()  # an earlier writer in mode `none` may have left it to the page cache
    try:
        store.index.commit(change)
    except IndexFull:  # deleting needs new pages first
        store.index.grow(store.index.map_bytes() + EVICT_RESERVE_BYTES)
        store.index.commit(change)
    store.index.sync()
    for folder in (store.folder / INDEX_NAME, store.folder, store.folder.parent):
        _sync_folder(folder)
    extent_bytes = store.header.extent_bytes
    for extent in range(-(-store.slab.file.length_bytes() // extent_bytes)):
        if store.allocator.stride_of(extent) is None:
            store.slab.file.punch(extent * extent_bytes, extent_bytes)
    for finding in store.stock.findings:
        _log.warning("%s: %s", store.folder, finding)
    if store.stock.evicted_blocks:
        _log.warning("%s: %d blocks left: the capacity is smaller now", store.folder, store.stock.evicted_blocks)


def _sync_folder(folder: Path) -> None:
    """Make new names durable: syncing a file does not sync its entry in the folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_index(folder: Path, lock: StoreLock, settings: Settings) -> tuple[Index, Header | None]:
    """The index and its header, None if the store is new."""
    data = folder / INDEX_NAME / DATA_NAME
    slab = folder / SLAB_NAME
    if slab.exists() and slab.stat().st_size and not (data.exists() and data.stat().st_size):
        raise DamagedStore(str(folder), "there is a slab and no index", DAMAGE_REMEDY)
    index = Index.open(data.parent, settings.durability, INDEX_BYTES_MIN)
    try:
        header = read_header(folder, index)
        if header is None and slab.exists() and slab.stat().st_size:
            raise DamagedStore(str(folder), "the index has no header", DAMAGE_REMEDY)
    except BaseException:
        index.close()
        raise
    state_unknown = lock.before.pid == 0
    if header and state_unknown and _power_failed(lock.before, header.durability):
        index.close()
        _wipe(folder)
        return Index.open(data.parent, settings.durability, INDEX_BYTES_MIN), None
    return index, header


def read_header(folder: Path, index: Index) -> Header | None:
    """The header of a store, None if there is none. Raises StoreFormatError if this version cannot read it."""
    row = index.get("meta", HEADER_KEY)
    if row is None:
        return None
    try:
        version = format_of(row)
        if version != FORMAT_VERSION:
            raise StoreFormatError(
                str(folder),
                f"it has format {version}, and this kvtier reads format {FORMAT_VERSION}",
                "Use the kvtier that made it, or give this cache a path of its own",
            )
        return decode_header(row)
    except CorruptBlock as error:
        raise DamagedStore(str(folder), f"the header is damaged ({error})", DAMAGE_REMEDY) from error


def _header_now(header: Header | None, budget: Budget, settings: Settings) -> Header:
    if header is None:
        header = Header(
            FORMAT_VERSION, budget.extent_bytes, PAGE_BYTES, uuid.uuid4().bytes, time.time_ns() // 10**6, 0, ""
        )
    return replace(header, capacity_bytes=settings.capacity_bytes, durability=settings.durability)


def _power_failed(before: WriterState, durability: str) -> bool:
    """Whether writes that were never synced may be lost: nothing of the store is to be believed then."""
    return durability == "none" and not before.clean and before.boot_id != boot_id()


def _limit(folder: Path, index: Index, key: bytes) -> int:
    row = index.get("meta", key)
    if row is None:
        return 1
    try:
        return decode_limit(key, row)
    except CorruptBlock as error:
        raise DamagedStore(str(folder), f"row {key.decode()} is damaged ({error})", DAMAGE_REMEDY) from error


def _make_folder(folder: Path) -> None:
    """Create the folder, for the owner only, or accept an empty one."""
    foreign = folder.exists() and (not folder.is_dir() or {entry.name for entry in folder.iterdir()} - _HARMLESS)
    if foreign:
        raise StoreFormatError(
            str(folder), "it exists and is not a store", "Name a new or empty folder; nothing was changed"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _wipe(folder: Path) -> None:
    _log.warning("%s: the machine went down under durability none; starting with an empty store", folder)
    (folder / SLAB_NAME).unlink(missing_ok=True)  # first: an index without a slab opens as an empty store
    shutil.rmtree(folder / INDEX_NAME, ignore_errors=True)
