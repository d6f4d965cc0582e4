"""Payloads as values of an LMDB table, one frame each (`payload: inline`), behind the verbs of a slab.

Owns: an environment beside the index. Places mean what they mean in a slab, so that all above is the same: a row's key
is its slot's offset (u64, big-endian), its value a frame (`blocks.codec`); row `length` is where a slab would end. The
rows of a batch are one transaction, committed before the index names them. `copy_to` makes a smaller file.
Always: the file is no longer than its map, which is a hard limit; bytes come back only out of an intact frame with the
block's own key.
Units: bytes.
"""

import errno
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.blocks.codec import decode, encode
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.inline_file import OFFSET, InlineFile, delete_some
from kvtier.tiers.lmdb.payload_table import PayloadTable
from kvtier.tiers.lmdb.slab import SlotIO, TruncatedSlab


class InlineSlab:
    """Moves blocks between memory and rows. `write` from one thread at a time, `read` from any."""

    def __init__(self, table: PayloadTable, foreign: bool = False) -> None:
        self.file = InlineFile(table, foreign)
        self.table = table

    @classmethod
    def open(cls, folder: Path, durability: str, map_bytes: int) -> "InlineSlab":
        """Open for writing, create if absent. Raises CorruptBlock, lmdb.Error or OSError."""
        return cls._over(PayloadTable.open(folder, durability, map_bytes))

    @classmethod
    def open_readonly(cls, folder: Path, live: bool) -> "InlineSlab":
        """Open for a look; with no live writer nothing is written or locked. Raises CorruptBlock, lmdb.Error or
        OSError."""
        return cls._over(PayloadTable.open_readonly(folder, live), foreign=True)

    @classmethod
    def _over(cls, table: PayloadTable, foreign: bool = False) -> "InlineSlab":
        try:
            return cls(table, foreign)
        except BaseException:
            table.close()
            raise

    def write(self, ios: Sequence[SlotIO]) -> None:
        """Write every slot and note its payload's checksum: all of them, or each has an `error`."""
        for io in ios:
            io.take_checksum()
        try:
            self.table.change(partial(_put_frames, ios=ios))
        except OSError as error:
            for io in ios:
                io.error = error

    def read(self, ios: Sequence[SlotIO], verify: bool) -> None:
        """Read every slot, with the checksum that came with it; failures are noted in `error`. Always verified."""
        for io in ios:
            try:
                with self.table.reading(buffers=True) as txn:
                    self._take(io, txn.get(OFFSET.pack(io.offset)))
            except OSError as error:
                io.error = error

    def keep_only(self, offsets: Container[int]) -> None:
        """Delete the rows of all other slots: what was evicted lies there until its slot or its extent is used again.

        Raises OSError; what was deleted until then stays so.
        """
        at: bytes | None = b""
        while at is not None:
            at = self.table.delete(partial(delete_some, start=at, kept=offsets))

    def used_bytes(self) -> int:
        """What the rows take, and would take if the file held nothing else."""
        return self.table.used_bytes()

    def copy_to(self, fd: int) -> None:
        """Write the rows, and nothing else, as a table of their own. Raises lmdb.Error or OSError."""
        self.table.copy_to(fd)

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
        self.table.close()


def _put_frames(txn: Any, ios: Sequence[SlotIO]) -> None:
    for io in ios:
        head, payload = encode(io.fingerprint, io.key, io.view[: io.length_bytes])
        txn.put(OFFSET.pack(io.offset), b"".join((head, payload)))
