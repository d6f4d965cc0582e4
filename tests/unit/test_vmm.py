"""Arena: slot arithmetic, and changes that happen wholly or not at all."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.vmm import Arena, Geometry, runs
from kvtier.errors import ClosedError, DriverError, InvariantError, OutOfMemory
from kvtier.testing.drivers import FailingDriver

PAGE = 4096


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


@pytest.fixture
def driver() -> Iterator[MemfdDriver]:
    driver = MemfdDriver(12 * PAGE, PAGE)
    yield driver
    driver.close()


def arena_on(driver: object, stride_pages: int = 1, slots: int = 8) -> Arena:
    return Arena(driver, stride_bytes=stride_pages * PAGE, slots_reserved=slots)  # type: ignore[arg-type]


def test_it_grows_from_the_null_block_on(driver: MemfdDriver) -> None:
    """The null block is missing, the array moves, or its content survives in slots that are new."""
    arena = arena_on(driver)
    assert arena.slots_mapped == 0
    assert arena.grow(0) == [0]
    array = arena.array()
    assert array.shape == (8, PAGE)
    array[0] = 1
    assert arena.grow(2 * PAGE - 1) == [1, 2]
    assert arena.slots_mapped == 3
    assert arena.array().ctypes.data == array.ctypes.data
    assert not array[1:3].any()
    assert arena.check() == []


def test_a_slot_that_straddles_needs_all_its_granules(driver: MemfdDriver) -> None:
    """A slot counts as mapped whose second half is not."""
    arena = Arena(driver, stride_bytes=3 * PAGE // 2, slots_reserved=4)  # granules of slot 1: 1 and 2
    assert arena.grow(2 * PAGE) == [0]
    assert not arena.is_mapped(1)
    assert arena.grow(PAGE) == [1]
    with pytest.raises(InvariantError, match="slot 1"):
        arena.shrink([2], lambda slot: False)
    assert arena.shrink([2], lambda slot: True) == [1]
    assert arena.check() == []


def test_memory_goes_back(driver: MemfdDriver) -> None:
    """A shrunken or closed arena keeps its memory."""
    arena = arena_on(driver)
    arena.grow(8 * PAGE)
    arena.array()[:] = 1
    assert os.fstat(driver.fd).st_blocks * 512 == 8 * PAGE
    assert arena.shrink([5, 7, 6, 2], lambda slot: True) == [2, 5, 6, 7]
    assert driver.used_bytes == 8 * PAGE  # idle, for the next grow
    assert arena.trim() == 4 * PAGE
    assert driver.used_bytes == os.fstat(driver.fd).st_blocks * 512 == 4 * PAGE
    arena.shrink([1], lambda slot: True)
    arena.close()
    arena.close()
    assert driver.used_bytes == os.fstat(driver.fd).st_blocks * 512 == 0
    with pytest.raises(ClosedError):
        arena.grow(PAGE)
    with pytest.raises(ClosedError):
        arena.array()


def test_idle_memory_comes_back_clean(driver: MemfdDriver) -> None:
    """What one block left behind becomes another one's padding."""
    arena = arena_on(driver)
    arena.grow(4 * PAGE)
    arena.array()[:4] = 255
    arena.shrink([2, 3], lambda slot: True)
    assert arena.grow(2 * PAGE) == [2, 3]
    assert driver.used_bytes == 4 * PAGE
    assert not arena.array()[2:4].any()
    assert arena.array()[1].all()


def test_what_is_in_use_stays(driver: MemfdDriver) -> None:
    """A slot is unmapped that a lease or the null block needs: the next kernel dies."""
    arena = arena_on(driver)
    arena.grow(6 * PAGE)
    for granules, is_free in (([0], True), ([3, 4], False), ([6], True), ([-1], True)):
        with pytest.raises(InvariantError):
            arena.shrink(granules, lambda slot, is_free=is_free: is_free)
    assert arena.slots_mapped == 6
    assert arena.check() == []


