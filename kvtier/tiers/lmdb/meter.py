"""What a store gives its disk, and what the disk says that it writes.

Owns: sums since the store was opened. The pages of the index are what its thread has passed to write calls during a
commit, as the kernel counts them (`/proc/thread-self/io`), in whole pages, blocks that lie inline among them; where the
kernel does not count they are missing. The disk's own count (`/sys/dev/block/*/stat`) is of everybody who writes to it.
Units: bytes. A sum only grows; it is read by other threads.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.policies.wear import Written
from kvtier.types import PAGE_BYTES

_SECTOR_BYTES = 512  # the unit of the kernel's block statistics, whatever the device has
_SECTORS_WRITTEN = 6  # their field (Documentation/block/stat.rst)


class Meter:
    """Counts for one writer's thread."""

    def __init__(self, folder: Path) -> None:
        self._device = device_of(folder)
        self._disk_before = None if self._device is None else disk_written_bytes(self._device)
        self._written = Written(disk_bytes=self._disk_before if self._disk_before is None else 0)

    def written(self) -> Written:
        """Since the store was opened. Any thread, no I/O."""
        return self._written

    def payload(self, payload_bytes: int, slot_bytes: int) -> None:
        """Blocks were handed to the kernel, in slots so long."""
        told = self._written
        self._written = told._replace(
            payload_bytes=told.payload_bytes + payload_bytes, slot_bytes=told.slot_bytes + slot_bytes
        )

    @contextmanager
    def commit(self) -> Iterator[None]:
        """What this thread writes inside are pages of the index."""
        before = _passed_bytes()
        try:
            yield
        finally:
            pages = -(-(_passed_bytes() - before) // PAGE_BYTES)
            told = self._written
            index_bytes = told.index_bytes + pages * PAGE_BYTES
            self._written = told._replace(index_bytes=index_bytes, disk_bytes=self._disk_bytes())

    def _disk_bytes(self) -> int | None:
        if self._device is None or self._disk_before is None:
            return None
        now = disk_written_bytes(self._device)
        return self._written.disk_bytes if now is None else now - self._disk_before


def device_of(folder: Path) -> Path | None:
    """The kernel's folder of the block device that a file system lies on; None if it lies on none, or on several."""
    try:
        number = folder.stat().st_dev
    except OSError:
        return None
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return device if (device / "stat").exists() else None


def disk_written_bytes(device: Path) -> int | None:
    """What a device has written since it was attached; None if it does not say."""
    try:
        return int((device / "stat").read_text().split()[_SECTORS_WRITTEN]) * _SECTOR_BYTES
    except (OSError, ValueError, IndexError):
        return None


def file_system_bytes(folder: Path) -> int:
    """How large the file system is where a folder is, or will be. Raises OSError."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    filesystem = os.statvfs(folder)
    return filesystem.f_blocks * filesystem.f_frsize


def _passed_bytes() -> int:
    """What this thread has passed to write calls so far; 0 where the kernel does not count."""
    try:
        fields = Path("/proc/thread-self/io").read_text().split()
        return int(fields[fields.index("wchar:") + 1])
    except (OSError, ValueError, IndexError):
        return 0
