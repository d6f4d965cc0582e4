"""MemfdDriver: virtual memory management on host memory, with the rules of a device.

Owns: one memfd, which is the physical memory, and every range and handle that was made. A handle is a part of that
file; offsets are never used twice, so that the file is sparse, has no fragmentation and nothing is ever cut off
(a view behind a shrunken file gets SIGBUS).
Always:  used_bytes <= capacity_bytes; the memory of a dead handle is punched out of the file at once.
Units:   bytes.

Costs (2 MiB granule, a 2-core virtual machine): create, map and set_access about 50 us, unmap 20 to 90 us; a
page fault per 4 KiB would cost 1.8 ms, hence fallocate in `create` and populate in `set_access`.
"""

import errno
import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator import host_memory
from kvtier.allocator.driver import Handle, Range
from kvtier.allocator.lifetime import Lifetime
from kvtier.errors import DriverError, OutOfMemory

GRANULE_BYTES = 2 << 20
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | host_memory.MAP_NORESERVE


class _Pages:
    """What the views of one range have in common; when the last view dies, so does this."""

    def __init__(self, addresses: Range) -> None:
        self.__array_interface__ = {
            "shape": (addresses.length_bytes,),
            "typestr": "|u1",
            "data": (addresses.address, False),
            "version": 3,
        }


@dataclass(slots=True)
class _Reservation:
    pages: _Pages
    mapped: dict[int, tuple[Handle, int]] = field(default_factory=dict)  # by granule: handle, offset of its start


@dataclass(slots=True)
class _Physical:
    mappings: int = 0
    released: bool = False


