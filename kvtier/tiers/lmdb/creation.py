"""A store's folder before and around its files: made, emptied, made durable; and why that may fail.

Owns nothing. Units: bytes.
"""

import logging
import os
import shutil
from pathlib import Path

from kvtier.config.units import readable_bytes
from kvtier.errors import StoreError, StoreFormatError
from kvtier.tiers.lmdb.blockfile import NO_SPACE, free_bytes
from kvtier.tiers.lmdb.index import DATA_NAME, LOCK_TABLE_NAME
from kvtier.tiers.lmdb.layout import FRESH_NAME, INDEX_NAME, LOCK_NAME, PAYLOAD_NAME, SLAB_NAME
from kvtier.tiers.lmdb.remedies import remedy_of
from kvtier.types import PAGE_BYTES

_log = logging.getLogger(__name__)

NEW_STORE_BYTES = 256 << 10  # what a store without blocks takes: lock, reader table, folders, first pages of the index
POWER_FAILED = "the machine went down under durability none"
STATE_UNKNOWN = "the lock file does not say how the last writer left, which durability none needs"
_HARMLESS = {LOCK_NAME, "lost+found"}  # of someone who opens it just now; in the root of a fresh filesystem


def make_folder(folder: Path) -> None:
    """Create the folder, for the owner only, or accept an empty one."""
    foreign = folder.exists() and (not folder.is_dir() or {entry.name for entry in folder.iterdir()} - _HARMLESS)
    if foreign:
        raise StoreFormatError(
            str(folder), "it exists and is not a store", "Name a new or empty folder; nothing was changed"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def expect_plain(folder: Path) -> None:
    """Raises StoreError if something else lies where a file or folder of the store belongs: a pipe would be waited for,
    a device be written to. Raises OSError if that cannot be told."""
    tables = INDEX_NAME, PAYLOAD_NAME
    within = [f"{table}/{name}" for table in tables for name in (DATA_NAME, LOCK_TABLE_NAME, FRESH_NAME)]
    for name in (*tables, LOCK_NAME, SLAB_NAME, *within):  # folders first: else what lies in one that is none
        path = folder / name
        right, what = (path.is_dir(), "folder") if name in tables else (path.is_file(), "file")
        if not right and path.exists():
            raise StoreError(str(folder), f"its {name} is no {what}", "Move that away, or name another folder")


def wipe(folder: Path, why: str) -> None:
    """Start anew, because nothing in the store can be believed."""
    _log.warning("%s: %s; starting with an empty store", folder, why)
    clear(folder)


def has_held(folder: Path) -> bool:
    """Whether blocks were stored here: a slab, or a table of payloads, longer than creating it makes it."""
    parts = (folder / SLAB_NAME, PAGE_BYTES), (folder / PAYLOAD_NAME / DATA_NAME, 2 * PAGE_BYTES)
    return any(path.is_file() and path.stat().st_size > least_bytes for path, least_bytes in parts)


def clear(folder: Path) -> None:
    """Remove all but the lock."""
    clear_payloads(folder)  # first: an index without a slab opens as an empty store
    shutil.rmtree(folder / INDEX_NAME, ignore_errors=True)


def clear_payloads(folder: Path) -> None:
    """Remove what no index names."""
    (folder / SLAB_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder / PAYLOAD_NAME, ignore_errors=True)


def clear_fresh(folder: Path) -> None:
    """Remove what an interrupted compaction left: it counts against the capacity, and nobody reads it."""
    for name in (INDEX_NAME, PAYLOAD_NAME):
        (folder / name / FRESH_NAME).unlink(missing_ok=True)


def sync_names(folder: Path) -> None:
    """Make new names durable: syncing a file does not sync its entry in the folder. Raises OSError."""
    parts = [part for name in (INDEX_NAME, PAYLOAD_NAME) if (part := folder / name).is_dir()]
    for changed in (*parts, folder, folder.parent):
        sync_folder(changed)


def sync_folder(folder: Path) -> None:
    """Make the names in it durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refusal(folder: Path, error: OSError) -> StoreError:
    """What an error of the filesystem at opening means to the user."""
    problem = f"cannot be opened: {error}"
    if error.errno in NO_SPACE:
        problem += (
            f"; the filesystem has {readable_bytes(free_bytes(folder))} free, a store without blocks takes "
            f"{readable_bytes(NEW_STORE_BYTES)}"
        )
        return StoreError(str(folder), problem, "Make room on the disk, or name a folder on another one")
    return StoreError(str(folder), problem, remedy_of(error.errno))
