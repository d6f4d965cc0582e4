"""Writes a file of LMDB's anew without the pages that nobody uses, and gives it the old one's name.

Owns nothing. Always: the new file has all its bytes on the disk before it has that name; whatever fails or is killed
before leaves the old one as it was.
Units: bytes.
"""

import os
from pathlib import Path
from typing import Protocol

import lmdb

from kvtier.tiers.lmdb.index import DATA_NAME, LOCK_TABLE_NAME
from kvtier.tiers.lmdb.layout import FRESH_NAME


class Table(Protocol):
    """What is open of it."""

    def copy_to(self, fd: int) -> None: ...

    def close(self) -> None: ...


def write_anew(folder: Path, table: Table) -> None:
    """Copy `table` and close it; its names are to be synced then. Raises lmdb.Error or OSError, with the table open, if
    there is no room for a second one, say."""
    fresh = folder / FRESH_NAME
    try:
        fresh.unlink(missing_ok=True)  # of one that was interrupted
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            table.copy_to(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
    except (OSError, lmdb.Error):
        fresh.unlink(missing_ok=True)
        raise
    table.close()
    # A look that began beside an earlier writer may still hold the reader table, which then says to whoever opens next
    # how many transactions the old file has seen: by that LMDB would choose the new one's empty head.
    (folder / LOCK_TABLE_NAME).unlink(missing_ok=True)
    fresh.replace(folder / DATA_NAME)
