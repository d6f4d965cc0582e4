"""MemfdDriver: virtual memory management on host memory, with the rules of a device.

Owns: one memfd, which is the physical memory, and every range and handle that was made. A handle is a part of that
file; offsets are never used twice, so that the file is sparse, has no fragmentation and nothing is ever cut off
(a view behind a shrunken file gets SIGBUS).
Always:  used_bytes <= capacity_bytes; the memory of a dead handle is punched out of the file at once.
Units:   bytes.

Costs (2 MiB granule, a 2-core virtual machine): create, map and set_access about 50 us, unmap 20 to 90 us; a
page fault per 4 KiB would cost 1.8 ms, hence fallocate in `create` and populate in `set_access`. For reading only, the
kernel maps 16 pages for each that is touched: 0.2 us a page, where MADV_POPULATE_READ takes 0.9.
"""

import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator import host_memory
from kvtier.allocator.driver import Handle, MemoryInfo, Range
from kvtier.allocator.ledger import Ledger
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.streams import HostStreams
from kvtier.errors import DriverError, OutOfMemory

GRANULE_BYTES = 2 << 20
FAULT_AROUND_BYTES = 64 << 10  # what Linux maps at once around a page that is read
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


class MemfdDriver:
    """A `MemoryDriver` on host memory. `granule_bytes`: any multiple of the page size."""

    def __init__(self, capacity_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise DriverError("granule", errno.EINVAL, f"{granule_bytes} is not a multiple of {mmap.PAGESIZE}")
        self.capacity_bytes = capacity_bytes
        self._granule_bytes = granule_bytes
        self._top_bytes = 0  # the file's first offset that was never used
        self._fd = os.memfd_create("kvtier-gpu", os.MFD_CLOEXEC)
        self._lifetime = Lifetime("the memory driver")
        self._ledger = Ledger(granule_bytes, self._lifetime)
        self._pages: weakref.WeakValueDictionary[Range, _Pages] = weakref.WeakValueDictionary()
        self._streams = HostStreams(self._lifetime)

    @property
    def granule_bytes(self) -> int:
        return self._granule_bytes

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    @property
    def has_read_only(self) -> bool:
        return True

    @property
    def streams(self) -> HostStreams:
        """Copies that are over when the call returns."""
        return self._streams

    @property
    def fd(self) -> int:
        """The memfd. Raises ClosedError after `close` or a fork."""
        self._lifetime.expect()
        return self._fd

    def memory_info(self) -> MemoryInfo:
        """What is left of the capacity; the machine may have less."""
        self._lifetime.expect()
        return MemoryInfo(self.capacity_bytes - self.used_bytes, self.capacity_bytes)

    def reserve(self, range_bytes: int) -> Range:
        """Set addresses aside. They are aligned to a granule, which huge pages need."""
        self._ledger.expect_granules("reserve", range_bytes)
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
        self._ledger.reserved(addresses)
        return addresses

    def free_range(self, addresses: Range) -> None:
        """Give the addresses back; if a view still lives, then with its death, and until then it sees zeroes."""
        self._ledger.expect_empty(addresses)
        self._abandon(addresses)
        self._ledger.freed(addresses)

    def create(self, length_bytes: int) -> Handle:
        """Take memory. Raises OutOfMemory at the capacity, or when the machine has no more."""
        self._ledger.expect_granules("create", length_bytes)
        fd = self.fd
        self._ledger.expect_capacity(length_bytes, self.capacity_bytes)
        try:
            host_memory.allocate(fd, self._top_bytes, length_bytes)
        except DriverError as error:
            host_memory.punch_hole(fd, self._top_bytes, length_bytes)  # what was had before it ran out
            if error.code in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfMemory(f"create: the machine has no {length_bytes} bytes left ({error})") from None
            raise
        handle = Handle(self._top_bytes, length_bytes)
        self._top_bytes += length_bytes
        self._ledger.created(handle)
        return handle

    def release(self, handle: Handle) -> None:
        """Give the handle up; see `MemoryDriver.release`."""
        self._ledger.expect_handle("release", handle)
        self._give_back(self._ledger.released(handle))

    def map(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        """Put memory at an offset, not accessible yet."""
        self._ledger.expect_room(addresses, offset_bytes, handle)
        host_memory.map_memory(
            addresses.address + offset_bytes,
            handle.length_bytes,
            host_memory.PROT_NONE,
            mmap.MAP_SHARED | host_memory.MAP_FIXED,
            self.fd,
            handle.key,
        )
        self._ledger.mapped(addresses, offset_bytes, handle)

    def set_access(self, addresses: Range, offset_bytes: int, length_bytes: int, *, write: bool) -> None:
        """Make mapped memory accessible and fill the page tables."""
        self._ledger.expect_mapped("set_access", addresses, offset_bytes, length_bytes)
        address = addresses.address + offset_bytes
        if write:
            host_memory.protect(address, length_bytes, host_memory.PROT_READ_WRITE)
            host_memory.populate(address, length_bytes)
        else:
            host_memory.protect(address, length_bytes, mmap.PROT_READ)
            self.view(addresses)[offset_bytes : offset_bytes + length_bytes : FAULT_AROUND_BYTES].max()

    def zero(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Fill memory with zeroes."""
        self._ledger.expect_stretch("zero", addresses, offset_bytes, length_bytes)
        self.view(addresses)[offset_bytes : offset_bytes + length_bytes] = 0

    def unmap(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Take whole mappings away; the addresses stay reserved."""
        self._ledger.expect_whole_mappings(addresses, offset_bytes, length_bytes)
        host_memory.map_memory(
            addresses.address + offset_bytes,
            length_bytes,
            host_memory.PROT_NONE,
            _NOTHING | host_memory.MAP_FIXED,
            -1,
            0,
        )
        self._give_back(self._ledger.unmapped(addresses, offset_bytes, length_bytes))

    def view(self, addresses: Range) -> NDArray[np.uint8]:
        """uint8 array [length_bytes] over the range."""
        self._ledger.expect_range("view", addresses)
        pages: Any = self._pages.get(addresses)
        if pages is None:
            pages = self._pages[addresses] = _Pages(addresses)
        return np.asarray(pages)

    def has_views(self, addresses: Range) -> bool:
        """Whether an array over the range lives."""
        self._ledger.expect_range("has_views", addresses)
        return addresses in self._pages

    def close(self) -> None:
        """Unmap all ranges, then let the memory go with the file."""
        if not self._lifetime.end():
            return
        for addresses in self._ledger.ranges():
            self._abandon(addresses)
        self._ledger.forget_all()
        os.close(self._fd)

    def _abandon(self, addresses: Range) -> None:
        """Lay zeroes over the range and let its views decide when the addresses may be used by others."""
        pages = self._pages.get(addresses)
        if pages is None:
            host_memory.unmap_memory(addresses.address, addresses.length_bytes)
            return
        flags = _NOTHING | host_memory.MAP_FIXED
        host_memory.map_memory(addresses.address, addresses.length_bytes, host_memory.PROT_READ_WRITE, flags, -1, 0)
        last_view = weakref.finalize(pages, host_memory.unmap_memory, addresses.address, addresses.length_bytes)
        last_view.atexit = False  # the addresses go with the process

    def _give_back(self, handles: list[Handle]) -> None:
        """Return the memory of handles that are neither owned nor mapped."""
        for handle in handles:
            host_memory.punch_hole(self.fd, handle.key, handle.length_bytes)
