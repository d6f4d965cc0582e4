"""HostSlab: the host tier's memory, taken once at start.

Owns: one memfd, whose descriptor can be passed to other processes, and the mapping of it in this one.
Always:  slots are page aligned and zeroed at first; every page is present before the first block comes, so that no
         page fault happens while one is moved; nothing grows or shrinks (a view behind a cut file gets SIGBUS).
Units:   slots (index), bytes.

The memory goes back when the last view of it dies, and the last process that was given the descriptor closes it.
"""

import logging
import mmap
import os
import resource

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator import host_memory
from kvtier.allocator.lifetime import Lifetime
from kvtier.errors import ConfigError, DriverError
from kvtier.notices import say_once
from kvtier.types import PAGE_BYTES

HUGE_PAGE_BYTES = 2 << 20
CHOICES = ("auto", "on", "off")

_log = logging.getLogger(__name__)


class HostSlab:
    """`slots` slots of `stride_bytes`, one mapping. `notes` says in sentences what ``auto`` came to."""

    def __init__(self, *, name: str, slots: int, stride_bytes: int, pin: str = "auto", hugepages: str = "auto") -> None:
        """Take the memory, all of it now.

        pin: ``on`` locks it into RAM; ``auto`` does what the device needs, on the host nothing. hugepages: ``on``
        takes it from the reserved huge pages, ``auto`` tries to. Raises ConfigError with numbers and a remedy if
        that cannot be had, or if the stride is not whole pages.
        """
        _expect_choice(f"{name}.pin", pin)
        _expect_choice(f"{name}.hugepages", hugepages)
        if stride_bytes % PAGE_BYTES or stride_bytes <= 0:
            raise ConfigError(name, f"a slot of {stride_bytes} bytes", f"Use a multiple of {PAGE_BYTES}")
        self.name = name
        self.slots = slots
        self.stride_bytes = stride_bytes
        self.notes: list[str] = []
        self._lifetime = Lifetime(f"the slab of tier {name}")
        length_bytes = slots * stride_bytes
        available_bytes = host_memory.available_bytes()
        if length_bytes > available_bytes and hugepages != "on":
            raise ConfigError(
                f"{name}.capacity",
                f"{length_bytes} bytes exceed the {available_bytes} bytes of RAM that are available",
                "Choose a smaller capacity, or end what else uses the memory",
            )
        self._fd, self._mapping = self._take(length_bytes, hugepages)
        try:
            self._array = np.frombuffer(self._mapping, np.uint8, length_bytes).reshape(slots, stride_bytes)
            self._bytes = memoryview(self._mapping)
            self._settle(pin)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The memfd, for passing to another process; it stays the slab's."""
        self._lifetime.expect()
        return self._fd

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8 array [slots, stride_bytes], writable, zero-copy."""
        self._lifetime.expect()
        return self._array

    def slot(self, index: int) -> memoryview:
        """One whole slot, writable, zero-copy. Raises IndexError if there is none such."""
        self._lifetime.expect()
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self._bytes[index * self.stride_bytes : (index + 1) * self.stride_bytes]

    def close(self) -> None:
        """Let go of the memory. Idempotent; views that somebody still holds stay valid."""
        if not self._lifetime.end():
            return
        os.close(self._fd)
        # No mapping.close(): it fails while views live, whereas letting go of the last reference never does.
        for attribute in ("_array", "_bytes", "_mapping"):
            self.__dict__.pop(attribute, None)

    def _take(self, length_bytes: int, hugepages: str) -> tuple[int, mmap.mmap]:
        if hugepages != "off":
            try:
                return _map_new(length_bytes, os.MFD_HUGETLB, HUGE_PAGE_BYTES)
            except (OSError, DriverError) as error:
                need = -(-length_bytes // HUGE_PAGE_BYTES)
                problem = f"{need} huge pages of {HUGE_PAGE_BYTES} bytes cannot be had ({error})"
                if hugepages == "on":
                    remedy = f"Set vm.nr_hugepages to at least {need}, or use hugepages: auto"
                    raise ConfigError(f"{self.name}.hugepages", problem, remedy) from None
                self.notes.append(f"hugepages: {problem}; ordinary pages serve instead")
                say_once(_log, f"tier {self.name}", "hugepages", self.notes[-1])
        return _map_new(length_bytes, 0, PAGE_BYTES)

    def _settle(self, pin: str) -> None:
        """Bring every page into memory and, if asked, keep it there."""
        address = self._array.ctypes.data
        length_bytes = len(self._mapping)
        host_memory.advise_huge(address, length_bytes)
        try:
            host_memory.populate(address, length_bytes)
            host_memory.allocate(self._fd, 0, length_bytes)  # at once if populated; an old kernel can only this
        except DriverError as error:
            raise ConfigError(f"{self.name}.capacity", str(error), "Choose a smaller capacity") from None
        if pin == "on":
            self._lock(address, length_bytes)
        elif pin == "auto":
            self.notes.append("pin: no device that the memory would have to be registered with")

    def _lock(self, address: int, length_bytes: int) -> None:
        try:
            host_memory.lock(address, length_bytes)
        except DriverError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
            raise ConfigError(
                f"{self.name}.pin",
                f"{length_bytes} bytes cannot be locked ({error}); the limit is {allowed}",
                f"Raise it (ulimit -l {-(-length_bytes // 1024)}, or LimitMEMLOCK), or use pin: auto",
            ) from None


def _map_new(length_bytes: int, flags: int, page_bytes: int) -> tuple[int, mmap.mmap]:
    """A new memfd of whole pages and its mapping; only huge pages are present yet."""
    whole_bytes = -(-length_bytes // page_bytes) * page_bytes
    fd = os.memfd_create("kvtier-host", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, whole_bytes)
        mapping = mmap.mmap(fd, whole_bytes, flags=mmap.MAP_SHARED)
        if flags & os.MFD_HUGETLB:  # a control group may refuse what the kernel has reserved: learn it here
            host_memory.allocate(fd, 0, whole_bytes)
        return fd, mapping
    except BaseException:
        os.close(fd)
        raise


def _expect_choice(path: str, value: str) -> None:
    if value not in CHOICES:
        raise ConfigError(path, f"unknown choice {value!r}", f"Use one of {', '.join(CHOICES)}")
