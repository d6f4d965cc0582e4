"""What a store's folder is, seen from outside: a store or not, in use or not, worth believing or not.

Owns nothing; opens no index, takes no lock of the store, writes nothing.
"""

import errno
import os
from itertools import product
from pathlib import Path

from kvtier.errors import StoreError, StoreFormatError
from kvtier.tiers.lmdb.creation import POWER_FAILED, STATE_UNKNOWN, expect_plain, has_held
from kvtier.tiers.lmdb.index import DAMAGE_REMEDY, DATA_NAME, LOCK_TABLE_NAME, DamagedStore
from kvtier.tiers.lmdb.layout import INDEX_NAME, LOCK_NAME, PAYLOAD_NAME, SLAB_NAME
from kvtier.tiers.lmdb.lock import WriterState, read_state
from kvtier.tiers.lmdb.opening import power_failed

_LOCKS = Path("/proc/locks")
NOT_A_STORE = "Name the folder of an lmdb tier (its `path` in the YAML), or the YAML file"
UNFINISHED_REMEDY = "A cache or `kvtier import` that is given this folder makes it anew"

Identity = tuple[tuple[int, int] | None, ...]


class UnfinishedStore(StoreFormatError):
    """A folder whose maker has not come so far as to say that it is a store, or was cut off: it never had a block."""


def expect_store(folder: Path) -> None:
    """Raises StoreFormatError, saying why, if the folder holds no store (UnfinishedStore: not yet); OSError if it
    cannot be looked at."""
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "no such path"
        raise StoreFormatError(str(folder), what, NOT_A_STORE)
    if not (folder / LOCK_NAME).exists():
        what = "it is not a store" if any(folder.iterdir()) else "it is empty"
        raise StoreFormatError(str(folder), what, NOT_A_STORE)
    expect_plain(folder)
    if never_held(folder):
        raise unfinished(folder)
    slab, data = (length_of(path) for path in (folder / SLAB_NAME, folder / INDEX_NAME / DATA_NAME))
    if slab and not data:
        raise DamagedStore(str(folder), "there is a slab and no index", DAMAGE_REMEDY)
    if not data:
        raise unfinished(folder)


def expect_access(folder: Path, live: bool) -> None:
    """Raises OSError if this user may not read the index or inline payloads, or, beside a writer, not enter LMDB's
    reader tables.

    LMDB would say so too, but in the words that it has for a broken file.
    """
    wanted = [(DATA_NAME, os.O_RDONLY)] + ([(LOCK_TABLE_NAME, os.O_RDWR)] if live else [])
    for table, (name, flags) in product((INDEX_NAME, PAYLOAD_NAME), wanted):
        try:
            os.close(os.open(folder / table / name, flags | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EROFS):  # LMDB does without a table on a read-only filesystem
                raise


def expect_trust(folder: Path, state: WriterState, durability: str, live: bool) -> None:
    """Raises StoreError if the machine went down while writes were under way that nobody ever synced."""
    if not power_failed(state, durability):
        return
    if live:
        raise StoreError(str(folder), "a writer is just opening it", "Try again in a moment")
    raise DamagedStore(
        str(folder),
        f"{POWER_FAILED if state.pid else STATE_UNKNOWN}, and nothing in the store can be believed",
        "The next cache that opens it starts with an empty store",
    )


def never_held(folder: Path) -> bool:
    """Whether the store's first writer has not begun yet: whatever lies there will be removed. Raises OSError."""
    return not (folder / LOCK_NAME).stat().st_size and not has_held(folder)


def without_header(folder: Path) -> StoreFormatError:
    """What an index without a header means: with a slab beside it the store was one."""
    if length_of(folder / SLAB_NAME):
        return DamagedStore(str(folder), "the index has no header", DAMAGE_REMEDY)
    return unfinished(folder)


def unfinished(folder: Path) -> UnfinishedStore:
    return UnfinishedStore(str(folder), "its creation is not finished; it holds nothing", UNFINISHED_REMEDY)


def state_of(folder: Path) -> WriterState:
    """How the last writer left. Raises OSError."""
    fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_state(fd)
    finally:
        os.close(fd)


def has_writer(lock: Path) -> bool:
    """Whether a process holds the store's lock, learnt without touching it: the kernel lists all locks.

    True where the kernel does not tell: then the careful way of reading is taken. A line is believed for its inode
    and either the device or the holder, because some filesystems (btrfs, overlayfs) show stat another device.
    """
    try:
        table = _LOCKS.read_text().splitlines()
    except OSError:
        return True
    found = lock.stat()
    inode = str(found.st_ino)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    held = [words for line in table if "FLOCK" in (words := line.split())]
    pid = ""
    for words in held:
        holder, where = words[words.index("FLOCK") + 3 :][:2]
        where_device, _, where_inode = where.rpartition(":")
        if where_inode == inode:
            pid = pid or str(state_of(lock.parent).pid)
            if where_device == device or holder == pid:
                return True
    return False


def stamp_of(folder: Path) -> int:
    """Changes when a writer comes, before it changes anything else: it first says in the lock file who it is."""
    return (folder / LOCK_NAME).stat().st_mtime_ns


def identity_of(folder: Path) -> Identity:
    """Tells these files from others that may later have their names."""
    return tuple(_inode(path) for path in (folder / INDEX_NAME / DATA_NAME, folder / SLAB_NAME))


def length_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none. Raises OSError."""
    return path.stat().st_size if path.is_file() else 0


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
