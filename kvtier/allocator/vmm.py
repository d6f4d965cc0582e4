"""Arena: the slots of the top tier on one address range whose memory comes and goes.

Owns: a range for the most slots there may ever be, and physical handles of one granule each: mapped ones, retired ones
(mapped still, but out of use), and a pool of idle ones. Does not know which slots are free; whoever shrinks says so.
Always:  no pointer changes while the arena lives; a slot may be used exactly when all its granules are mapped;
         slot 0 is the null block, mapped from the first `grow` on; newly mapped memory is zeroed; every change
         happens wholly or not at all. One caller at a time, and nothing here waits.
Units:   granules and slots (index), bytes.

    what                    undone by                           depends on
    range                   GranuleRange.free, in close         nothing mapped in it
    handle                  HandlePool.trim, in trim, close     it is idle: not mapped
    mapping                 GranuleRange.detach, in shrink,     range and handle; nobody reads its slots
                            collect, sleep, close

Creating, mapping and unmapping cost 10 to 400 us per granule and belong into no hot path: `fill` makes memory ahead,
`retire` takes granules out of use at once, and `collect` unmaps them when no reader is left, many in one call.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

from kvtier.allocator.driver import Handle, MemoryDriver
from kvtier.allocator.geometry import Geometry, runs
from kvtier.allocator.granule_range import GranuleRange
from kvtier.allocator.handle_pool import HandlePool
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.retired import Retired
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.allocator.streams import Event
from kvtier.errors import DeviceLost, InvariantError

__all__ = ["Arena", "Geometry", "runs"]


class Arena:
    """`slots_reserved` slots of constant stride, of which as many are mapped as `grow` and `shrink` say."""

    def __init__(self, driver: MemoryDriver, *, stride_bytes: int, slots_reserved: int) -> None:
        """Reserve the range; nothing is mapped yet. The driver stays the caller's."""
        self.geometry = Geometry(driver.granule_bytes, stride_bytes, slots_reserved)
        self._driver = driver
        self._mapped: dict[int, Handle] = {}  # by granule
        self._retired = Retired()
        self._pool = HandlePool(driver)
        self._asleep: tuple[int, ...] | None = None  # what `wake` maps again
        self._range = GranuleRange(driver, self.geometry.granules)
        self._lifetime = Lifetime("the arena")

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot n follows at n strides. It never changes."""
        return self._range.address

    @property
    def slots_mapped(self) -> int:
        """Slots that may be used, the null block counted."""
        return sum(map(len, self.geometry.slots_whole(self._mapped)))

    @property
    def granules_mapped(self) -> frozenset[int]:
        """The granules that may be used now."""
        return frozenset(self._mapped)

    @property
    def granules_retired(self) -> frozenset[int]:
        """The granules that wait for their last readers. They cannot be mapped before they are collected."""
        return frozenset(self._retired.handles)

    @property
    def is_asleep(self) -> bool:
        """Whether nothing is mapped until `wake`."""
        return self._asleep is not None

    @property
    def mapped_bytes(self) -> int:
        return len(self._mapped) * self.geometry.granule_bytes

    @property
    def held_bytes(self) -> int:
        """Physical memory: mapped, retired and idle."""
        return sum(handle.length_bytes for handle in self._handles())

    @property
    def granules_idle(self) -> int:
        """Memory that is ready to be mapped."""
        return len(self._pool.idle)

    def is_mapped(self, slot: int) -> bool:
        """Whether the slot may be used."""
        return 0 <= slot < self.geometry.slots and all(g in self._mapped for g in self.geometry.granules_of(slot))

    def memory_of(self, slots: Iterable[int]) -> list[Handle]:
        """The memory of slots, granule by granule, in the order of the slots. It stays the arena's.

        Raises InvariantError for a slot that must not be used.
        """
        self._expect_awake()
        wanted = list(slots)
        if not all(map(self.is_mapped, wanted)):
            raise InvariantError(f"arena: slots {wanted} do not all have memory")
        return [self._mapped[granule] for slot in wanted for granule in self.geometry.granules_of(slot)]

    def array(self) -> Any:
        """uint8 array [slots_reserved, stride_bytes], zero-copy. Only mapped slots may be indexed."""
        self._lifetime.expect()
        slots, stride_bytes = self.geometry.slots, self.geometry.stride_bytes
        return self._range.view()[: slots * stride_bytes].reshape(slots, stride_bytes)

    def grow(self, length_bytes: int) -> list[int]:
        """Map at least so many bytes more, and the null block; lowest addresses first.

        Returns the slots won, zeroed. Raises as `map` does, or InvariantError if the range has no such room; then
        nothing changed.
        """
        self._expect_awake()
        taken = self._mapped.keys() | self._retired.handles.keys()
        missing = [granule for granule in range(self.geometry.granules) if granule not in taken]
        null_block = [granule for granule in self.geometry.granules_of(NULL_SLOT) if granule not in taken]
        count = max(len(null_block), -(-length_bytes // self.geometry.granule_bytes))
        if length_bytes < 0 or count > len(missing):
            raise InvariantError(f"arena: cannot map {length_bytes} bytes, {len(missing)} granules are left")
        return self.map(missing[:count])

    def map(self, granules: Iterable[int]) -> list[int]:
        """Map these granules, with idle memory first. Returns the slots won, zeroed.

        Raises OutOfMemory or DriverError, or InvariantError if one is mapped already, retired or not of the range;
        then nothing changed.
        """
        self._expect_awake()
        arriving = sorted(granules)
        taken = self._mapped.keys() | self._retired.handles.keys()
        if len(set(arriving)) != len(arriving) or any(
            granule in taken or not 0 <= granule < self.geometry.granules for granule in arriving
        ):
            raise InvariantError(f"arena: granules {arriving} cannot all be mapped")
        return self._map(arriving)

    def shrink(self, granules: Iterable[int], is_free: Callable[[int], bool]) -> list[int]:
        """Unmap these granules now and keep their memory idle. Returns the slots lost.

        No transfer and no kernel in flight may use them. Raises InvariantError if a granule is not mapped, or if
        a slot that touches it is not free or is the null block; then, and on a DriverError, nothing changed.
        """
        leaving, lost = self._leaving(granules, is_free)
        self._range.detach_all(leaving)
        for granule in leaving:
            del self._mapped[granule]
        self._pool.give(leaving.values())
        return lost

    def retire(self, granules: Iterable[int], is_free: Callable[[int], bool], events: Iterable[Event]) -> list[int]:
        """Take these granules out of use; `collect` unmaps them once all events are done. Returns the slots lost.

        The events must cover all streams that may have been given work on them: every reader's, the copies' too. Raises
        InvariantError as `shrink` does.
        """
        leaving, lost = self._leaving(granules, is_free)
        for granule in leaving:
            del self._mapped[granule]
        if leaving:
            self._retired.add(leaving, events)
        return lost

    def collect(self, is_done: Callable[[Event], bool]) -> int:
        """Unmap the retired granules that nobody can be reading any more. Returns how many; their memory is idle.

        Asks and never waits. On a DriverError the runs that were unmapped before stay so, and the others retired.
        """
        self._lifetime.expect()
        granules = self._retired.ready(is_done)
        for run in runs(granules):
            self._range.detach(run)
            self._pool.give(self._retired.remove(run))
        return len(granules)

    def fill(self, granules: int) -> int:
        """Make memory ahead, until so many granules are idle or memory has run out. Returns how many are idle."""
        self._lifetime.expect()
        return self._pool.fill(granules)

    def trim(self, keep_granules: int = 0) -> int:
        """Give idle memory back to the machine, all but so much. Returns the bytes."""
        return self._pool.trim(keep_granules)

    def sleep(self) -> int:
        """Give all memory back, contents and all, but keep the range. Returns the bytes. Nobody may use a slot.

        Raises InvariantError while granules are retired; then, and on a DriverError from unmapping, nothing changed.
        """
        self._expect_awake()
        if self._retired.handles:
            raise InvariantError("arena: cannot sleep while retired granules may be read")
        self._range.detach_all(self._mapped)
        self._asleep = tuple(sorted(self._mapped))
        self._pool.give(self._mapped.values())
        self._mapped.clear()
        return self.trim()

    def wake(self, granules: Iterable[int] | None = None) -> list[int]:
        """Map again what `sleep` unmapped, or these of it, at the same addresses. Returns the slots, zeroed.

        Raises OutOfMemory or DriverError, or InvariantError if the null block is not among them, or one is that was not
        mapped before; then it sleeps on.
        """
        self._lifetime.expect()
        if self._asleep is None:
            raise InvariantError("arena: it is awake")
        arriving = {*self._asleep} if granules is None else {*granules}
        if not {*self.geometry.granules_of(NULL_SLOT)} & {*self._asleep} <= arriving <= {*self._asleep}:
            raise InvariantError("arena: it wakes with the null block and with what was mapped before")
        won = self._map(sorted(arriving))
        self._asleep = None
        return won

    def close(self) -> None:
        """Unmap everything, give the memory and the range back. Idempotent. Nobody may use a slot any more."""
        if not self._lifetime.end():
            return
        mapped = self._mapped | self._retired.handles
        with suppress(DeviceLost):  # the driver's own close undoes what is left
            for run in runs(sorted(mapped)):
                self._range.detach(run)
            self._pool.give(mapped.values())
            self.trim()
            self._range.free()
        self._mapped.clear()
        self._retired = Retired()

    def check(self) -> list[str]:
        """Recount the slots one by one, and the handles."""
        findings = []
        handles = self._handles()
        if len({handle.key for handle in handles}) != len(handles):
            findings.append("arena: a handle is held twice")
        if self.held_bytes > self._driver.used_bytes:
            findings.append(f"arena: holds {self.held_bytes} bytes, the driver knows of {self._driver.used_bytes}")
        if self._mapped and not self.is_mapped(NULL_SLOT):
            findings.append("arena: the null block is not mapped")
        if self._mapped.keys() & self._retired.handles.keys():
            findings.append("arena: a granule is mapped and retired")
        if self._mapped and self._asleep is not None:
            findings.append("arena: it sleeps with memory mapped")
        slots_mapped = sum(map(self.is_mapped, range(self.geometry.slots)))
        if slots_mapped != self.slots_mapped:
            findings.append(f"arena: {slots_mapped} slots are mapped, {self.slots_mapped} counted")
        return findings

    # ------------------------------------------------------------ inside

    def _map(self, arriving: list[int]) -> list[int]:
        with ExitStack() as undo:
            mapped = dict(zip(arriving, self._pool.take(len(arriving), undo), strict=True))
            self._range.attach(mapped, undo)
            for run in runs(arriving):  # idle memory is not clean, and padding must be zero
                self._range.zero(run.start * self.geometry.granule_bytes, len(run) * self.geometry.granule_bytes)
            self._clear_old_ends(arriving)
            undo.pop_all()
        self._mapped.update(mapped)
        return self._mapped_slots_touching(arriving)

    def _clear_old_ends(self, arriving: Iterable[int]) -> None:
        """A slot that straddles into memory which was there all the time has its former content in that part."""
        there = self._mapped.keys() | set(arriving)
        for run in runs(arriving):
            touching, whole = self.geometry.slots_touching(run), self.geometry.slots_within(run)
            for slot in (*range(touching.start, whole.start), *range(whole.stop, touching.stop)):
                if there >= {*self.geometry.granules_of(slot)}:
                    self._range.zero(slot * self.geometry.stride_bytes, self.geometry.stride_bytes)

    def _mapped_slots_touching(self, granules: Iterable[int]) -> list[int]:
        touching = chain.from_iterable(map(self.geometry.slots_touching, runs(granules)))
        return [slot for slot in dict.fromkeys(touching) if self.is_mapped(slot)]

    def _leaving(self, granules: Iterable[int], is_free: Callable[[int], bool]) -> tuple[dict[int, Handle], list[int]]:
        """The memory of granules that may go, and the slots that go with them."""
        self._expect_awake()
        leaving = sorted(set(granules))
        for granule in leaving:
            self._expect_unused(granule, is_free)
        return {granule: self._mapped[granule] for granule in leaving}, self._mapped_slots_touching(leaving)

    def _handles(self) -> list[Handle]:
        return [*self._mapped.values(), *self._retired.handles.values(), *self._pool.idle]

    def _expect_awake(self) -> None:
        self._lifetime.expect()
        if self._asleep is not None:
            raise InvariantError("arena: it sleeps; wake it first")

    def _expect_unused(self, granule: int, is_free: Callable[[int], bool]) -> None:
        if granule not in self._mapped:
            raise InvariantError(f"arena: granule {granule} is not mapped")
        for slot in self.geometry.slots_touching(range(granule, granule + 1)):
            if slot == NULL_SLOT or (self.is_mapped(slot) and not is_free(slot)):
                raise InvariantError(f"arena: granule {granule} is in use by slot {slot}")
