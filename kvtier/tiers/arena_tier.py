"""ArenaTier: what a top tier is on any kind of memory: slots of constant stride on an arena that grows and shrinks.

Owns: a memory driver and the arena on it. Slot 0 is the null block: always there, zeroed, nobody's copy.
Always:  the slots' addresses never change, whatever `remap` does.
Units:   slots (index), bytes.
"""

import logging
import threading
from collections.abc import Callable, Container, Sequence
from math import gcd
from typing import Any, ClassVar, Protocol

from kvtier.allocator.driver import MemoryDriver
from kvtier.allocator.geometry import Geometry
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.sequence_ranges import SequenceRanges
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.allocator.vmm import Arena
from kvtier.errors import ConfigError, DriverError, OutOfMemory
from kvtier.notices import say_once
from kvtier.tiers.base import TierTraits
from kvtier.tiers.sequences import Sequences
from kvtier.types import Outcome, ReadItem, Remap, Status, WriteBatch

log = logging.getLogger("kvtier")

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
        self,
        name: str,
        driver: MemoryDriver,
        arena: Arena,
        copies: Copies,
        free_bytes: Callable[[], int],
        notes: tuple[str, ...] = (),
    ) -> None:
        """Takes driver and arena over.

        free_bytes: how much memory there is that nobody would miss. notes: what could be had only in part.
        """
        self.name = name
        self.stride_bytes = arena.geometry.stride_bytes
        self._driver = driver
        self._arena = arena
        self._copies = copies
        self._free_bytes = free_bytes
        self.notes = notes
        self._slots = arena.slots_mapped  # counted once per change: `traits` is asked for every batch
        self._lifetime = Lifetime(f"tier {name}")
        self._changing = threading.Lock()  # held by who maps or unmaps
        self.sequences: Sequences | None = None

    @property
    def traits(self) -> TierTraits:
        """`slots` counts the null block, and those without memory now; `capacity_bytes` counts neither."""
        return TierTraits(
            capacity_bytes=max(0, self._slots - 1) * self.stride_bytes,
            slots=self._arena.geometry.slots,
            persistent=False,
            host_addressable=self.host_addressable,
            batch_bytes=BATCH_BYTES,
        )

    def array(self) -> Any:
        """uint8 array [slots, stride_bytes] over all reserved slots, zero-copy; index mapped slots only."""
        return self._arena.array()

    def allow_sequences(self, blocks_max: int | None) -> None:
        """From now on slots can be shown one behind the other (`sequences`), so many at a time; None: any number.

        Once. The arena's granules divide a slot.
        """
        ranges = SequenceRanges(self._driver, self._arena, blocks_max)
        self.sequences = Sequences(self.name, ranges, self._changing, self._bind_thread)

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
        """Map, unmap and make granules. See `SupportsRemap`."""
        with self._changing:
            return self._remap(remap)

    def check(self) -> list[str]:
        """Recount the arena, and what is shown of it."""
        return [*self._arena.check(), *(self.sequences.check() if self.sequences else ())]

    def close(self) -> None:
        """Unmap and give back everything. Idempotent. A view that somebody still holds never shows another's memory."""
        if not self._lifetime.end():
            return
        self._let_go()
        if self.sequences is not None:
            self.sequences.close()
        self._arena.close()
        self._driver.close()

    def _let_go(self) -> None:
        """What a derived class holds of the memory."""

    def _remap(self, remap: Remap) -> Outcome:
        leaving = range(self.geometry.slots) if remap.sleep else remap.unused
        if self.sequences is not None and any(map(self.sequences.shows, leaving)):
            return Outcome(Status.FAILED, detail="a sequence view shows slots that were to go")
        try:
            if remap.sleep:
                self._arena.sleep()
            if remap.map:
                self._map(remap.map)
            if remap.unmap:
                self._arena.shrink(remap.unmap, remap.unused.__contains__)
        except OutOfMemory as error:
            self._tell_of_shortage()
            return self._ended(Status.NO_ROOM, error)
        except DriverError as error:
            return self._ended(Status.FAILED, error)
        finally:
            self._slots = self._arena.slots_mapped
        return self._make_ready(remap.ready)

    def _map(self, granules: tuple[int, ...]) -> None:
        self._expect_free(len(granules) - self._arena.granules_idle)
        if self._arena.is_asleep:
            self._arena.wake(granules)
        else:
            self._arena.map(granules)

    def _expect_free(self, granules: int) -> None:
        if granules > 0 and granules * self.geometry.granule_bytes > self._free_bytes():
            raise OutOfMemory("there is no such memory left")

    def _make_ready(self, granules: int) -> Outcome:
        """Hold so much memory and no more, or what there is of it. What is mapped by then stays, whatever happens."""
        there = self._arena.granules_idle
        try:
            if granules > there:
                self._arena.fill(min(granules, there + self._free_bytes() // self.geometry.granule_bytes))
            self._arena.trim(granules)
        except DriverError as error:
            return self._ended(Status.DONE, error)
        if self._arena.granules_idle < granules:
            self._tell_of_shortage()
        return self._ended(Status.DONE)

    def _ended(self, status: Status, error: Exception | None = None) -> Outcome:
        return Outcome(status, self._arena.granules_idle, detail="" if error is None else str(error))

    def _tell_of_shortage(self) -> None:
        say_once(log, f"tier {self.name}", "memory", "there is less memory left than it was to have: it stays smaller")

    def _bind_thread(self) -> None:
        """What a thread has to do before it calls the driver."""


def expect_whole_granules(name: str, block_bytes: int, granule_bytes: int) -> None:
    """Raises ConfigError for blocks that cannot be mapped one behind the other."""
    if block_bytes % granule_bytes:
        times = granule_bytes // gcd(block_bytes, granule_bytes)
        problem = f"a block of {block_bytes} bytes is not whole granules of {granule_bytes}, which memory is mapped in"
        remedy = f"Use {times} times the block_tokens (blocks of {times * block_bytes} bytes), or leave it out"
        raise ConfigError(f"{name}.sequence_views", problem, remedy)


class BlockSlots(Container[int]):
    """The slots of an arena that may hold a block at this moment: those with memory, but for the null block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __contains__(self, slot: object) -> bool:
        assert isinstance(slot, int)
        return slot != NULL_SLOT and self._arena.is_mapped(slot)


def map_what_there_is(arena: Arena, name: str, slots: int, remedy: str) -> tuple[str, ...]:
    """Map so many slots, or as many as there is memory for: then that is said, and returned as a note.

    Raises ConfigError with this remedy if not even two slots fit.
    """
    geometry = arena.geometry
    wanted = Geometry(geometry.granule_bytes, geometry.stride_bytes, slots).granules
    found = arena.fill(wanted)
    while True:
        found_bytes = found * geometry.granule_bytes
        memory = f"the {found_bytes} bytes left"
        expect_slots(name, len(geometry.slots_within(range(found))), memory, geometry.stride_bytes, remedy)
        try:
            arena.grow(found_bytes)
        except OutOfMemory:
            found //= 2  # mapping takes memory, too
        else:
            break
    arena.trim()
    if found == wanted:
        return ()
    note = f"capacity: there are {found_bytes} bytes left for it, of {wanted * geometry.granule_bytes}"
    say_once(log, f"tier {name}", "capacity", note)
    return (note,)


def expect_slots(name: str, slots: int, memory: str, stride_bytes: int, remedy: str) -> None:
    """Raises ConfigError if that is no tier: it needs the null block, and one to use."""
    if slots < SLOTS_MIN:
        problem = f"{memory} hold {slots} slots of {stride_bytes}, and one is the null block"
        raise ConfigError(f"{name}.capacity", problem, remedy)
