"""What a memory driver is: address ranges that stay, and physical memory that comes and goes behind them.

The verbs are those of CUDA's virtual memory management, and mean the same with every driver; code above never asks
which one it has. One caller at a time.

    what       made by   undone by    depends on
    Range      reserve   free_range   nothing may be mapped in it
    Handle     create    release      nothing: the memory lives on until its last mapping is gone
    a mapping  map       unmap        its range and its handle

Always: each verb happens wholly or not at all. Mapped memory is accessible only after `set_access`. What lies in
new memory is undefined. Offsets and lengths are whole granules. Misuse raises DriverError, as a device would.
Units:  bytes.
"""

from dataclasses import dataclass
from typing import Any, Protocol


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


class MemoryDriver(Protocol):
    """The verbs every driver has. After a fork, or once closed, all but `close` raise ClosedError."""

    @property
    def granule_bytes(self) -> int:
        """Every length and offset is a multiple of this."""
        ...

    @property
    def used_bytes(self) -> int:
        """Physical memory that exists: handles not released, and released ones that are still mapped."""
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

    def unmap(self, addresses: Range, offset_bytes: int, length_bytes: int) -> None:
        """Take mappings away: whole ones only, without gaps. Nobody may be using them."""
        ...

    def view(self, addresses: Range) -> Any:
        """uint8 array [length_bytes] over the whole range, zero-copy; only accessible memory may be indexed.

        A view that outlives its range never sees memory of somebody else's.
        """
        ...

    def close(self) -> None:
        """Undo everything that is left. Idempotent; does nothing in a forked child."""
        ...
