"""The slab as the kernel offers it: one file, moved in pages.

Owns: the file descriptor, and the choice between O_DIRECT and the page cache. A test that wants a failing disk
replaces methods of this class. Units: bytes; offsets and lengths are whole pages.
"""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.notices import say_once
from kvtier.types import PAGE_BYTES, page_aligned

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 0x01  # linux/falloc.h
_PUNCH_HOLE = 0x02
_SECTOR_BYTES = 512  # the unit of st_blocks, whatever the device has
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_DIRECT = "the filesystem refuses O_DIRECT; blocks go through the page cache"


class BlockFile:
    """An open slab file. `direct`: reads and writes bypass the page cache, and need page-aligned memory."""

    gives_back = True  # the disk of what is not used any more

    def __init__(self, fd: int, direct: bool) -> None:
        self._fd = fd
        self.direct = direct

    @classmethod
    def open(cls, path: Path) -> "BlockFile":
        """Open for reading and writing, create if absent. Falls back to the page cache, and says so once."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = cls(os.open(path, flags | os.O_DIRECT, 0o600), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if file._takes_direct():
                return file
            file.close()
        say_once(_log, str(path.parent), "O_DIRECT", NO_DIRECT)
        return cls(os.open(path, flags, 0o600), direct=False)

    @classmethod
    def open_readonly(cls, path: Path) -> "BlockFile":
        """Open for a look, past the page cache if the filesystem allows: a page that the cache got while a writer
        replaced it on the device may be neither the old nor the new one."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            file = cls(os.open(path, flags | os.O_DIRECT), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if file._reads_direct():
                return file
            file.close()
        return cls(os.open(path, flags), direct=False)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv: bytes read, fewer than asked near the end of the file. Raises OSError."""
        return os.preadv(self._fd, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """pwritev: bytes written, maybe fewer than given. Raises OSError."""
        return os.pwritev(self._fd, buffers, offset)

    def sync(self) -> None:
        """fdatasync. Raises OSError, after which nothing written since the last sync may be trusted."""
        os.fdatasync(self._fd)

    def allocate(self, offset: int, length: int) -> None:
        """Claim disk space, so that later writes cannot run out of it. Raises OSError (ENOSPC)."""
        code = _fallocate(self._fd, 0, offset, length)
        if code in _UNSUPPORTED:  # no such call here: writes may meet ENOSPC later, which is a value
            os.truncate(self._fd, max(self.length_bytes(), offset + length))
        elif code:
            raise OSError(code, os.strerror(code))

    def takes_bytes(self, lent_bytes: int) -> int:
        """What the file takes of the disk for extents of so many bytes."""
        return lent_bytes

    def punch(self, offset: int, length: int) -> bool:
        """Give disk space back. False where the filesystem cannot: see `cut`."""
        return _fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) == 0

    def punches(self) -> bool:
        """Whether the filesystem takes back parts of a file. Tried beyond the file's end, where there is nothing."""
        return self.punch(page_aligned(self.length_bytes()), PAGE_BYTES)

    def cut(self, length: int) -> None:
        """End the file here, if it is longer. Raises OSError."""
        if self.length_bytes() > length:
            os.truncate(self._fd, length)

    def forget_cached(self, offset: int, length: int) -> None:
        """Let the next read of this range come from the device, as far as the kernel agrees."""
        os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def length_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def disk_bytes(self) -> int:
        """What the filesystem has claimed for this file."""
        return disk_bytes(self._fd)

    def is_deleted(self) -> bool:
        return is_deleted(self._fd)

    def disk_free_bytes(self) -> int:
        """What the filesystem has left for us. Raises OSError."""
        filesystem = os.fstatvfs(self._fd)
        return filesystem.f_bavail * filesystem.f_frsize

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _takes_direct(self) -> bool:
        """Try one page: some filesystems accept the flag and refuse the transfer."""
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            try:
                if self.length_bytes() >= PAGE_BYTES:
                    os.preadv(self._fd, [view], 0)
                else:
                    os.pwritev(self._fd, [view], 0)
                    os.truncate(self._fd, 0)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise
        return True

    def _reads_direct(self) -> bool:
        """Try to read one page, which may lie beyond the end; an error of that page alone is no answer."""
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            try:
                os.preadv(self._fd, [view], 0)
            except OSError as error:
                return error.errno != errno.EINVAL
        return True


def free_bytes(folder: Path) -> int:
    """What the filesystem has left where a folder is, or will be. Raises OSError."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    filesystem = os.statvfs(folder)
    return filesystem.f_bavail * filesystem.f_frsize


def disk_bytes(fd: int) -> int:
    """What the filesystem has claimed for a file."""
    return os.fstat(fd).st_blocks * _SECTOR_BYTES


def is_deleted(fd: int) -> bool:
    """Whether an open file has no name any more: it ends when it is closed. One that was moved has."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return False


def claim(fd: int, length: int) -> None:
    """Claim disk space for a file's first bytes; what lies there stays. Raises OSError (ENOSPC).

    The file's length stays too, except where the filesystem cannot claim: there zeroes are written behind its end.
    """
    code = _fallocate(fd, _KEEP_SIZE, 0, length)
    if code in _UNSUPPORTED:
        _write_zeroes(fd, os.fstat(fd).st_size, length)
    elif code:
        raise OSError(code, os.strerror(code))


def _write_zeroes(fd: int, start: int, end: int) -> None:
    """Lengthen a file, or leave it as it was. Raises OSError."""
    try:
        offset = start
        while offset < end:
            offset += os.pwrite(fd, bytes(min(end - offset, 1 << 20)), offset)
    except OSError:
        os.truncate(fd, start)
        raise


def _fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    """fallocate(2), which Python lacks: 0, or an errno."""
    while _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0
