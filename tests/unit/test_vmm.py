"""Arena: slot arithmetic, and changes that happen wholly or not at all, on every driver."""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.streams import Event
from kvtier.allocator.vmm import Arena, Geometry, runs
from kvtier.errors import ClosedError, DeviceLost, DriverError, InvariantError, OutOfMemory
from kvtier.testing.drivers import CopyingDriver, FailingDriver, peek, poke
from tests.fakecuda.fake import FakeCuda, fake_cuda, load

__all__ = ["fake_cuda"]

PAGE = 4096
CAPACITY_PAGES = 12


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(0, 40), st.integers(0, 10))
def test_slots_and_granules_agree_byte_by_byte(
    granule_bytes: int, stride_bytes: int, slots: int, first: int, granules: int
) -> None:
    """A slot is used that is half unmapped, or a granule is unmapped under a slot in use."""
    geometry = Geometry(granule_bytes, stride_bytes, slots)
    bytes_of = {slot: set(range(slot * stride_bytes, (slot + 1) * stride_bytes)) for slot in range(slots)}
    assert geometry.granules == max(max(held) // granule_bytes for held in bytes_of.values()) + 1
    first = min(first, geometry.granules - 1)
    run = range(first, min(first + granules, geometry.granules))
    covered = set(range(run.start * granule_bytes, run.stop * granule_bytes))
    for slot, held in bytes_of.items():
        assert set(geometry.granules_of(slot)) == {byte // granule_bytes for byte in held}
        assert (slot in geometry.slots_within(run)) == (held <= covered)
        if run:
            assert (slot in geometry.slots_touching(run)) == bool(held & covered)
    assert set(geometry.slots_within(run)) | set(geometry.slots_touching(run)) <= set(range(slots))


@given(st.sets(st.integers(0, 30)))
def test_runs_are_maximal(numbers: set[int]) -> None:
    """One driver call per granule where one per run would do, or a granule is left out."""
    found = list(runs(sorted(numbers)))
    assert [number for run in found for number in run] == sorted(numbers)
    assert all(run.stop not in numbers for run in found)


@pytest.fixture(params=["memfd", "cuda"])
def driver(request: pytest.FixtureRequest) -> Iterator[CopyingDriver]:
    if request.param == "memfd":
        driver: CopyingDriver = MemfdDriver(CAPACITY_PAGES * PAGE, PAGE)
    else:
        request.getfixturevalue("fake_cuda").configure(CAPACITY_PAGES * PAGE, PAGE, strict=True)
        driver = CudaDriver()
    yield driver
    driver.close()


def arena_on(driver: object, stride_pages: int = 1, slots: int = 8) -> Arena:
    return Arena(driver, stride_bytes=stride_pages * PAGE, slots_reserved=slots)  # type: ignore[arg-type]


def write(arena: Arena, driver: CopyingDriver, value: int, *slots: int) -> None:
    """Fill slots with a byte."""
    stride_bytes = arena.geometry.stride_bytes
    for slot in slots:
        poke(driver, arena.address + slot * stride_bytes, value, stride_bytes)


def content(arena: Arena, driver: CopyingDriver, *slots: int) -> set[int]:
    """All bytes that occur in slots."""
    stride_bytes = arena.geometry.stride_bytes
    return {
        byte for slot in slots for byte in np.unique(peek(driver, arena.address + slot * stride_bytes, stride_bytes))
    }


def machine_bytes(driver: CopyingDriver) -> int:
    """Physical memory by the account of the kernel, or of the device."""
    if isinstance(driver, MemfdDriver):
        return os.fstat(driver.fd).st_blocks * 512
    fake = load()
    assert isinstance(fake, FakeCuda)
    return fake.used_bytes


def test_it_grows_from_the_null_block_on(driver: CopyingDriver) -> None:
    """The null block is missing, a pointer changes, or former content shows in slots that are new."""
    arena = arena_on(driver)
    address = arena.address
    assert arena.slots_mapped == 0
    assert arena.grow(0) == [0]
    write(arena, driver, 1, 0)
    assert arena.grow(2 * PAGE - 1) == [1, 2]
    assert arena.slots_mapped == 3
    assert arena.address == address
    assert content(arena, driver, 1, 2) == {0}
    assert content(arena, driver, 0) == {1}
    assert arena.check() == []


def test_its_array_lies_over_the_slots() -> None:
    """Kernels index an array of another shape or place than the slots."""
    driver = MemfdDriver(CAPACITY_PAGES * PAGE, PAGE)
    arena = arena_on(driver, slots=5)
    assert arena.array().shape == (5, PAGE)
    assert arena.array().ctypes.data == arena.address
    driver.close()


def test_a_slot_that_straddles_needs_all_its_granules(driver: CopyingDriver) -> None:
    """A slot counts as mapped whose second half is not."""
    arena = Arena(driver, stride_bytes=3 * PAGE // 2, slots_reserved=4)  # granules of slot 1: 1 and 2
    assert arena.grow(2 * PAGE) == [0]
    assert not arena.is_mapped(1)
    assert arena.grow(PAGE) == [1]
    with pytest.raises(InvariantError, match="slot 1"):
        arena.shrink([2], lambda slot: False)
    assert arena.shrink([2], lambda slot: True) == [1]
    assert arena.check() == []


def test_memory_goes_back(driver: CopyingDriver) -> None:
    """A shrunken or closed arena keeps its memory."""
    arena = arena_on(driver)
    arena.grow(8 * PAGE)
    assert machine_bytes(driver) == 8 * PAGE
    assert arena.shrink([5, 7, 6, 2], lambda slot: True) == [2, 5, 6, 7]
    assert driver.used_bytes == arena.held_bytes == 8 * PAGE  # idle, for the next grow
    assert arena.trim(1) == 3 * PAGE
    assert arena.trim() == PAGE
    assert driver.used_bytes == machine_bytes(driver) == 4 * PAGE
    arena.shrink([1], lambda slot: True)
    arena.close()
    arena.close()
    assert driver.used_bytes == machine_bytes(driver) == 0
    for call in (
        lambda: arena.grow(PAGE),
        lambda: arena.array(),
        lambda: arena.sleep(),
        lambda: arena.wake(),
        lambda: arena.fill(1),
        lambda: arena.collect(lambda event: True),
        lambda: arena.retire([], lambda slot: True, []),
    ):
        with pytest.raises(ClosedError):
            call()


def test_idle_memory_comes_back_clean(driver: CopyingDriver) -> None:
    """What one block left behind becomes another one's padding."""
    arena = arena_on(driver)
    arena.grow(4 * PAGE)
    write(arena, driver, 255, 0, 1, 2, 3)
    arena.shrink([2, 3], lambda slot: True)
    assert arena.grow(2 * PAGE) == [2, 3]
    assert driver.used_bytes == 4 * PAGE
    assert content(arena, driver, 2, 3) == {0}
    assert content(arena, driver, 1) == {255}


def test_what_is_in_use_stays(driver: CopyingDriver) -> None:
    """A slot is unmapped that a lease or the null block needs: the next kernel dies."""
    arena = arena_on(driver)
    arena.grow(6 * PAGE)
    for granules, is_free in (([0], True), ([3, 4], False), ([6], True), ([-1], True)):
        with pytest.raises(InvariantError):
            arena.shrink(granules, lambda slot, is_free=is_free: is_free)
        with pytest.raises(InvariantError):
            arena.retire(granules, lambda slot, is_free=is_free: is_free, [])
    assert arena.slots_mapped == 6
    assert arena.check() == []


@pytest.mark.parametrize(
    ("verb", "calls"),
    [("create", 2), ("map", 1), ("map", 3), ("set_access", 1), ("set_access", 2), ("zero", 1), ("zero", 2)],
)
def test_a_failed_grow_changes_nothing(driver: CopyingDriver, verb: str, calls: int) -> None:
    """Half a grow stays behind: memory that nobody owns, or slots that nobody counts."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(4 * PAGE)
    write(arena, driver, 7, 0, 1, 2, 3)
    arena.shrink([2], lambda slot: True)  # one idle handle, and a gap: two runs
    failing.fail(verb, calls)
    with pytest.raises(DriverError, match="on request"):
        arena.grow(4 * PAGE)
    assert arena.check() == []
    assert arena.slots_mapped == 3
    assert driver.used_bytes == arena.held_bytes == machine_bytes(driver) == 4 * PAGE
    assert arena.grow(4 * PAGE) == [2, 4, 5, 6]
    assert driver.used_bytes == 7 * PAGE
    assert content(arena, driver, 0, 1, 3) == {7}


@pytest.mark.parametrize("verb", ["shrink", "sleep"])
def test_a_failed_unmapping_changes_nothing(driver: CopyingDriver, verb: str) -> None:
    """Half of it stays behind: slots that count as mapped and are not, or whose content is gone."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(8 * PAGE)
    write(arena, driver, 5, *range(8))
    changes: dict[str, Callable[[], object]] = {
        "shrink": lambda: arena.shrink([2, 3, 6], lambda slot: True),
        "sleep": arena.sleep,
    }
    if verb == "sleep":
        arena.shrink([4], lambda slot: True)  # a gap: two runs
    failing.fail("unmap", 2)
    with pytest.raises(DriverError, match="on request"):
        changes[verb]()
    assert arena.slots_mapped == 8 - (verb == "sleep")
    assert arena.check() == []
    assert content(arena, driver, *(slot for slot in range(8) if arena.is_mapped(slot))) == {5}
    changes[verb]()
    assert arena.check() == []


def test_no_room_is_said_before_anything_is_done(driver: CopyingDriver) -> None:
    """Growing past the range or the capacity maps what it can and then fails."""
    arena = arena_on(driver, slots=20)
    with pytest.raises(OutOfMemory):
        arena.grow(13 * PAGE)
    assert driver.used_bytes == 0
    for length_bytes in (21 * PAGE, -1):
        with pytest.raises(InvariantError):
            arena.grow(length_bytes)
    assert len(arena.grow(12 * PAGE)) == 12


def test_memory_is_made_ahead(driver: CopyingDriver) -> None:
    """Growing makes memory in the hot path although it was there already, or a wish for more is an error."""
    failing = FailingDriver(driver)
    arena = arena_on(failing, slots=20)
    assert arena.fill(3) == 3
    assert arena.fill(2) == 3
    assert driver.used_bytes == arena.held_bytes == 3 * PAGE
    failing.fail("create", 1)
    assert arena.grow(3 * PAGE) == [0, 1, 2]
    with pytest.raises(DriverError, match="on request"):
        arena.fill(1)
    assert arena.fill(20) == CAPACITY_PAGES - 3
    assert driver.used_bytes == machine_bytes(driver) == CAPACITY_PAGES * PAGE
    with pytest.raises(OutOfMemory):
        arena.grow(10 * PAGE)
    assert arena.held_bytes == driver.used_bytes
    assert len(arena.grow(9 * PAGE)) == 9
    assert arena.check() == []


def test_retired_granules_go_with_their_last_reader(driver: CopyingDriver) -> None:
    """Memory is unmapped under a kernel that still reads it, kept for ever, or given to somebody else before."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(8 * PAGE)
    first, second = Event(1), Event(2)
    over: set[Event] = set()
    asked: list[Event] = []

    def is_done(event: Event) -> bool:
        asked.append(event)
        return event in over

    assert arena.retire([2, 5], lambda slot: True, [first, second]) == [2, 5]
    assert arena.retire([3, 4], lambda slot: True, [second, second]) == [3, 4]
    assert arena.granules_retired == {2, 3, 4, 5}
    assert not arena.is_mapped(2)
    with pytest.raises(InvariantError):
        arena.map([2])
    with pytest.raises(InvariantError):
        arena.grow(PAGE)  # the range has no other granule
    with pytest.raises(InvariantError, match="retired"):
        arena.sleep()
    assert arena.collect(is_done) == 0
    assert sorted(asked, key=lambda event: event.key) == [first, second]  # each once
    over.add(first)
    assert arena.collect(is_done) == 0
    over = {second}
    asked.clear()
    assert arena.collect(is_done) == 4
    assert asked == [second]  # the first is somebody else's by now
    assert arena.granules_retired == frozenset()
    assert driver.used_bytes == arena.held_bytes == 8 * PAGE
    assert arena.map([3]) == [3]
    assert arena.check() == []


def test_growing_leaves_retired_granules_alone(driver: CopyingDriver) -> None:
    """A tier that has just shrunk cannot grow although there is room, or maps over what is still read."""
    arena = arena_on(driver)
    arena.grow(4 * PAGE)
    arena.retire([1, 2], lambda slot: True, [Event(1)])
    assert arena.grow(2 * PAGE) == [4, 5]
    assert arena.granules_retired == {1, 2}


def test_retired_granules_go_in_as_few_calls_as_can_be(driver: CopyingDriver) -> None:
    """Each granule costs a call of the driver, or one that fails takes the others' place in the books."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(8 * PAGE)
    for granules in ([3], [2], [6], [4]):
        arena.retire(granules, lambda slot: True, [])
    failing.fail("unmap", 2)  # runs: 2 to 4, then 6
    with pytest.raises(DriverError, match="on request"):
        arena.collect(lambda event: True)
    assert arena.granules_retired == {6}
    assert arena.check() == []
    assert arena.collect(lambda event: True) == 1
    assert arena.held_bytes == driver.used_bytes
    assert arena.grow(4 * PAGE) == [2, 3, 4, 6]


def test_it_sleeps_and_wakes_at_the_same_place(driver: CopyingDriver) -> None:
    """A sleeping tier keeps memory, forgets what was mapped, or wakes elsewhere or with old content."""
    arena = arena_on(driver)
    arena.grow(6 * PAGE)
    arena.shrink([3], lambda slot: True)
    write(arena, driver, 9, 0, 1, 2, 4, 5)
    address = arena.address
    assert arena.sleep() == 6 * PAGE
    assert driver.used_bytes == machine_bytes(driver) == arena.held_bytes == 0
    assert arena.slots_mapped == 0
    assert not arena.is_mapped(0)
    for call in (
        lambda: arena.grow(PAGE),
        lambda: arena.map([1]),
        lambda: arena.shrink([], lambda slot: True),
        lambda: arena.sleep(),
    ):
        with pytest.raises(InvariantError, match="sleeps"):
            call()
    taken = driver.create(8 * PAGE)
    with pytest.raises(OutOfMemory):
        arena.wake()
    assert arena.check() == []
    driver.release(taken)
    assert arena.fill(2) == 2
    assert arena.wake() == [0, 1, 2, 4, 5]
    assert arena.address == address
    assert content(arena, driver, 0, 1, 2, 4, 5) == {0}
    with pytest.raises(InvariantError, match="awake"):
        arena.wake()
    assert arena.check() == []


def test_it_wakes_with_a_part_of_its_memory(driver: CopyingDriver) -> None:
    """A machine that has not all the memory any more cannot wake anything, or wakes without the null block."""
    arena = arena_on(driver)
    arena.grow(6 * PAGE)
    arena.shrink([3], lambda slot: True)
    arena.sleep()
    assert arena.is_asleep
    for granules in ([], [1, 2], [0, 3], [0, 6]):
        with pytest.raises(InvariantError, match="null block and with what was mapped"):
            arena.wake(granules)
    assert (arena.is_asleep, arena.held_bytes) == (True, 0)
    assert arena.wake([4, 0]) == [0, 4]
    assert not arena.is_asleep
    assert arena.map([1, 3]) == [1, 3]
    assert arena.check() == []


def test_closing_takes_retired_and_sleeping_memory_along(driver: CopyingDriver) -> None:
    """What was out of use when an arena was closed stays taken."""
    arena, sleeper = arena_on(driver), arena_on(driver)
    arena.grow(4 * PAGE)
    sleeper.grow(2 * PAGE)
    arena.retire([1, 3], lambda slot: True, [Event(1)])
    sleeper.sleep()
    sleeper.fill(1)
    arena.close()
    sleeper.close()
    assert driver.used_bytes == machine_bytes(driver) == 0


def test_check_sees_each_disagreement(driver: CopyingDriver) -> None:
    """The recount passes over damage, and every test that relies on it proves nothing."""
    arena = arena_on(driver)
    arena.grow(3 * PAGE)
    handle = arena._mapped[0]
    arena._mapped[5] = handle
    assert "held twice" in str(arena.check())
    del arena._mapped[5]
    arena._retired.add({1: arena._mapped[1]}, [])
    assert "mapped and retired" in str(arena.check())
    arena._retired.remove([1])
    arena._asleep = ()
    assert "sleeps with memory" in str(arena.check())
    arena._asleep = None
    assert arena.check() == []
    del arena._mapped[0]
    assert "null block" in str(arena.check())
    arena._range.detach(range(1))
    driver.release(handle)
    arena._pool.give([handle])
    assert "the driver knows of" in str(arena.check())


def test_a_straddling_slot_comes_back_zeroed(driver: CopyingDriver) -> None:
    """A slot whose one end stayed mapped shows what a former block left there."""
    arena = Arena(driver, stride_bytes=5 * PAGE // 4, slots_reserved=2)
    arena.grow(3 * PAGE)
    write(arena, driver, 7, 1)
    assert arena.shrink([2], lambda slot: True) == [1]
    assert arena.map([2]) == [1]
    assert content(arena, driver, 1) == {0}
    arena.close()


class ArenaMachine(RuleBasedStateMachine):
    """All verbs in any order, with slots that straddle and calls that fail; content of kept slots must stay."""

    def make_driver(self) -> CopyingDriver:
        return MemfdDriver(64 * PAGE, PAGE)

    @initialize(stride_quarters=st.integers(1, 10), slots=st.integers(2, 9))
    def begin(self, stride_quarters: int, slots: int) -> None:
        self.driver = self.make_driver()
        self.failing = FailingDriver(self.driver)
        self.arena = Arena(
            self.failing,  # type: ignore[arg-type]
            stride_bytes=stride_quarters * PAGE // 4,
            slots_reserved=slots,
        )
        self.address = self.arena.address
        self.kept: set[int] = set()
        self.pending: set[Event] = set()
        self.asleep = False
        self.made = 0

    def bytes_of(self, slot: int) -> NDArray[np.uint8]:
        stride_bytes = self.arena.geometry.stride_bytes
        return peek(self.driver, self.address + slot * stride_bytes, stride_bytes)

    def win(self, won: list[int]) -> None:
        assert not self.kept & set(won)
        for slot in won:
            assert not self.bytes_of(slot).any()
            write(self.arena, self.driver, slot + 1, slot)
        self.kept |= set(won)

    @rule(verb=st.sampled_from(["create", "map", "set_access", "zero", "unmap"]), calls=st.integers(1, 4))
    def break_down(self, verb: str, calls: int) -> None:
        self.failing.fail(verb, calls)

    @rule(granules=st.integers(0, 6))
    def grow(self, granules: int) -> None:
        try:
            self.win(self.arena.grow(granules * PAGE))
        except (InvariantError, DriverError):
            return

    @precondition(lambda self: self.kept)
    @rule(granules=st.sets(st.integers(0, 25), max_size=4), held=st.sets(st.integers(0, 8)), now=st.booleans())
    def shrink(self, granules: set[int], held: set[int], now: bool) -> None:
        try:
            if now:
                lost = self.arena.shrink(granules, lambda slot: slot not in held)
            else:
                self.made += 1
                lost = self.arena.retire(granules, lambda slot: slot not in held, [Event(self.made)])
                self.pending.add(Event(self.made))
        except (InvariantError, DriverError):
            return
        assert not set(lost) & (held | {0})
        self.kept -= set(lost)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pending.discard(data.draw(st.sampled_from(sorted(self.pending, key=lambda event: event.key))))

    @rule()
    def collect(self) -> None:
        before = len(self.arena.granules_retired)
        try:
            assert self.arena.collect(lambda event: event not in self.pending) <= before
        except DriverError:
            return
        assert self.pending or not self.arena.granules_retired

    @rule()
    def doze(self) -> None:
        try:
            self.arena.sleep()
        except (InvariantError, DriverError):
            return
        self.asleep = True
        self.kept.clear()
        assert self.driver.used_bytes == 0

    @precondition(lambda self: self.asleep)
    @rule(share=st.floats(0, 1))
    def wake(self, share: float) -> None:
        slept = sorted(self.arena._asleep or ())
        parts = slept[: max(len(self.arena.geometry.granules_of(0)), int(share * len(slept)))]
        try:
            self.win(self.arena.wake(parts if share < 0.9 else None))
        except DriverError:
            return
        self.asleep = False

    @rule(granules=st.integers(0, 5))
    def fill(self, granules: int) -> None:
        try:
            assert self.arena.fill(granules) >= granules
        except DriverError:
            return

    @rule(keep=st.integers(0, 2))
    def trim(self, keep: int) -> None:
        self.arena.trim(keep)
        retired_bytes = len(self.arena.granules_retired) * PAGE
        assert self.driver.used_bytes <= self.arena.mapped_bytes + retired_bytes + keep * PAGE

    @invariant()
    def holds(self) -> None:
        assert self.arena.check() == []
        assert self.arena.address == self.address
        assert self.arena.held_bytes == self.driver.used_bytes == machine_bytes(self.driver)
        assert {slot for slot in range(9) if self.arena.is_mapped(slot)} == self.kept
        assert all((self.bytes_of(slot) == slot + 1).all() for slot in self.kept)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.failing.fail("", 0)
            self.arena.close()
            assert self.driver.used_bytes == machine_bytes(self.driver) == 0
            self.driver.close()


class CudaArenaMachine(ArenaMachine):
    """The same on a device."""

    def make_driver(self) -> CopyingDriver:
        fake = load()
        if isinstance(fake, str):
            pytest.skip(fake)
        fake.reset()
        fake.configure(64 * PAGE, PAGE, strict=True)
        return CudaDriver()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestCudaArena = CudaArenaMachine.TestCase
TestCudaArena.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_a_run_costs_one_call(fake_cuda: FakeCuda) -> None:
    """Opening, clearing and unmapping cost a call for each granule: 36 us each, on a device."""
    driver = CudaDriver()
    arena = Arena(driver, stride_bytes=driver.granule_bytes, slots_reserved=9)
    arena.grow(4 * driver.granule_bytes)
    arena.shrink([2], lambda slot: True)
    arena.fill(5)
    before = {call: fake_cuda.calls(call) for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async")}
    arena.grow(5 * driver.granule_bytes)  # runs: 2, then 4 to 7
    assert [fake_cuda.calls(call) - count for call, count in before.items()] == [0, 5, 2, 2]
    unmaps = fake_cuda.calls("cuMemUnmap")
    arena.retire([4, 6], lambda slot: True, [])
    arena.retire([5, 2], lambda slot: True, [])
    assert arena.collect(driver.streams.is_done) == 4
    assert fake_cuda.calls("cuMemUnmap") - unmaps == 2
    arena.close()
    driver.close()


def test_a_lost_device_lets_an_arena_be_closed(fake_cuda: FakeCuda) -> None:
    """Closing a tier on a lost device raises, and what comes after it is never closed."""
    driver = CudaDriver()
    arena = Arena(driver, stride_bytes=driver.granule_bytes, slots_reserved=4)
    arena.grow(driver.granule_bytes)
    fake_cuda.fault("cuMemUnmap", 700)
    arena.close()
    arena.close()
    driver.close()
    assert fake_cuda.used_bytes == 0
    with pytest.raises(DeviceLost):
        CudaDriver()
