"""What a memory driver is: address ranges that stay, and physical memory that comes and goes behind them.

The verbs are those of CUDA's virtual memory management, and mean the same with every driver; code above never asks
which one it has. One caller at a time.

    what         made by          undone by    depends on
    Range        reserve          free_range   nothing may be mapped in it
    Handle       create, import   release      nothing: the memory lives on until its last mapping is gone
    a mapping    map              unmap        its range and its handle
    pinned host  register         unregister   nothing may be copying from or to it

Always: each verb happens wholly or not at all. Mapped memory is accessible only after `set_access`. What lies in
new memory is undefined. Offsets and lengths are whole granules, but for `zero`. Misuse raises DriverError, as a device
would. A device that fails for good raises DeviceLost from then on.
Units:  bytes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvtier.allocator.streams import Streams


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """A reservation of addresses; it costs no memory and never moves."""

    address: int
    length_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Physical memory. `key` is the driver's own name for it. A handle is always mapped as a whole."""

    key: int
    length_bytes: int


class MemoryInfo(NamedTuple):
    """What the device has, whoever uses it."""

    free_bytes: int
    total_bytes: int


class MemoryDriver(Protocol):
    """The verbs every driver has. After a fork, or once closed, all but `close` raise ClosedError."""

    @property
    def granule_bytes(self) -> int:
        """Every length and offset is a multiple of this."""
        ...

    @property
    def used_bytes(self) -> int:
        """Physical memory that was created here and exists: handles not released, or released and still mapped."""
        ...

    @property
    def has_read_only(self) -> bool:
        """Whether `set_access` without `write` keeps writers out. If not, it grants both. Tried out once."""
        ...

    def memory_info(self) -> MemoryInfo:
        """What is left, asked now. Others may take it the next moment."""
        ...

    def reserve(self, range_bytes: int) -> Range:
        """Set addresses aside, aligned to a granule. The caller owns the range."""
        ...

    def free_range(self, addresses: Range) -> None:
        """Give the addresses back. Raises DriverError while something is mapped there."""
        ...

    def create(self, length_bytes: int) -> Handle:
        """Take physical memory. Raises OutOfMemory if the capacity is used up. The caller owns the handle."""
        ...

    def release(self, handle: Handle) -> None:
        """Give the handle up. Its memory goes back now, or with the last mapping."""
        ...

    def map(self, addresses: Range, offset_bytes: int, handle: Handle) -> None:
        """Put the memory at an offset where nothing is mapped. A handle may be mapped at several places."""
        ...

    def set_access(self, addresses: Range, offset_bytes: int, length_bytes: int, *, write: bool) -> None:
        """Make mapped memory readable, and writable too if `write`; wait until using it costs no page fault."""
        ...

    def zero(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Fill any stretch of writable memory with zeroes. They are there when it returns."""
        ...

    def unmap(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Take mappings away: whole ones only, without gaps. Nobody may be using them."""
        ...

    def view(self, addresses: Range) -> Any:
        """uint8 array [length_bytes] over the whole range, zero-copy; only accessible memory may be indexed.

        A view that outlives its range never sees memory of somebody else's.
        """
        ...

    def has_views(self, addresses: Range) -> bool:
        """Whether a view of the range, or anything made of one, is still alive: it would see what is mapped next."""
        ...

    def close(self) -> None:
        """Undo everything that is left. Idempotent; does nothing in a forked child."""
        ...


class SupportsStreams(Protocol):
    """A driver whose memory can be copied from and to."""

    @property
    def streams(self) -> Streams:
        """Copies and their order. They end with the driver."""
        ...


class SupportsPinning(Protocol):
    """A driver whose device reads host memory directly, once it is registered."""

    def register(self, address: int, length_bytes: int) -> None:
        """Pin host memory that exists. Raises DriverError if part of it is registered already."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`. No copy may be using the memory."""
        ...


class SupportsSharing(Protocol):
    """A driver whose handles other processes may map."""

    def export_handle(self, handle: Handle) -> int:
        """A file descriptor for the memory, to be passed on (SCM_RIGHTS). The caller closes it."""
        ...

    def import_handle(self, fd: int, length_bytes: int) -> Handle:
        """Another process's memory. The descriptor stays the caller's; the memory isn't counted in `used_bytes`."""
        ...
