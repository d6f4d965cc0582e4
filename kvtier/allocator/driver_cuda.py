"""CudaDriver: virtual memory management on a CUDA device.

Owns: its hold on the device, and every range and handle that was made. Asks `Ledger` whether a call keeps the rules
before the device sees it, so that misuse never costs a context.
Always:  used_bytes <= capacity_bytes; the thread that makes a driver has the device's context current, each other one
         calls `streams.bind_thread` first; memory is accessible to this device only.
Units:   bytes.

Costs on an A100 at 2 MiB a handle (kvcached): create 193 us, map 1.5, set_access 36 a call, unmap 26.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvtier.allocator.cuda_calls import CudaCalls
from kvtier.allocator.cuda_device import CudaDevice
from kvtier.allocator.cuda_views import DevicePages, array_over
from kvtier.allocator.driver import Handle, MemoryInfo, Range
from kvtier.allocator.ledger import Ledger
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.streams_cuda import CudaStreams
from kvtier.errors import DeviceLost, DriverError, KvtierError

FOR_ALL_CONTEXTS = 1  # CU_MEMHOSTREGISTER_PORTABLE


class CudaDriver:
    """A `MemoryDriver` on device number `device`, with `SupportsStreams`, `SupportsPinning` and `SupportsSharing`."""

    def __init__(
        self,
        device: int = 0,
        *,
        capacity_bytes: int | None = None,
        granule_bytes: int | None = None,
        share: bool = False,
    ) -> None:
        """Take hold of the device.

        capacity_bytes: how much may be created; by default all that the device has. granule_bytes: the device's own, or
        that times a power of two. share: handles can be exported. Raises ConfigError if there is no such device, or it
        cannot do this, and DriverError for a granule that cannot be had.
        """
        with ExitStack() as undo:
            self._device = CudaDevice(device, share=share)
            undo.callback(self._device.release)
            self._calls = self._device.calls
            self._granule_bytes = self._device.granule_of(granule_bytes)
            self._total_bytes = int(self._calls("cuMemGetInfo")[1])
            self.capacity_bytes = self._total_bytes if capacity_bytes is None else capacity_bytes
            self._lifetime = Lifetime("the memory driver")
            self._ledger = Ledger(self._granule_bytes, self._lifetime)
            self._streams = CudaStreams(self._calls, self._device.context, self._lifetime)
            self._own_stream = self._streams.make_stream()
            undo.pop_all()
        self._pages: weakref.WeakValueDictionary[Range, DevicePages] = weakref.WeakValueDictionary()
        self._registered: set[int] = set()
        self._has_read_only: bool | None = None  # not known before it is needed

    @property
    def granule_bytes(self) -> int:
        return self._granule_bytes

    @property
    def architecture(self) -> str:
        """What kernels are compiled for, such as ``sm_90``."""
        return self._device.architecture

    @property
    def calls(self) -> CudaCalls:
        """The driver's functions, for launches."""
        return self._calls

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    @property
    def streams(self) -> CudaStreams:
        """Copies and their order."""
        return self._streams

    @property
    def has_read_only(self) -> bool:
        """See `MemoryDriver.has_read_only`. The first call maps a granule to find out."""
        self._lifetime.expect()
        if self._has_read_only is None:
            self._has_read_only = self._try_read_only()
        return self._has_read_only

    @property
    def reads_host_addresses(self) -> bool:
        """Whether kernels find registered host memory at the addresses that it has for the CPU."""
        self._lifetime.expect()
        return self._device.reads_host_addresses

    def memory_info(self) -> MemoryInfo:
        """What is left of the device's memory, within the capacity."""
        self._lifetime.expect()
        left_bytes = int(self._calls("cuMemGetInfo")[0])
        return MemoryInfo(
            min(left_bytes, self.capacity_bytes - self.used_bytes), min(self._total_bytes, self.capacity_bytes)
        )

    def reserve(self, range_bytes: int) -> Range:
        """Set addresses aside."""
        self._ledger.expect_granules("reserve", range_bytes)
        addresses = Range(int(self._calls("cuMemAddressReserve", range_bytes, self._granule_bytes, 0, 0)), range_bytes)
        self._ledger.reserved(addresses)
        return addresses

    def free_range(self, addresses: Range) -> None:
        """Give the addresses back; if a view still lives, then with its death, and until then using it is an error."""
        self._ledger.expect_empty(addresses)
        self._give_up(addresses)
        self._ledger.freed(addresses)

    def create(self, length_bytes: int) -> Handle:
        """Take memory. Raises OutOfMemory at the capacity, or when the device has no more."""
        self._ledger.expect_granules("create", length_bytes)
        self._ledger.expect_capacity(length_bytes, self.capacity_bytes)
        handle = Handle(int(self._calls("cuMemCreate", length_bytes, self._device.memory, 0)), length_bytes)
        self._ledger.created(handle)
        return handle

    def release(self, handle: Handle) -> None:
        """Give the handle up; see `MemoryDriver.release`."""
        self._ledger.expect_handle("release", handle)
        self._calls("cuMemRelease", handle.key)
        self._ledger.released(handle)

    def map(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        """Put memory at an offset, not accessible yet."""
        self._ledger.expect_room(addresses, offset_bytes, handle)
        self._calls("cuMemMap", addresses.address + offset_bytes, handle.length_bytes, 0, handle.key, 0)
        self._ledger.mapped(addresses, offset_bytes, handle)

    def set_access(self, addresses: Range, offset_bytes: int, length_bytes: int, *, write: bool) -> None:
        """Make mapped memory accessible to this device; read-only where it can."""
        self._ledger.expect_mapped("set_access", addresses, offset_bytes, length_bytes)
        start = addresses.address + offset_bytes
        if not write and self._has_read_only is not False:
            self._has_read_only = self._device.makes_read_only(start, length_bytes)
            if self._has_read_only:
                return
        self._calls("cuMemSetAccess", start, length_bytes, self._device.for_writing, 1)

    def zero(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Fill memory with zeroes, in a stream of the driver's own, and wait for that."""
        self._ledger.expect_stretch("zero", addresses, offset_bytes, length_bytes)
        self._calls("cuMemsetD8Async", addresses.address + offset_bytes, 0, length_bytes, self._own_stream.key)
        self._streams.finish(self._own_stream)

    def unmap(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Take whole mappings away; the addresses stay reserved."""
        self._ledger.expect_whole_mappings(addresses, offset_bytes, length_bytes)
        self._calls("cuMemUnmap", addresses.address + offset_bytes, length_bytes)
        self._ledger.unmapped(addresses, offset_bytes, length_bytes)

    def view(self, addresses: Range) -> Any:
        """CuPy uint8 array [length_bytes] over the range; torch takes it by DLPack. Raises ConfigError without CuPy."""
        self._ledger.expect_range("view", addresses)
        pages = self._pages.get(addresses)
        if pages is None:
            pages = self._pages[addresses] = DevicePages(addresses.address, addresses.length_bytes)
        return array_over(pages, self._device.number)

    def has_views(self, addresses: Range) -> bool:
        """Whether an array over the range lives."""
        self._ledger.expect_range("has_views", addresses)
        return addresses in self._pages

    def register(self, address: int, length_bytes: int) -> None:
        """Pin host memory; see `SupportsPinning.register`."""
        self._lifetime.expect()
        self._calls("cuMemHostRegister", address, length_bytes, FOR_ALL_CONTEXTS)
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._lifetime.expect()
        self._calls("cuMemHostUnregister", address)
        self._registered.discard(address)

    def export_handle(self, handle: Handle) -> int:
        """A file descriptor for the memory; see `SupportsSharing.export_handle`. Needs `share`."""
        self._ledger.expect_handle("export_handle", handle)
        return int(self._calls("cuMemExportToShareableHandle", handle.key, self._device.fd_type, 0))

    def import_handle(self, fd: int, length_bytes: int) -> Handle:
        """Another process's memory; see `SupportsSharing.import_handle`."""
        self._ledger.expect_granules("import_handle", length_bytes)
        handle = Handle(int(self._calls("cuMemImportFromShareableHandle", fd, self._device.fd_type)), length_bytes)
        self._ledger.created(handle, counted=False)
        return handle

    def close(self) -> None:
        """Wait for the streams made here, then undo everything. What a lost device holds goes with the process.

        Raises DriverError for the first thing that cannot be undone on a working device, after all else was.
        """
        if not self._lifetime.end():
            return
        failures: list[KvtierError] = []
        for undo in self._undoings():
            try:
                undo()
            except (DriverError, DeviceLost) as error:
                failures.append(error)
        self._ledger.forget_all()
        if failures and not any(isinstance(error, DeviceLost) for error in failures):  # its users have been told
            raise failures[0]

    # ------------------------------------------------------------ inside

    def _undoings(self) -> Iterator[Callable[[], object]]:
        """What is to be undone, in order."""
        calls = self._calls
        yield partial(calls, "cuCtxSetCurrent", self._device.context)
        yield from self._streams.undoings()
        for address in self._registered:
            yield partial(calls, "cuMemHostUnregister", address)
        for addresses, offset_bytes, length_bytes in self._ledger.mappings():
            yield partial(calls, "cuMemUnmap", addresses.address + offset_bytes, length_bytes)
        for handle in self._ledger.owned():
            yield partial(calls, "cuMemRelease", handle.key)
        for addresses in self._ledger.ranges():
            yield partial(self._give_up, addresses)
        yield self._device.release

    def _give_up(self, addresses: Range) -> None:
        """Let the addresses go, which nothing is mapped at, with the last view of them."""
        free = partial(self._calls, "cuMemAddressFree", addresses.address, addresses.length_bytes)
        pages = self._pages.get(addresses)
        if pages is None:
            free()
        else:
            weakref.finalize(pages, free).atexit = False  # at the end they go with the process

    def _try_read_only(self) -> bool:
        granule_bytes = self._granule_bytes
        with ExitStack() as undo:
            addresses = self.reserve(granule_bytes)
            undo.callback(self.free_range, addresses)
            handle = self.create(granule_bytes)
            undo.callback(self.release, handle)
            self.map(addresses, 0, handle)
            undo.callback(self.unmap, addresses, 0, granule_bytes)
            return self._device.makes_read_only(addresses.address, granule_bytes)
