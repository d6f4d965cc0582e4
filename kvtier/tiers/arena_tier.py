"""ArenaTier: what a top tier is on any kind of memory: slots of constant stride on an arena that grows and shrinks.

Owns: a memory driver and the arena on it. Slot 0 is the null block: always there, zeroed, nobody's copy.
Always:  the slots' addresses never change, whatever `remap` does.
Units:   slots (index), bytes.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar, Protocol

from kvtier.allocator.driver import MemoryDriver
from kvtier.allocator.geometry import Geometry
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.allocator.vmm import Arena
from kvtier.errors import DriverError, OutOfMemory
from kvtier.tiers.base import TierTraits
from kvtier.types import DONE, Outcome, ReadItem, Remap, Status, WriteBatch

SLOTS_MIN = 2  # the null block, and one to use
BATCH_BYTES = 4 << 20


class Copies(Protocol):
    """Who moves the bytes of whole batches."""

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]: ...

    def write(self, batch: WriteBatch) -> list[Outcome]: ...


class ArenaTier:
    """A `Tier` with `SupportsArray` and `SupportsRemap`. Derived classes say which memory it is."""

    host_addressable: ClassVar[bool]

    def __init__(
        self, name: str, driver: MemoryDriver, arena: Arena, copies: Copies, free_bytes: Callable[[], int]
    ) -> None:
        """Takes driver and arena over. free_bytes: how much memory there is that nobody would miss."""
        self.name = name
        self.stride_bytes = arena.geometry.stride_bytes
        self._driver = driver
        self._arena = arena
        self._copies = copies
        self._free_bytes = free_bytes
        self._slots = arena.slots_mapped  # counted once per change: `traits` is asked for every batch
        self._lifetime = Lifetime(f"tier {name}")

    @property
    def traits(self) -> TierTraits:
        """`slots` counts the null block, and those without memory now; `capacity_bytes` counts neither."""
        return TierTraits(
            capacity_bytes=(self._slots - 1) * self.stride_bytes,
            slots=self._arena.geometry.slots,
            persistent=False,
            host_addressable=self.host_addressable,
            batch_bytes=BATCH_BYTES,
        )

    def array(self) -> Any:
        """uint8 array [slots, stride_bytes] over all reserved slots, zero-copy; index mapped slots only."""
        return self._arena.array()

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy blocks out; raises InvariantError for a place that holds no blocks, DeviceLost with the device."""
        return self._copies.read(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Copy blocks in, each to its place; raises as `read` does."""
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
            if len(remap.map) * self.geometry.granule_bytes > self._free_bytes():
                raise OutOfMemory("there is no such memory left")
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
        """Unmap and give back everything. Idempotent. A view that somebody still holds never shows another's memory."""
        if not self._lifetime.end():
            return
        self._let_go()
        self._arena.close()
        self._driver.close()

    def _let_go(self) -> None:
        """What a derived class holds of the memory."""


class BlockSlots(Container[int]):
    """The slots of an arena that may hold a block at this moment: those with memory, but for the null block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __contains__(self, slot: object) -> bool:
        assert isinstance(slot, int)
        return slot != NULL_SLOT and self._arena.is_mapped(slot)
