"""A temporary folder on the disk that is to be measured.

Always: it is gone when the bench ends, also by a signal; a disk that cannot be measured or is too full is refused
before anything is written. Units: bytes.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cli import stopping
from kvtier.cli.machine import filesystem_of
from kvtier.errors import UsageError

IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "hugetlbfs")  # some of them accept O_DIRECT, and have no disk behind it
MARGIN = 1.1  # of what the bench writes


@contextmanager
def scratch(path: Path | None, needed_bytes: int) -> Iterator[Path]:
    """A new folder in `path` (default: the current one). Raises UsageError if `path` is not fit to be measured."""
    parent = Path.cwd() if path is None else path
    check(parent, needed_bytes)
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=parent)
    except OSError as error:
        raise UsageError(f"{parent}: {error.strerror}; name a folder that can be written") from None
    with stopping.tidily(), folder as name:
        _expect_direct(parent, Path(name) / "direct")
        yield Path(name)


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A new folder of this name, which goes with all that is in it."""
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(parent: Path, needed_bytes: int) -> None:
    """Raises UsageError for a folder that is not there, lies in memory or has too little room."""
    if not parent.is_dir():
        raise UsageError(f"{parent}: there is no such folder; name an existing one on the disk to be measured")
    kind = filesystem_of(parent)
    if kind.split()[0] in IN_MEMORY:
        raise UsageError(f"{parent}: {kind} lies in memory and has no O_DIRECT; name a folder on a disk")
    wanted_bytes = int(needed_bytes * MARGIN)
    filesystem = os.statvfs(parent)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if free_bytes < wanted_bytes:
        raise UsageError(
            f"{parent}: {wanted_bytes} bytes are needed and {free_bytes} are free; ask for less, or use another disk"
        )


def _expect_direct(parent: Path, probe: Path) -> None:
    """Without O_DIRECT only the page cache would be measured."""
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        problem = f"{parent}: {filesystem_of(parent)} refuses O_DIRECT"
        raise UsageError(f"{problem}, so that only the page cache would be measured; name a folder on a disk") from None
