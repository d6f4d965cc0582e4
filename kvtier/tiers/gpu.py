"""GpuTier: the top tier on host memory, for machines without a device and for tests.

Owns: a memfd driver and the arena on it. Always: the padding of a slot is zero. Units: slots (index), bytes.
"""

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator import host_memory
from kvtier.allocator.driver import MemoryDriver
from kvtier.allocator.driver_memfd import GRANULE_BYTES, MemfdDriver
from kvtier.allocator.vmm import Arena
from kvtier.errors import ConfigError, KvtierError
from kvtier.tiers.arena_tier import (
    SLOTS_MIN,
    ArenaTier,
    BlockSlots,
    expect_slots,
    expect_whole_granules,
    map_what_there_is,
)
from kvtier.tiers.slots import SlotCopies
from kvtier.types import PAGE_BYTES, page_aligned

GRANULES_MIN = 64  # rounding down to granules then loses less than 1/64 of the capacity


class GpuTier(ArenaTier):
    """An `ArenaTier` whose slots the CPU reads, too: a `Tier` with `SupportsSlots` as well."""

    host_addressable = True

    def __init__(self, name: str, driver: MemoryDriver, arena: Arena, notes: tuple[str, ...] = ()) -> None:
        """Takes driver and arena over."""
        copies = SlotCopies(name, arena.array, BlockSlots(arena))
        super().__init__(name, driver, arena, copies, lambda: host_memory.available_bytes(), notes)
        self._bytes = memoryview(arena.array().reshape(-1))

    @classmethod
    def create(
        cls,
        *,
        name: str,
        capacity_bytes: int,
        length_bytes_max: int,
        capacity_max_bytes: int = 0,
        sequence_views: bool = False,
    ) -> "GpuTier":
        """A tier of as many slots for blocks of up to `length_bytes_max` as the capacity holds, all mapped.

        capacity_max_bytes: how far `remap` may let it grow; at least the capacity. sequence_views: a slot is a granule,
        so that slots can be shown one behind the other. Where the system gives the process less memory the tier is
        smaller, and says so. Raises ConfigError if fewer than two slots fit, the null block counted, the machine has no
        such memory, or blocks are no whole pages and are to be shown.
        """
        stride_bytes = page_aligned(length_bytes_max)
        if sequence_views:
            expect_whole_granules(name, length_bytes_max, PAGE_BYTES)
        granule_bytes = stride_bytes if sequence_views else granule_for(capacity_bytes)
        mapped_bytes = capacity_bytes // granule_bytes * granule_bytes
        slots = mapped_bytes // stride_bytes
        least_bytes = SLOTS_MIN * stride_bytes if sequence_views else capacity_min(stride_bytes)
        expect_slots(name, slots, f"{capacity_bytes} bytes", stride_bytes, f"Use at least {least_bytes}")
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
            notes = map_what_there_is(arena, name, slots, "End what else uses the memory")
        except ConfigError:
            driver.close()
            raise
        except KvtierError as error:
            driver.close()
            raise ConfigError(f"{name}.capacity", str(error), "Choose a smaller capacity") from error
        tier = cls(name, driver, arena, notes)
        if sequence_views:  # half: what else a process maps must not fail for it
            tier.allow_sequences(host_memory.mappings_max() // 2)
        return tier

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

    def _let_go(self) -> None:
        del self._bytes


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
