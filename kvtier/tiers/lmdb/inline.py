"""Payloads as values of an LMDB table, one frame each (`payload: inline`), behind the verbs of a slab.

Owns: an environment beside the index. Places mean what they mean in a slab, so that all above is the same: a row's key
is its slot's offset (u64, big-endian), its value a frame (`blocks.codec`); row `length` is where a slab would end. The
rows of a batch are one transaction, committed before the index names them. `copy_to` makes a smaller file.
Always: the file is no longer than its map, which is a hard limit; bytes come back only out of an intact frame with the
block's own key.
Units: bytes.
"""

import errno
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import lmdb

from kvtier.blocks.codec import decode, encode
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.index import DATA_NAME, SYNC_MODES
from kvtier.tiers.lmdb.inline_file import OFFSET, InlineFile, as_oserror, begin_reading
from kvtier.tiers.lmdb.pages import check_index
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab

_READERS_MAX = 126
ROWS_AT_ONCE = 1000  # in one transaction, which needs new pages before it frees any


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
            with as_oserror(), self._env.begin(write=True) as txn:
                for io in ios:
                    head, payload = encode(io.fingerprint, io.key, io.view[: io.length_bytes])
                    txn.put(OFFSET.pack(io.offset), b"".join((head, payload)))
        except OSError as error:
            for io in ios:
                io.error = error

    def read(self, ios: Sequence[SlotIO], verify: bool) -> None:
        """Read every slot, with the checksum that came with it; failures are noted in `error`. Always verified."""
        for io in ios:
            try:
                with as_oserror(), begin_reading(self._env, buffers=True) as txn:
                    self._take(io, txn.get(OFFSET.pack(io.offset)))
            except OSError as error:
                io.error = error

    def keep_only(self, offsets: Container[int]) -> None:
        """Delete the rows of all other slots: what was evicted lies there until its slot or its extent is used again.

        Raises OSError; what was deleted until then stays so.
        """
        start: bytes | None = b""
        while start is not None:
            with as_oserror(), self._env.begin(write=True) as txn, txn.cursor() as cursor:
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
        is_slot = len(key) == OFFSET.size
        leaves = is_slot and OFFSET.unpack(key)[0] not in offsets
        found = cursor.delete() if leaves else cursor.next()
    return bytes(cursor.key()) if found else None
