"""The machine's memory as libc and the kernel show it: typed calls, and how much is left.

Owns nothing. Addresses are integers, lengths are bytes. Failing calls raise DriverError with the errno.
"""

import ctypes
import errno
import mmap
import os
from pathlib import Path

from kvtier.errors import DriverError

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
FALLOC_FL_KEEP_SIZE = 0x1
FALLOC_FL_PUNCH_HOLE = 0x2
PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

MEMINFO = Path("/proc/meminfo")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
MAP_COUNT = Path("/proc/sys/vm/max_map_count")

_ADDRESS = ctypes.c_void_p  # a plain int would be cut to 32 bits
_LENGTH = ctypes.c_size_t
_OFFSET = ctypes.c_long  # off_t on 64-bit Linux
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _ADDRESS
_libc.mmap.argtypes = [_ADDRESS, _LENGTH, ctypes.c_int, ctypes.c_int, ctypes.c_int, _OFFSET]
_libc.munmap.argtypes = [_ADDRESS, _LENGTH]
_libc.mprotect.argtypes = [_ADDRESS, _LENGTH, ctypes.c_int]
_libc.madvise.argtypes = [_ADDRESS, _LENGTH, ctypes.c_int]
_libc.mlock.argtypes = [_ADDRESS, _LENGTH]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _OFFSET, _OFFSET]


def map_memory(address: int | None, length_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """mmap(2); with MAP_FIXED it replaces what lies there. Returns the address."""
    mapped: int | None = _libc.mmap(address, length_bytes, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        raise _error("mmap")
    return mapped


def unmap_memory(address: int, length_bytes: int) -> None:
    _expect_zero("munmap", _libc.munmap(address, length_bytes))


def protect(address: int, length_bytes: int, protection: int) -> None:
    _expect_zero("mprotect", _libc.mprotect(address, length_bytes, protection))


def lock(address: int, length_bytes: int) -> None:
    """Keep pages from being swapped out, until they are unmapped."""
    _expect_zero("mlock", _libc.mlock(address, length_bytes))


def punch_hole(fd: int, offset: int, length_bytes: int) -> None:
    """Give a file's memory back to the kernel; the file keeps its length and reads as zeroes there."""
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    _expect_zero("fallocate", _libc.fallocate(fd, mode, offset, length_bytes))


def allocate(fd: int, offset: int, length_bytes: int) -> None:
    """Take memory for a part of a memfd now: a typed error today instead of SIGBUS at the first touch."""
    try:
        os.posix_fallocate(fd, offset, length_bytes)
    except OSError as error:
        raise DriverError("fallocate", error.errno or 0, os.strerror(error.errno or 0)) from None


def populate(address: int, length_bytes: int) -> None:
    """Fill the page tables, so that the first touch costs nothing. A kernel before 5.14 faults later instead."""
    if _libc.madvise(address, length_bytes, MADV_POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
        raise _error("madvise")


def populate_within(address: int, length_bytes: int) -> None:
    """As `populate`, for the whole pages of any stretch of memory. A hint: a refusal changes nothing."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        _libc.madvise(start, stop - start, MADV_POPULATE_WRITE)


def advise_huge(address: int, length_bytes: int) -> bool:
    """Ask for transparent huge pages; False if the kernel has none. They come with the first touch, if at all."""
    return not _libc.madvise(address, length_bytes, MADV_HUGEPAGE)


def trim_heap() -> None:
    """Give back what was allocated for a moment. C libraries other than glibc have no such call, and need none."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def available_bytes() -> int:
    """Memory that can be taken without swapping: what the kernel has, or what a control group leaves if less."""
    machine_bytes = _fields(MEMINFO)["MemAvailable"] * 1024  # the kernel counts in kB
    return max(0, min([machine_bytes, *_group_rests()]))


def mappings_max() -> int:
    """How many separate mappings a process may have; consecutive parts of a file at consecutive addresses are one."""
    return int(MAP_COUNT.read_text())


def _group_rests() -> list[int]:
    """What each limited control group (version 2) around this process leaves."""
    rests = []
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        own = GROUPS / path
        for group in (own, *own.parents):
            limit = group / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                used_bytes = int((group / "memory.current").read_text())
                cold_bytes = _fields(group / "memory.stat")["inactive_file"]  # page cache that makes room
                rests.append(int(text) - used_bytes + cold_bytes)
            if group == GROUPS:
                break
    return rests


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}


def _expect_zero(call: str, result: int) -> None:
    if result:
        raise _error(call)


def _error(call: str) -> DriverError:
    code = ctypes.get_errno()
    return DriverError(call, code, os.strerror(code))
