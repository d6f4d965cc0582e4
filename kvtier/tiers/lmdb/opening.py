"""Brings a store from a folder to a state in which it can be read and written, or says why it cannot.

Order: lock, then trust (may the index be looked at?), then header, budget, slab, stock; only then is anything
changed. Whatever fails, the lock is free again and no block is lost by it.
Units: bytes.
"""

import errno
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import lmdb

from kvtier.allocator.extents import ExtentAllocator
from kvtier.blocks.namespace import NamespaceTable
from kvtier.config.units import readable_bytes
from kvtier.errors import ConfigError, CorruptBlock, StoreFormatError
from kvtier.notices import say_once
from kvtier.tiers.lmdb.anew import write_anew
from kvtier.tiers.lmdb.blockfile import NO_DIRECT, BlockFile, free_bytes
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, INDEX_BYTES_FIRST, Budget, split
from kvtier.tiers.lmdb.creation import (
    NEW_STORE_BYTES,
    POWER_FAILED,
    STATE_UNKNOWN,
    clear,
    clear_fresh,
    clear_payloads,
    expect_plain,
    has_held,
    make_folder,
    refusal,
    sync_folder,
    sync_names,
    wipe,
)
from kvtier.tiers.lmdb.index import DAMAGE_REMEDY, DATA_NAME, DamagedStore, Index, IndexFull, refused
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import (
    FORMATS,
    GENERATION_KEY,
    HEADER_KEY,
    INDEX_NAME,
    LOCK_NAME,
    NAMESPACE_KEY,
    NAMESPACE_MARGIN,
    NAMESPACE_MAX,
    PAYLOAD_NAME,
    SLAB_NAME,
    Header,
    decode_header,
    decode_limit,
    encode_limit,
    format_of,
)
from kvtier.tiers.lmdb.loading import load_names, take_stock
from kvtier.tiers.lmdb.lock import StoreLock, WriterState, boot_id
from kvtier.tiers.lmdb.names import TierNames
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.settings import Settings
from kvtier.tiers.lmdb.slab import Slab
from kvtier.tiers.lmdb.upgrades import UPGRADES, upgrade
from kvtier.types import PAGE_BYTES

_log = logging.getLogger(__name__)

OUTGROWN_TIMES, OUTGROWN_BYTES = 2, 1 << 20  # of free pages that commits leave, there are far fewer


def open_store(
    folder: Path, namespaces: NamespaceTable, settings: Settings, open_file: Callable[[Path], BlockFile]
) -> OpenStore:
    """Open or create the store in `folder`. Raises ConfigError, StoreLocked, StoreFormatError or StoreError."""
    settings.check()
    try:
        notes = settings.check_filesystem(folder)
        if not (folder / LOCK_NAME).exists():
            settings.check_new()
            if free_bytes(folder) < NEW_STORE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            make_folder(folder)
        expect_plain(folder)
        with ExitStack() as undo:
            lock = StoreLock.acquire(folder)
            undo.callback(lock.release)
            store = _open_locked(folder, lock, namespaces, settings, open_file, undo)
            undo.pop_all()
    except OSError as error:
        raise refusal(folder, error) from error
    except (lmdb.Error, IndexFull) as error:
        raise refused(folder, "index", error) from error
    _tell(store, notes)
    return store


