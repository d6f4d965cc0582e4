"""The table of inline payloads as a slab's file would be: its length, its disk, what is given back.

Owns nothing: the environment and the descriptor of LMDB's file are the slab's. LMDB takes half as much again as the
payload (blocks of a page or two may need more) and never makes its file shorter: an extent claims its disk, and half
of one, when it is lent, and what is given back is only what lies behind the file's end.
Units: bytes.
"""

import errno
import os
import struct
from contextlib import suppress
from typing import Any

import lmdb

from kvtier.tiers.lmdb.blockfile import claim, disk_bytes

SLOTS_SHARE = 2, 5  # of the capacity is for slots and index; the rest is LMDB's, half as much again
OFFSET = struct.Struct(">Q")  # a row's key: where its slot would be in a slab
_LENGTH_KEY = b"length"


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
        with as_oserror():
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
        with as_oserror(), self._env.begin(write=True) as txn, txn.cursor() as cursor:
            found = cursor.set_range(OFFSET.pack(offset))
            while found and len(cursor.key()) == OFFSET.size and OFFSET.unpack(cursor.key())[0] < offset + length:
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
            with as_oserror():
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
        with as_oserror(), self._env.begin(write=True) as txn:
            txn.put(_LENGTH_KEY, OFFSET.pack(length))
        self._length = length


def begin_reading(env: Any, **options: Any) -> Any:
    """A read transaction; if another process has let the file outgrow our map, the map follows first."""
    while True:
        try:
            return env.begin(**options)
        except lmdb.MapResizedError:
            env.set_mapsize(0)


class as_oserror:  # noqa: N801  a statement's word, not a thing
    """LMDB's errors as what a file would say."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
            raise OSError(errno.ENOSPC, str(error)) from error
        if isinstance(error, lmdb.Error):
            raise OSError(max(0, int(getattr(error, "code", 0) or 0)) or errno.EIO, str(error)) from error
