"""GpuTier: the top tier, whose slots the attention kernels read. With no device it lies in host memory.

Owns: a memory driver and the arena on it. Slot 0 is the null block: always there, zeroed, nobody's copy.
Always:  the array's address never changes, whatever `remap` does; the padding of a slot is zero.
Units:   slots (index), bytes.
"""

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator import host_memory
from kvtier.allocator.driver import MemoryDriver
from kvtier.allocator.driver_memfd import GRANULE_BYTES, MemfdDriver
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.allocator.vmm import Arena, Geometry
from kvtier.errors import ConfigError, DriverError, KvtierError, OutOfMemory
from kvtier.registry import suggestion
from kvtier.tiers.base import TierTraits
from kvtier.tiers.slots import SlotCopies
from kvtier.types import DONE, PAGE_BYTES, Outcome, ReadItem, Remap, Status, WriteBatch, page_aligned

DEVICES = ("auto", "host", "cuda")
SLOTS_MIN = 2  # the null block, and one to use
BATCH_BYTES = 4 << 20
GRANULES_MIN = 64  # rounding down to granules then loses less than 1/64 of the capacity


class GpuTier:
    """A `Tier` with `SupportsSlots`, `SupportsArray` and `SupportsRemap`."""

    def __init__(self, name: str, driver: MemoryDriver, arena: Arena) -> None:
        """Takes driver and arena over."""
        self.name = name
        self.stride_bytes = arena.geometry.stride_bytes
        self._driver = driver
        self._arena = arena
        self._slots = arena.slots_mapped  # counted once per change: `traits` is asked for every batch
        self._lifetime = Lifetime(f"tier {name}")
        self._bytes = memoryview(arena.array().reshape(-1))
        self._copies = SlotCopies(name, arena.array, BlockSlots(arena))

    @classmethod
    def create(
        cls, *, name: str, device: str, capacity_bytes: int, length_bytes_max: int, capacity_max_bytes: int = 0
    ) -> "GpuTier":
        """A tier of as many slots for blocks of up to `length_bytes_max` as the capacity holds, all mapped.

        device: ``auto`` or ``host``. capacity_max_bytes: how far `remap` may let it grow; at least the capacity.
        Raises ConfigError if fewer than two slots fit, the null block counted, or the machine has no such memory.
        """
        _expect_host(name, device)
        stride_bytes = page_aligned(length_bytes_max)
        granule_bytes = granule_for(capacity_bytes)
        mapped_bytes = capacity_bytes // granule_bytes * granule_bytes
        slots = mapped_bytes // stride_bytes
        if slots < SLOTS_MIN:
            raise ConfigError(
                f"{name}.capacity",
                f"{capacity_bytes} bytes hold {slots} slots of {stride_bytes}, and one is the null block",
                f"Use at least {capacity_min(stride_bytes)}",
            )
        available_bytes = host_memory.available_bytes()
        if mapped_bytes > available_bytes:
            raise ConfigError(
                f"{name}.capacity",
                f"{mapped_bytes} bytes exceed the {available_bytes} bytes of RAM that are available",
                "Choose a smaller capacity, or end what else uses the memory",
            )
        reserved_bytes = max(mapped_bytes, capacity_max_bytes // granule_bytes * granule_bytes)
        driver = MemfdDriver(reserved_bytes, granule_bytes)
        try:
            arena = Arena(driver, stride_bytes=stride_bytes, slots_reserved=reserved_bytes // stride_bytes)
            arena.grow(-(-slots * stride_bytes // granule_bytes) * granule_bytes)
        except KvtierError as error:
            driver.close()
            raise ConfigError(f"{name}.capacity", str(error), "Choose a smaller capacity") from error
        return cls(name, driver, arena)

    @property
    def traits(self) -> TierTraits:
        """`slots` counts the null block, and those without memory now; `capacity_bytes` counts neither."""
        return TierTraits(
            capacity_bytes=(self._slots - 1) * self.stride_bytes,
            slots=self._arena.geometry.slots,
            persistent=False,
            host_addressable=True,
            batch_bytes=BATCH_BYTES,
        )

    def array(self) -> NDArray[np.uint8]:
        """uint8 array [slots, stride_bytes] over all reserved slots, zero-copy; index mapped slots only."""
        array: NDArray[np.uint8] = self._arena.array()
        return array

    def slot(self, index: int) -> memoryview:
        """One whole slot, zero-copy. Raises IndexError if there is none such."""
        self._lifetime.expect()
        if not self._arena.is_mapped(index):
            raise IndexError(f"slot {index}, of {self._arena.geometry.slots}, has no memory")
        return self._bytes[index * self.stride_bytes : (index + 1) * self.stride_bytes]

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy blocks out; raises InvariantError for a place that holds no blocks."""
        return self._copies.read(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Copy blocks in, each to its place; raises InvariantError for a place that holds no blocks."""
        return self._copies.write(batch)

    @property
    def geometry(self) -> Geometry:
        return self._arena.geometry

    @property
    def granules_mapped(self) -> frozenset[int]:
        return self._arena.granules_mapped

    def remap(self, remap: Remap) -> Outcome:
        """Map and unmap granules; unmapped memory goes back to the machine. See `SupportsRemap`."""
        try:
            if len(remap.map) * self.geometry.granule_bytes > host_memory.available_bytes():
                raise OutOfMemory("the machine has no such memory left")  # it would kill somebody later
            self._arena.map(remap.map)
            self._arena.shrink(remap.unmap, remap.unused.__contains__)
        except OutOfMemory as error:
            return Outcome(Status.NO_ROOM, detail=str(error))
        except DriverError as error:
            return Outcome(Status.FAILED, detail=str(error))
        finally:
            self._slots = self._arena.slots_mapped
        if remap.unmap:
            self._arena.trim()
        return DONE

    def check(self) -> list[str]:
        """Recount the arena."""
        return self._arena.check()

    def close(self) -> None:
        """Unmap and give back everything. Idempotent. A view that somebody still holds reads as zeroes."""
        if not self._lifetime.end():
            return
        del self._bytes
        self._arena.close()
        self._driver.close()


class BlockSlots(Container[int]):
    """The slots of an arena that may hold a block at this moment: those with memory, but for the null block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __contains__(self, slot: object) -> bool:
        assert isinstance(slot, int)
        return slot != NULL_SLOT and self._arena.is_mapped(slot)


def granule_for(capacity_bytes: int) -> int:
    """The largest power of two that the capacity holds 64 times, between a page and the driver's default."""
    wanted_bytes = max(PAGE_BYTES, capacity_bytes // GRANULES_MIN)
    return min(GRANULE_BYTES, 1 << (wanted_bytes.bit_length() - 1))


def capacity_min(stride_bytes: int) -> int:
    """The smallest capacity that makes a tier: its slots, rounded up to granules of their own size class.

    Rounding up may reach the next larger granule, but only at a multiple of it.
    """
    need_bytes = SLOTS_MIN * stride_bytes
    granule_bytes = granule_for(need_bytes)
    return -(-need_bytes // granule_bytes) * granule_bytes


def _expect_host(name: str, device: str) -> None:
    if device == "cuda":
        raise ConfigError(f"{name}.device", "CUDA support is not in this version", "Use device: auto")
    if device not in DEVICES:
        raise ConfigError(f"{name}.device", f"unknown device {device!r}", suggestion(device, DEVICES))