@pytest.mark.parametrize(
    ("verb", "calls"), [("create", 2), ("map", 1), ("map", 3), ("set_access", 1), ("set_access", 2)]
)
def test_a_failed_grow_changes_nothing(driver: MemfdDriver, verb: str, calls: int) -> None:
    """Half a grow stays behind: memory that nobody owns, or slots that nobody counts."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(4 * PAGE)
    arena.array()[:4] = 7
    arena.shrink([2], lambda slot: True)  # one idle handle, and a gap: two runs
    failing.fail(verb, calls)
    with pytest.raises(DriverError, match="on request"):
        arena.grow(4 * PAGE)
    assert arena.check() == []
    assert arena.slots_mapped == 3
    assert driver.used_bytes == 4 * PAGE
    assert arena.grow(4 * PAGE) == [2, 4, 5, 6]
    assert driver.used_bytes == 7 * PAGE
    assert np.unique(arena.array()[[0, 1, 3]]) == [7]


def test_a_failed_shrink_changes_nothing(driver: MemfdDriver) -> None:
    """Half a shrink stays behind: slots that count as mapped and are not."""
    failing = FailingDriver(driver)
    arena = arena_on(failing)
    arena.grow(8 * PAGE)
    failing.fail("unmap", 2)
    with pytest.raises(DriverError, match="on request"):
        arena.shrink([2, 3, 6], lambda slot: True)
    assert arena.slots_mapped == 8
    assert arena.check() == []
    arena.array()[:] = 1  # kills the process if a granule is missing
    assert arena.shrink([2, 3, 6], lambda slot: True) == [2, 3, 6]


def test_no_room_is_said_before_anything_is_done(driver: MemfdDriver) -> None:
    """Growing past the range or the capacity maps what it can and then fails."""
    arena = arena_on(driver, slots=20)
    with pytest.raises(OutOfMemory):
        arena.grow(13 * PAGE)
    assert driver.used_bytes == 0
    for length_bytes in (21 * PAGE, -1):
        with pytest.raises(InvariantError):
            arena.grow(length_bytes)
    assert len(arena.grow(12 * PAGE)) == 12


def test_check_sees_each_disagreement(driver: MemfdDriver) -> None:
    """The recount passes over damage, and every test that relies on it proves nothing."""
    arena = arena_on(driver)
    arena.grow(3 * PAGE)
    handle = arena._mapped[0]
    arena._mapped[5] = handle
    assert "held twice" in str(arena.check())
    del arena._mapped[5], arena._mapped[0]
    assert "null block" in str(arena.check())
    driver.unmap(arena._range, 0, PAGE)
    driver.release(handle)
    arena._idle.append(handle)
    assert "the driver knows of" in str(arena.check())


def test_a_straddling_slot_comes_back_zeroed() -> None:
    """A slot whose one end stayed mapped shows what a former block left there."""
    arena = Arena(MemfdDriver(8 * PAGE, PAGE), stride_bytes=5 * PAGE // 4, slots_reserved=2)
    arena.grow(3 * PAGE)
    arena.array()[1] = 7
    assert arena.shrink([2], lambda slot: True) == [1]
    assert arena.map([2]) == [1]
    assert not arena.array()[1].any()
    arena.close()


class ArenaMachine(RuleBasedStateMachine):
    """Grow, shrink and trim in any order, with slots that straddle; content of kept slots must stay."""

    @initialize(stride_quarters=st.integers(1, 10), slots=st.integers(2, 9))
    def begin(self, stride_quarters: int, slots: int) -> None:
        self.driver = MemfdDriver(64 * PAGE, PAGE)
        self.arena = Arena(self.driver, stride_bytes=stride_quarters * PAGE // 4, slots_reserved=slots)
        self.kept: set[int] = set()

    @rule(granules=st.integers(0, 6))
    def grow(self, granules: int) -> None:
        try:
            won = self.arena.grow(granules * PAGE)
        except InvariantError:
            return
        assert not self.kept & set(won)
        for slot in won:
            assert not self.arena.array()[slot].any()
            self.arena.array()[slot] = slot + 1
        self.kept |= set(won)

    @precondition(lambda self: self.kept)
    @rule(granules=st.sets(st.integers(0, 25), max_size=4), held=st.sets(st.integers(0, 8)))
    def shrink(self, granules: set[int], held: set[int]) -> None:
        try:
            lost = self.arena.shrink(granules, lambda slot: slot not in held)
        except InvariantError:
            return
        assert not set(lost) & (held | {0})
        self.kept -= set(lost)

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        assert self.driver.used_bytes == self.arena.mapped_bytes

    @invariant()
    def holds(self) -> None:
        assert self.arena.check() == []
        assert {slot for slot in range(9) if self.arena.is_mapped(slot)} == self.kept
        assert all((self.arena.array()[slot] == slot + 1).all() for slot in self.kept)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            assert self.driver.used_bytes == 0
            self.driver.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
