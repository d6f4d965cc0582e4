"""Ledger: what a memory driver has made, and the rules that its calls keep.

Owns: for each range what is mapped where, for each handle how often it is mapped, and the bytes in use. Moves nothing:
a driver asks whether it may, does it, and says so.
Always:  a handle that is neither owned nor mapped is forgotten at once; used_bytes is the sum of the others that were
         created here.
Units:   bytes; offsets within a range, which are whole granules.

Asking raises DriverError with an errno, so that misuse changes nothing with any driver.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.allocator.driver import Handle, Range
from kvtier.allocator.lifetime import Lifetime
from kvtier.errors import DriverError, OutOfMemory


@dataclass(slots=True)
class _Physical:
    is_counted: bool
    mappings: int = 0
    is_released: bool = False


@dataclass(slots=True)
class _Reservation:
    mapped: dict[int, tuple[Handle, int]] = field(default_factory=dict)  # by granule: handle, offset of its start


class Ledger:
    """The books of one driver; `lifetime` is the driver's."""

    def __init__(self, granule_bytes: int, lifetime: Lifetime) -> None:
        self.granule_bytes = granule_bytes
        self.used_bytes = 0
        self._lifetime = lifetime
        self._ranges: dict[Range, _Reservation] = {}
        self._handles: dict[Handle, _Physical] = {}

    # ------------------------------------------------------------ asking

    def expect_granules(self, call: str, length_bytes: int) -> None:
        """Whole granules, and at least one."""
        self._lifetime.expect()
        if length_bytes <= 0 or length_bytes % self.granule_bytes:
            raise DriverError(
                call, errno.EINVAL, f"{length_bytes} bytes are not whole granules of {self.granule_bytes}"
            )

    def expect_capacity(self, length_bytes: int, capacity_bytes: int) -> None:
        """So much more within the capacity. Raises OutOfMemory."""
        if self.used_bytes + length_bytes > capacity_bytes:
            raise OutOfMemory(
                f"create: {length_bytes} bytes do not fit, {self.used_bytes} of {capacity_bytes} are used"
            )

    def expect_range(self, call: str, addresses: Range) -> None:
        """A range of this driver."""
        self._mapped(call, addresses)

    def expect_empty(self, addresses: Range) -> None:
        """A range in which nothing is mapped."""
        if self._mapped("free_range", addresses):
            raise DriverError("free_range", errno.EBUSY, "memory is mapped in the range")

    def expect_handle(self, call: str, handle: Handle) -> None:
        """A handle of this driver that was not given up."""
        self._lifetime.expect()
        physical = self._handles.get(handle)
        if physical is None or physical.is_released:
            raise DriverError(call, errno.EINVAL, "not a handle of this driver, or released")

    def expect_room(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        """A place in the range where the handle can be mapped."""
        mapped = self._mapped("map", addresses)
        self.expect_handle("map", handle)
        if any(granule in mapped for granule in self._granules("map", addresses, offset_bytes, handle.length_bytes)):
            raise DriverError("map", errno.EEXIST, f"memory is mapped at offset {offset_bytes} already")

    def expect_mapped(self, call: str, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Memory everywhere in this part of the range."""
        mapped = self._mapped(call, addresses)
        if any(g not in mapped for g in self._granules(call, addresses, offset_bytes, length_bytes)):
            raise DriverError(call, errno.EINVAL, f"not all is mapped from offset {offset_bytes} on")

    def expect_stretch(self, call: str, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Memory under every byte of this stretch, which need not be whole granules."""
        start = offset_bytes // self.granule_bytes * self.granule_bytes
        stop = -(-(offset_bytes + length_bytes) // self.granule_bytes) * self.granule_bytes
        self.expect_mapped(call, addresses, start, stop - start)

    def expect_whole_mappings(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Mappings that fill this part of the range exactly."""
        self._granules("unmap", addresses, offset_bytes, length_bytes)
        for _ in self._whole_mappings(addresses, offset_bytes, length_bytes):
            pass

    def mappings(self) -> list[tuple[Range, int, int]]:
        """(range, offset, length) of every mapping."""
        found = {}
        for addresses, reservation in self._ranges.items():
            for handle, start in reservation.mapped.values():
                found[addresses, start] = (addresses, start, handle.length_bytes)
        return list(found.values())

    def owned(self) -> list[Handle]:
        """The handles that were not given up."""
        return [handle for handle, physical in self._handles.items() if not physical.is_released]

    def ranges(self) -> list[Range]:
        return list(self._ranges)

    # ------------------------------------------------------------ saying what was done

    def reserved(self, addresses: Range) -> None:
        self._ranges[addresses] = _Reservation()

    def freed(self, addresses: Range) -> None:
        del self._ranges[addresses]

    def created(self, handle: Handle, *, counted: bool = True) -> None:
        """`counted`: its memory is this driver's, not one that another process shares."""
        self._handles[handle] = _Physical(counted)
        self.used_bytes += handle.length_bytes if counted else 0

    def released(self, handle: Handle) -> list[Handle]:
        """Returns the handle if its memory goes back now."""
        self._handles[handle].is_released = True
        return self._collect([handle])

    def mapped(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        granules = range(offset_bytes, offset_bytes + handle.length_bytes, self.granule_bytes)
        self._ranges[addresses].mapped.update((granule, (handle, offset_bytes)) for granule in granules)
        self._handles[handle].mappings += 1

    def unmapped(self, addresses: Range, offset_bytes: int, length_bytes: int) -> list[Handle]:
        """Returns the handles whose memory goes back now."""
        handles = list(self._whole_mappings(addresses, offset_bytes, length_bytes))
        mapped = self._ranges[addresses].mapped
        for granule in range(offset_bytes, offset_bytes + length_bytes, self.granule_bytes):
            del mapped[granule]
        for handle in handles:
            self._handles[handle].mappings -= 1
        return self._collect(handles)

    def forget_all(self) -> None:
        """The driver has ended, and everything with it."""
        self._ranges.clear()
        self._handles.clear()
        self.used_bytes = 0

    # ------------------------------------------------------------ inside

    def _collect(self, handles: list[Handle]) -> list[Handle]:
        gone = []
        for handle in dict.fromkeys(handles):
            physical = self._handles[handle]
            if physical.is_released and physical.mappings == 0:
                del self._handles[handle]
                self.used_bytes -= handle.length_bytes if physical.is_counted else 0
                gone.append(handle)
        return gone

    def _mapped(self, call: str, addresses: Range) -> dict[int, tuple[Handle, int]]:
        self._lifetime.expect()
        reservation = self._ranges.get(addresses)
        if reservation is None:
            raise DriverError(call, errno.EINVAL, "not a range of this driver, or freed")
        return reservation.mapped

    def _whole_mappings(self, addresses: Range, start: int, length_bytes: int) -> Iterator[Handle]:
        """The handles that fill [start, start + length) exactly."""
        mapped, stop = self._mapped("unmap", addresses), start + length_bytes
        while start < stop:
            handle, handle_start = mapped.get(start, (None, start))
            if handle is None or handle_start != start or start + handle.length_bytes > stop:
                raise DriverError("unmap", errno.EINVAL, f"no whole mapping at offset {start}")
            yield handle
            start += handle.length_bytes

    def _granules(self, call: str, addresses: Range, offset_bytes: int, length_bytes: int) -> range:
        """The offsets of the granules in [offset, offset + length), which must lie within the range."""
        self.expect_granules(call, length_bytes)
        if offset_bytes < 0 or offset_bytes % self.granule_bytes:
            raise DriverError(call, errno.EINVAL, f"offset {offset_bytes} is not at a granule")
        if offset_bytes + length_bytes > addresses.length_bytes:
            raise DriverError(call, errno.EINVAL, f"{length_bytes} bytes at {offset_bytes} exceed the range")
        return range(offset_bytes, offset_bytes + length_bytes, self.granule_bytes)
