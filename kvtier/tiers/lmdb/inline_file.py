"""The table of inline payloads as a slab's file would be: its length, its disk, what is given back.

Owns the length; the table is the slab's. LMDB takes half as much again as the payload (blocks of a page or two may need
more) and never makes its file shorter: an extent claims its disk, and half of one, when it is lent, and what is given
back is only what lies behind the file's end.
Units: bytes.
"""

import os
import struct
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from typing import Any

from kvtier.tiers.lmdb.blockfile import claim, is_deleted
from kvtier.tiers.lmdb.payload_table import PayloadTable

SLOTS_SHARE = 2, 5  # of the capacity is for slots and index; the rest is LMDB's, half as much again
OFFSET = struct.Struct(">Q")  # a row's key: where its slot would be in a slab
ROWS_AT_ONCE = 1000  # in one transaction, which needs new pages before it frees any
_LENGTH_KEY = b"length"


class InlineFile:
    """What a slab's file can do, for rows. Raises OSError where LMDB fails."""

    direct = False
    gives_back = False

    def __init__(self, table: PayloadTable, foreign: bool = False) -> None:
        """foreign: another process may lengthen it meanwhile."""
        self._table = table
        self._foreign = foreign
        self._length = self._read_length()

    def _read_length(self) -> int:
        with self._table.reading() as txn:
            row = txn.get(_LENGTH_KEY)
        return 0 if row is None else int.from_bytes(row, "big")

    def sync(self) -> None:
        self._table.sync()

    def takes_bytes(self, lent_bytes: int) -> int:
        """What LMDB's file may grow to for extents of so many bytes."""
        part, whole = SLOTS_SHARE
        return min(lent_bytes * (whole - part) // part, self._table.map_bytes())

    def allocate(self, offset: int, length: int) -> None:
        """Claim disk for rows that reach so far from now on. Raises OSError (ENOSPC)."""
        end = max(self._length, offset + length)
        try:
            claim(self._table.fd, self.takes_bytes(end))
            self._end_at(end, self._table.change)
        except OSError:
            self._claim_only(self._length)
            raise

    def punch(self, offset: int, length: int) -> bool:
        """Delete the rows there; LMDB uses their pages again. At the end, what was claimed for them is given back.

        False where LMDB fails: some of the rows may be left, and can be deleted later.
        """
        try:
            self._delete(offset, offset + length)
        except OSError:
            return False
        return True

    def punches(self) -> bool:
        return True

    def cut(self, length: int) -> None:
        if length < self._length:
            self._delete(length, self._length)

    def length_bytes(self) -> int:
        if self._foreign:
            self._length = self._read_length()
        return self._length

    def forget_cached(self, offset: int, length: int) -> None:
        """LMDB reads through the page cache, and what is in it is what a writer has committed."""

    def disk_bytes(self) -> int:
        return self._table.disk_bytes()

    def is_deleted(self) -> bool:
        return is_deleted(self._table.fd)

    def disk_free_bytes(self) -> int:
        return self._table.disk_free_bytes()

    def _delete(self, start: int, end: int) -> None:
        """Delete the rows from one offset to another."""
        at: bytes | None = OFFSET.pack(start)
        while at is not None:
            at = self._table.delete(partial(delete_some, start=at, end=OFFSET.pack(end)))
        if start < self._length <= end:
            self._end_at(start, self._table.delete)
            self._claim_only(start)

    def _claim_only(self, length: int) -> None:
        """Let go of the disk behind the file's end, but for what rows up to this length may need."""
        fd = self._table.fd
        with suppress(OSError):
            os.truncate(fd, os.fstat(fd).st_size)
            claim(fd, self.takes_bytes(length))

    def _end_at(self, length: int, change: Callable[[Callable[[Any], bool]], bool]) -> None:
        change(lambda txn: bool(txn.put(_LENGTH_KEY, OFFSET.pack(length))))
        self._length = length


def delete_some(txn: Any, start: bytes, end: bytes = b"", kept: Container[int] = ()) -> bytes | None:
    """Delete what is not kept among the next rows from `start` on, before `end` if there is one; returns where to go
    on."""
    with txn.cursor() as cursor:
        found = cursor.set_range(start) if start else cursor.first()
        for _ in range(ROWS_AT_ONCE):
            key = bytes(cursor.key()) if found else b""
            if not found or (end and key >= end):
                return None
            leaves = len(key) == OFFSET.size and OFFSET.unpack(key)[0] not in kept
            found = cursor.delete() if leaves else cursor.next()
        return bytes(cursor.key()) if found else None
