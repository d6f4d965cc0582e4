"""What a store gives its disk, and what the disk says that it writes.

Owns: sums since the store was opened. The pages of the index are what its thread has passed to write calls during a
commit, as the kernel counts them (`/proc/thread-self/io`), in whole pages, blocks that lie inline among them; where the
kernel does not count they are missing. The disk's own count (`/sys/dev/block/*/stat`) is of everybody who writes to it.
Units: bytes. A sum only grows; it is read by other threads.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.policies.wear import Written
from kvtier.types import PAGE_BYTES

_SECTOR_BYTES = 512  # the unit of the kernel's block statistics, whatever the device has
_SECTORS_WRITTEN = 6  # their field (Documentation/block/stat.rst)


class Meter:
    """Counts for one writer's thread."""

    def __init__(self, folder: Path) -> None:
        device = device_of(folder)
        self._stat = _Counts(None if device is None else device / "stat")
        self._io = _Counts(None)  # of the thread that commits
        self._thread = 0
        self._disk_before = _sectors_bytes(self._stat.read())
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
        before = self._passed_bytes()
        try:
            yield
        finally:
            pages = -(-(self._passed_bytes() - before) // PAGE_BYTES)
            told = self._written
            index_bytes = told.index_bytes + pages * PAGE_BYTES
            self._written = told._replace(index_bytes=index_bytes, disk_bytes=self._disk_bytes())

    def close(self) -> None:
        """Idempotent."""
        self._stat.close()
        self._io.close()

    def _passed_bytes(self) -> int:
        """What this thread has passed to write calls so far; 0 where the kernel does not count."""
        if self._thread != (thread := threading.get_native_id()):
            self._io.close()
            self._io, self._thread = _Counts(Path("/proc/thread-self/io")), thread
        return _field(self._io.read(), "wchar:")

    def _disk_bytes(self) -> int | None:
        now = _sectors_bytes(self._stat.read())
        if now is None or self._disk_before is None:
            return self._written.disk_bytes
        return now - self._disk_before


class _Counts:
    """A file of the kernel's counters, kept open: opening it would cost more than a commit's rows."""

    def __init__(self, path: Path | None) -> None:
        self._fd = -1
        if path is not None:
            with suppress(OSError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> str:
        """Empty where there is none, or not any more."""
        try:
            return os.pread(self._fd, PAGE_BYTES, 0).decode()
        except (OSError, ValueError):
            return ""

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
    stat = _Counts(device / "stat")
    try:
        return _sectors_bytes(stat.read())
    finally:
        stat.close()


def file_system_bytes(folder: Path) -> int:
    """How large the file system is where a folder is, or will be. Raises OSError."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    filesystem = os.statvfs(folder)
    return filesystem.f_blocks * filesystem.f_frsize


def _sectors_bytes(stat: str) -> int | None:
    try:
        return int(stat.split()[_SECTORS_WRITTEN]) * _SECTOR_BYTES
    except (ValueError, IndexError):
        return None


def _field(counts: str, name: str) -> int:
    try:
        fields = counts.split()
        return int(fields[fields.index(name) + 1])
    except (ValueError, IndexError):
        return 0