def _open_locked(
    folder: Path,
    lock: StoreLock,
    namespaces: NamespaceTable,
    settings: Settings,
    open_file: Callable[[Path], BlockFile],
    undo: ExitStack,
) -> OpenStore:
    if lock.is_new:
        sync_folder(folder)  # the lock's name comes first: files without one beside them count as somebody else's
    if lock.is_new and not has_held(folder):
        clear(folder)  # whoever made it was cut off before there were blocks, maybe in the middle of the index
    elif power_failed(lock.before, lock.before.durability):
        wipe(folder, POWER_FAILED)
    clear_fresh(folder)
    index, header = _open_index(folder, lock, settings)
    undo.callback(index.close)
    if header is None:
        clear_payloads(folder)  # whoever was cut off here may have kept them elsewhere
    else:
        _expect_kind(folder, header, settings)
    budget = _budget(folder, index, header, settings)
    header = _header_now(header, budget, settings)
    state = WriterState(os.getpid(), boot_id(), settings.durability, clean=False)
    slab = _open_slab(folder, settings, open_file)
    undo.callback(slab.close)
    punches = slab.file.punches()

    index.release_dead_readers()
    id_limit, generation_limit = _limit(folder, index, NAMESPACE_KEY), _limit(folder, index, GENERATION_KEY)
    names = TierNames(namespaces, id_limit)
    findings = load_names(index, names)
    if names.limit > id_limit:  # else ids might be given again that records bear which a drop left behind
        findings.append(_given_already(NAMESPACE_KEY, id_limit, names.limit - 1))
        names.limit = min(names.limit + NAMESPACE_MARGIN, NAMESPACE_MAX)
    allocator = ExtentAllocator(header.extent_bytes // PAGE_BYTES, budget.extents_max)
    stock = take_stock(index, names, allocator, slab.file.length_bytes(), fixed=not punches)
    stock.findings[:0] = findings
    if names.limit > id_limit:
        stock.change.meta[NAMESPACE_KEY] = encode_limit(NAMESPACE_KEY, names.limit)
    generation = max(stock.generation_next, generation_limit)
    if generation > generation_limit:  # it is written anew with each opening
        stock.findings.append(_given_already(GENERATION_KEY, generation_limit, generation - 1))
    store = OpenStore(
        folder=folder,
        lock=lock,
        state=state,
        header=header,
        index=index,
        slab=slab,
        allocator=allocator,
        names=names,
        budget=budget,
        stock=stock,
        generation_next=generation,
        generation_limit=generation,
        punches=punches,
    )
    store.settle()
    return store


def _open_slab(folder: Path, settings: Settings, open_file: Callable[[Path], BlockFile]) -> Slab | InlineSlab:
    if settings.payload == "slab":
        return Slab(open_file(folder / SLAB_NAME), settings.io_threads)
    try:
        return InlineSlab.open(folder / PAYLOAD_NAME, settings.durability, settings.payload_bytes)
    except (CorruptBlock, lmdb.Error) as error:
        raise refused(folder, "payloads", error) from error


def _expect_kind(folder: Path, header: Header, settings: Settings) -> None:
    """Raises ConfigError if the store keeps its payloads elsewhere than the configuration says."""
    kept = next(name for name, version in FORMATS.items() if version == header.format)
    if kept != settings.payload:
        raise ConfigError(
            f"{settings.where}.payload",
            f"the store in {folder} was made with payload: {kept}",
            f"Use {kept}, or give this cache a path of its own",
        )


def _budget(folder: Path, index: Index, header: Header | None, settings: Settings) -> Budget:
    """How the capacity is split now. An index that claimed more of the disk than it used gives way to a smaller one.

    A new store's extents follow what the disk can give, and stay so.
    """
    sizes = settings.budget_bytes, settings.length_bytes_max
    if header is None:
        reachable_bytes = settings.reachable_bytes(folder, free_bytes(folder))
        least_bytes = index.map_bytes()
        return split(
            *sizes,
            settings.where,
            reachable_bytes=reachable_bytes,
            index_bytes_min=least_bytes,
            share=settings.share,
        )
    if settings.capacity_bytes < header.capacity_bytes:
        index.trim()
    lent = sum(1 for _ in index.rows("extents"))
    return settings.budget_beside(header.extent_bytes, index, lent, header.capacity_bytes)


def _tell(store: OpenStore, notes: list[str]) -> None:
    """Say what an operator should know of the store as it was opened."""
    for note in notes:
        say_once(_log, str(store.folder), note.partition(":")[0], note)
    store.notes += notes
    if isinstance(store.slab, Slab) and not store.slab.file.direct:
        store.notes.append(NO_DIRECT)  # said by whoever tried
    if not store.punches:
        store.notes.append("the filesystem takes no part of a file back: evicted blocks keep their disk until reused")
        say_once(_log, str(store.folder), "punch", store.notes[-1])
    if not store.settled:
        store.notes.append("the disk is full: blocks can be read, and none stored until there is room")
        say_once(_log, str(store.folder), "full", store.notes[-1])
    if unknown := store.stock.unknown_records:
        store.notes.append(f"{unknown} records are of a later version: they and their slots are left alone")
        say_once(_log, str(store.folder), "unknown", store.notes[-1])
    for finding in store.stock.findings:
        _log.warning("%s: %s", store.folder, finding)
    if store.stock.evicted_blocks:
        capacity, index = map(readable_bytes, (store.header.capacity_bytes, store.budget.index_bytes))
        left = f"a capacity of {capacity} has room for {store.budget.extents_max} extents beside an index of {index}"
        _log.warning("%s: %d blocks were given up: %s", store.folder, store.stock.evicted_blocks, left)


def _open_index(folder: Path, lock: StoreLock, settings: Settings) -> tuple[Index, Header | None]:
    """The index and its header, None if the store is new."""
    data = folder / INDEX_NAME / DATA_NAME
    slab = folder / SLAB_NAME
    if slab.exists() and slab.stat().st_size and not (data.exists() and data.stat().st_size):
        raise DamagedStore(str(folder), "there is a slab and no index", DAMAGE_REMEDY)
    index = Index.open(data.parent, settings.durability, _map_bytes(data))
    try:
        upgrade(folder, index)
        header = read_header(folder, index)
        if header is None and slab.exists() and slab.stat().st_size:
            raise DamagedStore(str(folder), "the index has no header", DAMAGE_REMEDY)
    except BaseException:
        index.close()
        raise
    state_unknown = lock.before.pid == 0
    if header and state_unknown and power_failed(lock.before, header.durability):
        index.close()
        wipe(folder, STATE_UNKNOWN)
        return Index.open(data.parent, settings.durability, INDEX_BYTES_FIRST), None
    return (index if header is None else _fitting(folder, index, settings)), header


def _fitting(folder: Path, index: Index, settings: Settings) -> Index:
    """The index, written anew if it is far larger than its rows: while somebody's look stands still in a transaction no
    page is used again, and what the index takes meanwhile no extent gets back. As it is where there is no room."""
    if index.file_bytes() < OUTGROWN_TIMES * index.used_bytes() + OUTGROWN_BYTES:
        return index
    try:
        write_anew(folder / INDEX_NAME, index)
        sync_names(folder)
    except (OSError, lmdb.Error) as error:
        _log.warning("%s: its index stays larger than it need be: %s", folder, error)
    index.close()
    data = folder / INDEX_NAME / DATA_NAME
    return Index.open(data.parent, settings.durability, _map_bytes(data))


def _map_bytes(data: Path) -> int:
    """The limit that the index's file begins with: what the disk has claimed for it, but for the reserve behind it."""
    claimed = data.stat().st_blocks * 512 // PAGE_BYTES * PAGE_BYTES if data.exists() else 0
    return max(claimed - EVICT_RESERVE_BYTES, INDEX_BYTES_FIRST)


def read_header(folder: Path, index: Index) -> Header | None:
    """The header of a store, None if there is none. Raises StoreFormatError if this version cannot read it."""
    row = index.get("meta", HEADER_KEY)
    if row is None:
        return None
    try:
        version = format_of(row)
        if version in UPGRADES:
            raise StoreFormatError(
                str(folder), f"it has format {version}, an older one", "Open it with a cache once, which renews it"
            )
        if version not in FORMATS.values():
            raise StoreFormatError(
                str(folder),
                f"it has format {version}, and this kvtier reads format {' and '.join(map(str, FORMATS.values()))}",
                "Use the kvtier that made it, or give this cache a path of its own",
            )
        return decode_header(row)
    except CorruptBlock as error:
        raise DamagedStore(str(folder), f"the header is damaged ({error})", DAMAGE_REMEDY) from error


def _header_now(header: Header | None, budget: Budget, settings: Settings) -> Header:
    if header is None:
        header = Header(
            FORMATS[settings.payload],
            budget.extent_bytes,
            PAGE_BYTES,
            uuid.uuid4().bytes,
            time.time_ns() // 10**6,
            0,
            "",
        )
    return replace(header, capacity_bytes=settings.capacity_bytes, durability=settings.durability)


def power_failed(before: WriterState, durability: str) -> bool:
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


def _given_already(key: bytes, limit: int, newest: int) -> str:
    return f"meta {key.decode()}: {limit}, and {newest} was given already"
