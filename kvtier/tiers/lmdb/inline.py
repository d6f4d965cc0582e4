"""Payloads as values of an LMDB table, one frame each (`payload: inline`), behind the verbs of a slab.

Owns: an environment beside the index. Places mean what they mean in a slab, so that all above is the same: a row's key
is its slot's offset (u64, big-endian), its value a frame (`blocks.codec`); row `length` is where a slab would end. The
rows of a batch are one transaction, committed before the index names them. LMDB takes half as much again as the payload
and never makes its file shorter: what this tier may store is a part of its capacity; it claims the disk of an extent,
and half of one, when that is lent, and gives back only what lies behind the file's end. `copy_to` makes a smaller file.
Always: the file is no longer than its map, which is a hard limit; bytes come back only out of an intact frame with the
block's own key.
Units: bytes.
"""

import errno
import os
import struct
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb

from kvtier.blocks.codec import decode, encode
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.blockfile import claim, disk_bytes
from kvtier.tiers.lmdb.index import DATA_NAME, SYNC_MODES
from kvtier.tiers.lmdb.pages import check_index
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab

SLOTS_SHARE = 2, 5  # of the capacity is for slots and index; the rest is LMDB's, half as much again
_OFFSET = struct.Struct(">Q")
_LENGTH_KEY = b"length"
_READERS_MAX = 126
ROWS_AT_ONCE = 1000  # in one transaction, which needs new pages before it frees any


