"""Arena: slot arithmetic, and memory that comes and goes in as few calls as can be, on every driver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.vmm import Arena, Geometry, runs
from kvtier.errors import ClosedError, InvariantError, OutOfMemory
from kvtier.testing.drivers import CopyingDriver
from tests.arena_bench import CAPACITY_PAGES, PAGE, arena_on, content, driver, machine_bytes, write
from tests.fakecuda.fake import FakeCuda, fake_cuda

__all__ = ["driver", "fake_cuda"]


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


def test_a_straddling_slot_comes_back_zeroed(driver: CopyingDriver) -> None:
    """A slot whose one end stayed mapped shows what a former block left there."""
    arena = Arena(driver, stride_bytes=5 * PAGE // 4, slots_reserved=2)
    arena.grow(3 * PAGE)
    write(arena, driver, 7, 1)
    assert arena.shrink([2], lambda slot: True) == [1]
    assert arena.map([2]) == [1]
    assert content(arena, driver, 1) == {0}
    arena.close()


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
