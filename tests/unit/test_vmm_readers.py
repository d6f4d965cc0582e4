"""Arena: memory made ahead, retired until its last reader has gone, and put to sleep."""

import pytest

from kvtier.allocator.streams import Event
from kvtier.errors import DriverError, InvariantError, OutOfMemory
from kvtier.testing.drivers import CopyingDriver, FailingDriver
from tests.arena_bench import CAPACITY_PAGES, PAGE, arena_on, content, driver, machine_bytes, write
from tests.fakecuda.fake import fake_cuda

__all__ = ["driver", "fake_cuda"]


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