class MemfdDriver:
    """A `MemoryDriver` on host memory. `granule_bytes`: any multiple of the page size."""

    def __init__(self, capacity_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise DriverError("granule", errno.EINVAL, f"{granule_bytes} is not a multiple of {mmap.PAGESIZE}")
        self.capacity_bytes = capacity_bytes
        self._granule_bytes = granule_bytes
        self._used_bytes = 0
        self._top_bytes = 0  # the file's first offset that was never used
        self._ranges: dict[Range, _Reservation] = {}
        self._handles: dict[Handle, _Physical] = {}
        self._fd = os.memfd_create("kvtier-gpu", os.MFD_CLOEXEC)
        self._lifetime = Lifetime("the memory driver")

    @property
    def granule_bytes(self) -> int:
        return self._granule_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def fd(self) -> int:
        """The memfd. Raises ClosedError after `close` or a fork."""
        self._lifetime.expect()
        return self._fd

    def reserve(self, range_bytes: int) -> Range:
        """Set addresses aside. They are aligned to a granule, which huge pages need."""
        self._expect_granules("reserve", range_bytes)
        self._lifetime.expect()
        spare_bytes = self._granule_bytes - mmap.PAGESIZE
        start = host_memory.map_memory(None, range_bytes + spare_bytes, host_memory.PROT_NONE, _NOTHING, -1, 0)
        address = -(-start // self._granule_bytes) * self._granule_bytes
        for cut, length_bytes in (
            (start, address - start),
            (address + range_bytes, spare_bytes - (address - start)),
        ):
            if length_bytes:
                host_memory.unmap_memory(cut, length_bytes)
        addresses = Range(address, range_bytes)
        self._ranges[addresses] = _Reservation(_Pages(addresses))
        return addresses

    def free_range(self, addresses: Range) -> None:
        """Give the addresses back; if a view still lives, then with its death, and until then it sees zeroes."""
        if self._reservation("free_range", addresses).mapped:
            raise DriverError("free_range", errno.EBUSY, "memory is mapped in the range")
        self._abandon(addresses)

    def create(self, length_bytes: int) -> Handle:
        """Take memory. Raises OutOfMemory at the capacity, or when the machine has no more."""
        self._expect_granules("create", length_bytes)
        fd = self.fd
        if self._used_bytes + length_bytes > self.capacity_bytes:
            raise OutOfMemory(
                f"create: {length_bytes} bytes do not fit, {self._used_bytes} of {self.capacity_bytes} are used"
            )
        try:
            host_memory.allocate(fd, self._top_bytes, length_bytes)
        except DriverError as error:
            host_memory.punch_hole(fd, self._top_bytes, length_bytes)  # what was had before it ran out
            if error.code in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfMemory(f"create: the machine has no {length_bytes} bytes left ({error})") from None
            raise
        handle = Handle(self._top_bytes, length_bytes)
        self._top_bytes += length_bytes
        self._used_bytes += length_bytes
        self._handles[handle] = _Physical()
        return handle

    def release(self, handle: Handle) -> None:
        """Give the handle up; see `MemoryDriver.release`."""
        physical = self._physical("release", handle)
        physical.released = True
        self._collect(handle, physical)

    def map(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        """Put memory at an offset, not accessible yet."""
        reservation, physical = self._reservation("map", addresses), self._physical("map", handle)
        granules = self._granules("map", addresses, offset_bytes, handle.length_bytes)
        if any(granule in reservation.mapped for granule in granules):
            raise DriverError("map", errno.EEXIST, f"memory is mapped at offset {offset_bytes} already")
        host_memory.map_memory(
            addresses.address + offset_bytes,
            handle.length_bytes,
            host_memory.PROT_NONE,
            mmap.MAP_SHARED | host_memory.MAP_FIXED,
            self.fd,
            handle.key,
        )
        reservation.mapped.update((granule, (handle, offset_bytes)) for granule in granules)
        physical.mappings += 1

    def set_access(self, addresses: Range, offset_bytes: int, length_bytes: int, *, write: bool) -> None:
        """Make mapped memory accessible and fill the page tables."""
        mapped = self._reservation("set_access", addresses).mapped
        if any(g not in mapped for g in self._granules("set_access", addresses, offset_bytes, length_bytes)):
            raise DriverError("set_access", errno.EINVAL, f"not all is mapped from offset {offset_bytes} on")
        address = addresses.address + offset_bytes
        host_memory.protect(address, length_bytes, host_memory.PROT_READ_WRITE)
        host_memory.populate(address, length_bytes)
        if not write:
            host_memory.protect(address, length_bytes, mmap.PROT_READ)

    def unmap(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Take whole mappings away; the addresses stay reserved."""
        mapped = self._reservation("unmap", addresses).mapped
        granules = self._granules("unmap", addresses, offset_bytes, length_bytes)
        handles = self._whole_mappings(mapped, offset_bytes, offset_bytes + length_bytes)
        host_memory.map_memory(
            addresses.address + offset_bytes,
            length_bytes,
            host_memory.PROT_NONE,
            _NOTHING | host_memory.MAP_FIXED,
            -1,
            0,
        )
        for granule in granules:
            del mapped[granule]
        for handle in handles:
            physical = self._handles[handle]
            physical.mappings -= 1
            self._collect(handle, physical)

    def view(self, addresses: Range) -> NDArray[np.uint8]:
        """uint8 array [length_bytes] over the range."""
        pages: Any = self._reservation("view", addresses).pages
        return np.asarray(pages)

    def close(self) -> None:
        """Unmap all ranges, then let the memory go with the file."""
        if not self._lifetime.end():
            return
        for addresses in list(self._ranges):
            self._abandon(addresses)
        self._handles.clear()
        self._used_bytes = 0
        os.close(self._fd)

    def _abandon(self, addresses: Range) -> None:
        """Lay zeroes over the range and let its views decide when the addresses may be used by others."""
        flags = _NOTHING | host_memory.MAP_FIXED
        host_memory.map_memory(addresses.address, addresses.length_bytes, host_memory.PROT_READ_WRITE, flags, -1, 0)
        pages = self._ranges.pop(addresses).pages
        last_view = weakref.finalize(pages, host_memory.unmap_memory, addresses.address, addresses.length_bytes)
        last_view.atexit = False  # the addresses go with the process

    def _collect(self, handle: Handle, physical: _Physical) -> None:
        """Return the memory of a handle that is neither owned nor mapped."""
        if physical.released and physical.mappings == 0:
            host_memory.punch_hole(self.fd, handle.key, handle.length_bytes)
            del self._handles[handle]
            self._used_bytes -= handle.length_bytes

    def _whole_mappings(self, mapped: dict[int, tuple[Handle, int]], start: int, stop: int) -> list[Handle]:
        """The handles that fill [start, stop) exactly."""
        handles = []
        while start < stop:
            handle, handle_start = mapped.get(start, (None, start))
            if handle is None or handle_start != start or start + handle.length_bytes > stop:
                raise DriverError("unmap", errno.EINVAL, f"no whole mapping at offset {start}")
            handles.append(handle)
            start += handle.length_bytes
        return handles

    def _reservation(self, call: str, addresses: Range) -> _Reservation:
        self._lifetime.expect()
        reservation = self._ranges.get(addresses)
        if reservation is None:
            raise DriverError(call, errno.EINVAL, "not a range of this driver, or freed")
        return reservation

    def _physical(self, call: str, handle: Handle) -> _Physical:
        self._lifetime.expect()
        physical = self._handles.get(handle)
        if physical is None or physical.released:
            raise DriverError(call, errno.EINVAL, "not a handle of this driver, or released")
        return physical

    def _granules(self, call: str, addresses: Range, offset_bytes: int, length_bytes: int) -> range:
        """The offsets of the granules in [offset, offset + length), which must lie within the range."""
        self._expect_granules(call, length_bytes)
        if offset_bytes < 0 or offset_bytes % self._granule_bytes:
            raise DriverError(call, errno.EINVAL, f"offset {offset_bytes} is not at a granule")
        if offset_bytes + length_bytes > addresses.length_bytes:
            raise DriverError(call, errno.EINVAL, f"{length_bytes} bytes at {offset_bytes} exceed the range")
        return range(offset_bytes, offset_bytes + length_bytes, self._granule_bytes)

    def _expect_granules(self, call: str, length_bytes: int) -> None:
        if length_bytes <= 0 or length_bytes % self._granule_bytes:
            raise DriverError(
                call, errno.EINVAL, f"{length_bytes} bytes are not whole granules of {self._granule_bytes}"
            )
