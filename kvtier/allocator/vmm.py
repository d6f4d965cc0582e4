"""Arena: the slots of the top tier on one address range whose memory comes and goes.

Owns: a range for the most slots there may ever be, and physical handles of one granule each: mapped ones, and a
pool of idle ones. Does not know which slots are free; whoever shrinks says so.
Always:  no pointer changes while the arena lives; a slot may be used exactly when all its granules are mapped;
         slot 0 is the null block, mapped from the first `grow` on; newly mapped memory is zeroed; every change
         happens wholly or not at all.
Units:   granules and slots (index), bytes.

    granules   |    0    |    1    |    2    |     slots may straddle granules: here granule 1 may go only
    slots      |  0  |  1  |  2  |  3  |  4  |     when slots 1, 2 and 3 are all free

    what                    undone by                         depends on
    range                   driver.free_range, in `close`     nothing mapped in it
    handle, mapped or idle  driver.release, in trim, close    its mapping
    mapping                 driver.unmap, in shrink, close    range and handle; nobody reads its slots

Creating, mapping and unmapping cost 10 to 400 us per granule and belong into no hot path.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvtier.allocator.driver import Handle, MemoryDriver
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where slots lie on granules: arithmetic only. Ranges are half open."""

    granule_bytes: int
    stride_bytes: int
    slots: int

    @property
    def granules(self) -> int:
        """Granules that all slots together need."""
        return -(-self.slots * self.stride_bytes // self.granule_bytes)

    def granules_of(self, slot: int) -> range:
        """The granules that a slot touches."""
        start, stop = slot * self.stride_bytes, (slot + 1) * self.stride_bytes
        return range(start // self.granule_bytes, -(-stop // self.granule_bytes))

    def slots_touching(self, granules: range) -> range:
        """The slots of which at least one byte lies in these granules."""
        start, stop = granules.start * self.granule_bytes, granules.stop * self.granule_bytes
        return range(start // self.stride_bytes, min(self.slots, -(-stop // self.stride_bytes)))

    def slots_within(self, granules: range) -> range:
        """The slots that lie in these granules with all their bytes."""
        start, stop = granules.start * self.granule_bytes, granules.stop * self.granule_bytes
        first = -(-start // self.stride_bytes)
        return range(first, max(first, min(self.slots, stop // self.stride_bytes)))

    def slots_whole(self, granules: Iterable[int]) -> list[range]:
        """The slots that lie in these granules, in any order, with all their bytes; ascending."""
        return [self.slots_within(run) for run in runs(sorted(granules))]


class Arena:
    """`slots_reserved` slots of constant stride, of which as many are mapped as `grow` and `shrink` say."""

    def __init__(self, driver: MemoryDriver, *, stride_bytes: int, slots_reserved: int) -> None:
        """Reserve the range; nothing is mapped yet. The driver stays the caller's."""
        self.geometry = Geometry(driver.granule_bytes, stride_bytes, slots_reserved)
        self._driver = driver
        self._mapped: dict[int, Handle] = {}  # by granule
        self._idle: list[Handle] = []
        self._range = driver.reserve(self.geometry.granules * driver.granule_bytes)
        self._lifetime = Lifetime("the arena")

    @property
    def slots_mapped(self) -> int:
        """Slots that may be used, the null block counted."""
        return sum(map(len, self.geometry.slots_whole(self._mapped)))

    @property
    def granules_mapped(self) -> frozenset[int]:
        """The granules that have memory now."""
        return frozenset(self._mapped)

    @property
    def mapped_bytes(self) -> int:
        return len(self._mapped) * self.geometry.granule_bytes

    def is_mapped(self, slot: int) -> bool:
        """Whether the slot may be used."""
        return 0 <= slot < self.geometry.slots and all(g in self._mapped for g in self.geometry.granules_of(slot))

    def array(self) -> Any:
        """uint8 array [slots_reserved, stride_bytes], zero-copy. Only mapped slots may be indexed."""
        self._lifetime.expect()
        slots, stride_bytes = self.geometry.slots, self.geometry.stride_bytes
        return self._driver.view(self._range)[: slots * stride_bytes].reshape(slots, stride_bytes)

    def grow(self, length_bytes: int) -> list[int]:
        """Map at least so many bytes more, and the null block; lowest addresses first.

        Returns the slots won, zeroed. Raises as `map` does, or InvariantError if the range has no such room; then
        nothing changed.
        """
        self._lifetime.expect()
        missing = [granule for granule in range(self.geometry.granules) if granule not in self._mapped]
        null_block = [granule for granule in self.geometry.granules_of(NULL_SLOT) if granule not in self._mapped]
        count = max(len(null_block), -(-length_bytes // self.geometry.granule_bytes))
        if length_bytes < 0 or count > len(missing):
            raise InvariantError(f"arena: cannot map {length_bytes} bytes, {len(missing)} granules are left")
        return self.map(missing[:count])

    def map(self, granules: Iterable[int]) -> list[int]:
        """Map these granules, with idle memory first. Returns the slots won, zeroed.

        Raises OutOfMemory or DriverError, or InvariantError if one is mapped already or not of the range; then nothing
        changed.
        """
        self._lifetime.expect()
        arriving = sorted(granules)
        if len(set(arriving)) != len(arriving) or any(
            granule in self._mapped or not 0 <= granule < self.geometry.granules for granule in arriving
        ):
            raise InvariantError(f"arena: granules {arriving} cannot all be mapped")
        with ExitStack() as undo:
            handles = self._idle[: len(arriving)]
            for _ in range(len(arriving) - len(handles)):
                handles.append(self._driver.create(self.geometry.granule_bytes))
                undo.callback(self._driver.release, handles[-1])
            mapped = dict(zip(arriving, handles, strict=True))
            self._map(mapped, undo)
            undo.pop_all()
        del self._idle[: len(arriving)]
        self._mapped.update(mapped)
        self._clear_old_ends(arriving)
        return self._mapped_slots_touching(arriving)

    def shrink(self, granules: Iterable[int], is_free: Callable[[int], bool]) -> list[int]:
        """Unmap these granules and keep their memory idle. Returns the slots lost.

        No transfer and no kernel in flight may use them. Raises InvariantError if a granule is not mapped, or if
        a slot that touches it is not free or is the null block; then, and on a DriverError, nothing changed.
        """
        self._lifetime.expect()
        granules = sorted(set(granules))
        for granule in granules:
            self._expect_unused(granule, is_free)
        lost = self._mapped_slots_touching(granules)
        leaving = {granule: self._mapped[granule] for granule in granules}
        with ExitStack() as undo:
            for run in runs(leaving):
                self._unmap(run)
                undo.callback(self._map, {granule: leaving[granule] for granule in run}, ExitStack())
            undo.pop_all()
        for granule, handle in leaving.items():
            del self._mapped[granule]
            self._idle.append(handle)
        return lost

    def trim(self) -> int:
        """Give idle memory back to the machine. Returns the bytes."""
        freed_bytes = 0
        while self._idle:
            self._driver.release(self._idle[-1])
            freed_bytes += self._idle.pop().length_bytes
        return freed_bytes

    def close(self) -> None:
        """Unmap everything, give the memory and the range back. Idempotent. Nobody may use a slot any more."""
        if not self._lifetime.end():
            return
        for run in runs(sorted(self._mapped)):
            self._unmap(run)
        self._idle.extend(self._mapped.values())
        self._mapped.clear()
        self.trim()
        self._driver.free_range(self._range)

    def check(self) -> list[str]:
        """Recount the slots one by one, and the handles."""
        findings = []
        handles = [*self._mapped.values(), *self._idle]
        held_bytes = sum(handle.length_bytes for handle in handles)
        if len({handle.key for handle in handles}) != len(handles):
            findings.append("arena: a handle is held twice")
        if held_bytes > self._driver.used_bytes:
            findings.append(f"arena: holds {held_bytes} bytes, the driver knows of {self._driver.used_bytes}")
        if self._mapped and not self.is_mapped(NULL_SLOT):
            findings.append("arena: the null block is not mapped")
        slots_mapped = sum(map(self.is_mapped, range(self.geometry.slots)))
        if slots_mapped != self.slots_mapped:
            findings.append(f"arena: {slots_mapped} slots are mapped, {self.slots_mapped} counted")
        return findings

    def _map(self, arriving: dict[int, Handle], undo: ExitStack) -> None:
        """Map, open and zero the granules; `undo` unmaps them again."""
        view = self._driver.view(self._range)
        size = self.geometry.granule_bytes
        for granule, handle in arriving.items():
            self._driver.map(self._range, granule * size, handle)
            undo.callback(self._driver.unmap, self._range, granule * size, size)
        for run in runs(arriving):
            self._driver.set_access(self._range, run.start * size, len(run) * size, write=True)
            view[run.start * size : run.stop * size] = 0  # idle memory is not clean, and padding must be zero

    def _clear_old_ends(self, arriving: Iterable[int]) -> None:
        """A slot that straddles into memory which was there all the time has its former content in that part."""
        slots = self.array()
        for run in runs(arriving):
            touching, whole = self.geometry.slots_touching(run), self.geometry.slots_within(run)
            for slot in (*range(touching.start, whole.start), *range(whole.stop, touching.stop)):
                if self.is_mapped(slot):
                    slots[slot] = 0

    def _unmap(self, run: range) -> None:
        size = self.geometry.granule_bytes
        self._driver.unmap(self._range, run.start * size, len(run) * size)

    def _mapped_slots_touching(self, granules: Iterable[int]) -> list[int]:
        touching = chain.from_iterable(map(self.geometry.slots_touching, runs(granules)))
        return [slot for slot in dict.fromkeys(touching) if self.is_mapped(slot)]

    def _expect_unused(self, granule: int, is_free: Callable[[int], bool]) -> None:
        if granule not in self._mapped:
            raise InvariantError(f"arena: granule {granule} is not mapped")
        for slot in self.geometry.slots_touching(range(granule, granule + 1)):
            if slot == NULL_SLOT or (self.is_mapped(slot) and not is_free(slot)):
                raise InvariantError(f"arena: granule {granule} is in use by slot {slot}")


def runs(ascending: Iterable[int]) -> Iterator[range]:
    """Ascending numbers, joined to ranges where they are consecutive."""
    run = range(0)
    for number in ascending:
        if run and number == run.stop:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