class InlineFile:
    """What a slab's file can do, for rows. Raises OSError where LMDB fails."""

    direct = False
    gives_back = False

    def __init__(self, env: Any, data: int, foreign: bool = False) -> None:
        """foreign: another process may lengthen it meanwhile."""
        self._env = env
        self._data = data
        self._foreign = foreign
        self._length = self._read_length()

    def _read_length(self) -> int:
        with begin_reading(self._env) as txn:
            row = txn.get(_LENGTH_KEY)
        return 0 if row is None else int.from_bytes(row, "big")

    def sync(self) -> None:
        with _as_oserror():
            self._env.sync(True)

    def takes_bytes(self, lent_bytes: int) -> int:
        """What LMDB's file may grow to for extents of so many bytes."""
        part, whole = SLOTS_SHARE
        return min(lent_bytes * (whole - part) // part, int(self._env.info()["map_size"]))

    def allocate(self, offset: int, length: int) -> None:
        """Claim disk for rows that reach so far from now on. Raises OSError (ENOSPC)."""
        end = max(self._length, offset + length)
        try:
            claim(self._data, self.takes_bytes(end))
        except OSError:
            self._claim_only(self._length)
            raise
        self._end_at(end)

    def punch(self, offset: int, length: int) -> bool:
        """Delete the rows there; LMDB uses their pages again. At the end, what was claimed for them is given back."""
        with _as_oserror(), self._env.begin(write=True) as txn, txn.cursor() as cursor:
            found = cursor.set_range(_OFFSET.pack(offset))
            while found and len(cursor.key()) == _OFFSET.size and _OFFSET.unpack(cursor.key())[0] < offset + length:
                found = cursor.delete()
        if offset < self._length <= offset + length:
            self._end_at(offset)
            self._claim_only(offset)
        return True

    def punches(self) -> bool:
        return True

    def cut(self, length: int) -> None:
        if length < self._length:
            self.punch(length, self._length - length)

    def length_bytes(self) -> int:
        if self._foreign:
            with _as_oserror():
                self._length = self._read_length()
        return self._length

    def forget_cached(self, offset: int, length: int) -> None:
        """LMDB reads through the page cache, and what is in it is what a writer has committed."""

    def disk_bytes(self) -> int:
        return disk_bytes(self._data)

    def disk_free_bytes(self) -> int:
        filesystem = os.fstatvfs(self._data)
        return filesystem.f_bavail * filesystem.f_frsize

    def _claim_only(self, length: int) -> None:
        """Let go of the disk behind the file's end, but for what rows up to this length may need."""
        with suppress(OSError):
            os.truncate(self._data, os.fstat(self._data).st_size)
            claim(self._data, self.takes_bytes(length))

    def _end_at(self, length: int) -> None:
        with _as_oserror(), self._env.begin(write=True) as txn:
            txn.put(_LENGTH_KEY, _OFFSET.pack(length))
        self._length = length


class InlineSlab:
    """Moves blocks between memory and rows. `write` from one thread at a time, `read` from any."""

    def __init__(self, env: Any, data: int, foreign: bool = False) -> None:
        self.file = InlineFile(env, data, foreign)
        self._env = env
        self._data = data

    @classmethod
    def open(cls, folder: Path, durability: str, map_bytes: int) -> "InlineSlab":
        """Open for writing, create if absent. Raises CorruptBlock, lmdb.Error or OSError."""
        sync, metasync = SYNC_MODES[durability]
        folder.mkdir(mode=0o700, exist_ok=True)
        if (folder / DATA_NAME).exists():
            check_index(folder / DATA_NAME)
        env = lmdb.open(
            str(folder),
            map_size=map_bytes,
            sync=sync,
            metasync=metasync,
            mode=0o600,
            readahead=False,
            max_readers=_READERS_MAX,
        )
        try:
            env.reader_check()
            return cls(env, os.open(folder / DATA_NAME, os.O_RDWR | os.O_CLOEXEC))
        except BaseException:
            env.close()
            raise

    @classmethod
    def open_readonly(cls, folder: Path, live: bool) -> "InlineSlab":
        """Open for a look; with no live writer nothing is written or locked. Raises CorruptBlock, lmdb.Error or
        OSError."""
        if not live:
            check_index(folder / DATA_NAME)
        env = lmdb.open(str(folder), readonly=True, lock=live, create=False, readahead=False, max_readers=_READERS_MAX)
        try:
            return cls(env, os.open(folder / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC), foreign=True)
        except BaseException:
            env.close()
            raise

    def write(self, ios: Sequence[SlotIO]) -> None:
        """Write every slot and note its payload's checksum: all of them, or each has an `error`."""
        for io in ios:
            io.take_checksum()
        try:
            with _as_oserror(), self._env.begin(write=True) as txn:
                for io in ios:
                    head, payload = encode(io.fingerprint, io.key, io.view[: io.length_bytes])
                    txn.put(_OFFSET.pack(io.offset), b"".join((head, payload)))
        except OSError as error:
            for io in ios:
                io.error = error

    def read(self, ios: Sequence[SlotIO], verify: bool) -> None:
        """Read every slot, with the checksum that came with it; failures are noted in `error`. Always verified."""
        for io in ios:
            try:
                with _as_oserror(), begin_reading(self._env, buffers=True) as txn:
                    self._take(io, txn.get(_OFFSET.pack(io.offset)))
            except OSError as error:
                io.error = error

    def keep_only(self, offsets: Container[int]) -> None:
        """Delete the rows of all other slots: what was evicted lies there until its slot or its extent is used again.

        Raises OSError; what was deleted until then stays so.
        """
        start: bytes | None = b""
        while start is not None:
            with _as_oserror(), self._env.begin(write=True) as txn, txn.cursor() as cursor:
                start = _delete_some(cursor, start, offsets)

    def used_bytes(self) -> int:
        """What the rows take, and would take if the file held nothing else."""
        stat = self._env.stat()
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def copy_to(self, fd: int) -> None:
        """Write the rows, and nothing else, as a table of their own. Raises lmdb.Error or OSError."""
        self._env.copyfd(fd, compact=True)

    def _take(self, io: SlotIO, row: memoryview | None) -> None:
        if row is None:
            raise TruncatedSlab(errno.ENODATA, "there is no row for the slot")
        try:
            frame = decode(row)
        except CorruptBlock as error:
            raise TruncatedSlab(errno.ENODATA, str(error)) from error
        io.checksum = frame.checksum
        if len(frame.payload) == io.length_bytes:  # else it is another block's, as its checksum will tell
            io.view[: io.length_bytes] = frame.payload
            io.clear_tail()

    def close(self) -> None:
        """Idempotent."""
        self._env.close()
        if self._data >= 0:
            os.close(self._data)
            self._data = -1


def _delete_some(cursor: Any, start: bytes, offsets: Container[int]) -> bytes | None:
    """Delete what is not kept among the next rows from a key on; returns where to go on."""
    found = cursor.set_range(start) if start else cursor.first()
    for _ in range(ROWS_AT_ONCE):
        if not found:
            return None
        key = bytes(cursor.key())
        is_slot = len(key) == _OFFSET.size
        leaves = is_slot and _OFFSET.unpack(key)[0] not in offsets
        found = cursor.delete() if leaves else cursor.next()
    return bytes(cursor.key()) if found else None


def begin_reading(env: Any, **options: Any) -> Any:
    """A read transaction; if another process has let the file outgrow our map, the map follows first."""
    while True:
        try:
            return env.begin(**options)
        except lmdb.MapResizedError:
            env.set_mapsize(0)


class _as_oserror:  # noqa: N801  a statement's word, not a thing
    """LMDB's errors as what a file would say."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
            raise OSError(errno.ENOSPC, str(error)) from error
        if isinstance(error, lmdb.Error):
            raise OSError(max(0, int(getattr(error, "code", 0) or 0)) or errno.EIO, str(error)) from error
