"""A slab whose payload is only pretended to be written, so that a store of a million blocks takes seconds and no disk.

Owns the pretence. Always: nothing that was written while it lasted is ever read. Units: bytes.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.lmdb.blockfile import BlockFile

PLENTY_BYTES = 1 << 60


class HollowFile(BlockFile):
    """A file like any other, but while `hollow` its writes go nowhere, and its disk has room for everything."""

    hollow = False

    @classmethod
    def open_hollow(cls, path: Path) -> "HollowFile":
        """As `open`."""
        file = cls.open(path)
        assert isinstance(file, cls)
        return file

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        return sum(map(len, buffers)) if self.hollow else super().write(buffers, offset)

    def sync(self) -> None:
        if not self.hollow:
            super().sync()

    def allocate(self, offset: int, length: int) -> None:
        if self.hollow:
            os.truncate(self._fd, max(self.length_bytes(), offset + length))
        else:
            super().allocate(offset, length)

    def disk_free_bytes(self) -> int:
        """The pretended blocks have no disk, and would count as promised to them."""
        return PLENTY_BYTES
