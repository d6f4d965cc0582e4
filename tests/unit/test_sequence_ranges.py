"""Slots shown one behind the other: on memfd and on a device that the CPU cannot touch, with calls that fail."""

import gc
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.allocator.sequence_ranges import IDLE_RANGES_MAX, SequenceRange, SequenceRanges
from kvtier.allocator.vmm import Arena
from kvtier.errors import DeviceLost, DriverError, InvariantError, OutOfMemory, UsageError
from kvtier.testing.drivers import CopyingDriver, FailingDriver, peek, poke
from tests.fakecuda.fake import FakeCuda, fake_cuda, load

__all__ = ["fake_cuda"]

PAGE = 4096
SLOTS = 12
STRIDE = 2 * PAGE


@pytest.fixture(params=["memfd", "cuda"])
def driver(request: pytest.FixtureRequest) -> Iterator[CopyingDriver]:
    if request.param == "memfd":
        driver: CopyingDriver = MemfdDriver(2 * SLOTS * PAGE, PAGE)
    else:
        request.getfixturevalue("fake_cuda").configure(2 * SLOTS * PAGE, PAGE, strict=True)
        driver = CudaDriver()
    yield driver
    driver.close()


class World:
    """An arena of two granules a slot, each slot full of its own number; and ranges over it."""

    def __init__(self, driver: CopyingDriver, blocks_max: int | None = None) -> None:
        self.driver = driver
        self.failing = FailingDriver(driver)
        self.arena = Arena(driver, stride_bytes=STRIDE, slots_reserved=SLOTS)
        self.arena.grow(SLOTS * STRIDE)
        self.ranges = SequenceRanges(self.failing, self.arena, blocks_max)  # type: ignore[arg-type]
        for slot in range(SLOTS):
            self.write(slot, slot)

    def write(self, slot: int, value: int) -> None:
        poke(self.driver, self.arena.address + slot * STRIDE, value, STRIDE)

    def seen(self, shown: SequenceRange) -> list[int]:
        """The number that each block is full of."""
        blocks = peek(self.driver, shown.address, shown.length_bytes).reshape(-1, STRIDE)
        assert (blocks == blocks[:, :1]).all()
        return [int(number) for number in blocks[:, 0]]

    def check(self) -> None:
        assert [*self.arena.check(), *self.ranges.check()] == []


@pytest.fixture
def world(driver: CopyingDriver) -> World:
    return World(driver)


def test_slots_lie_one_behind_the_other_in_the_order_asked_for(world: World) -> None:
    """Attention reads blocks in another order, or those of another sequence."""
    orders: Sequence[Sequence[int]] = [(1,), (3, 2, 1), (5, 1, 9, 11, 2), tuple(range(1, SLOTS))]
    shown = [world.ranges.show(slots) for slots in orders]
    assert [world.seen(each) for each in shown] == [[*slots] for slots in orders]
    assert world.ranges.blocks_shown == sum(map(len, orders))
    world.check()


def test_a_shared_slot_is_the_same_memory_everywhere(world: World) -> None:
    """What is written in a slot is missing in a sequence, or a shared prefix is a copy that takes memory."""
    used_bytes = world.driver.used_bytes
    first, second = world.ranges.show((1, 2, 3)), world.ranges.show((1, 2, 4))
    world.write(2, 77)
    world.write(4, 78)
    assert (world.seen(first), world.seen(second)) == ([1, 77, 3], [1, 77, 78])
    assert world.driver.used_bytes == used_bytes
    world.check()


def test_a_shown_slot_is_known_until_the_last_sequence_is_hidden(world: World) -> None:
    """The memory of a prefix goes while one of its sequences still shows it."""
    first, second = world.ranges.show((1, 2)), world.ranges.show((2, 3))
    world.ranges.hide(first)
    assert [slot for slot in range(SLOTS) if world.ranges.shows(slot)] == [2, 3]
    world.ranges.hide(second)
    assert not any(map(world.ranges.shows, range(SLOTS)))
    assert world.ranges.blocks_shown == 0
    with pytest.raises(InvariantError, match="not shown"):
        world.ranges.hide(second)
    world.check()


def test_hidden_memory_is_not_reachable_and_goes_when_the_arena_gives_it_up(world: World) -> None:
    """A sequence that ended still shows its blocks, or keeps the memory of a tier that has shrunk."""
    shown = world.ranges.show((10, 11))
    address = shown.address
    world.ranges.hide(shown)
    assert world.arena.shrink(range(20, 24), lambda slot: True) == [10, 11]
    assert world.arena.trim() == world.driver.memory_info().free_bytes == 4 * PAGE
    world.check()
    if isinstance(world.driver, CudaDriver):
        with pytest.raises(DeviceLost):
            peek(world.driver, address)


def test_ranges_are_used_again(world: World) -> None:
    """Each request pays for reserving addresses, or they run out."""
    first = world.ranges.show((1, 2, 3))
    address = first.address
    world.ranges.hide(first)
    second = world.ranges.show((4, 5, 6, 7))
    assert second.address == address
    assert world.seen(second) == [4, 5, 6, 7]
    assert world.ranges.show((8,)).address != address


def test_only_so_many_ranges_are_kept() -> None:
    """Addresses, of which a process has a number of mappings, are kept for ever."""
    driver = MemfdDriver(2 * SLOTS * PAGE, PAGE)
    world = World(driver)
    shown = [world.ranges.show((1,)) for _ in range(IDLE_RANGES_MAX + 5)]
    for each in shown:
        world.ranges.hide(each)
    assert len(driver._ledger.ranges()) == 1 + IDLE_RANGES_MAX
    driver.close()


def test_a_view_that_outlives_its_sequence_never_sees_the_next_one() -> None:
    """An array somebody forgot shows another request's blocks."""
    driver = MemfdDriver(2 * SLOTS * PAGE, PAGE)
    world = World(driver)
    shown = world.ranges.show((1, 2))
    part = world.ranges.array(shown)[PAGE:].view(np.uint16)
    address = shown.address
    assert (part[0], part[-1]) == (0x0101, 0x0202)
    world.ranges.hide(shown)
    following = world.ranges.show((3, 4))
    assert following.address != address
    assert not part.any()
    with pytest.raises(UsageError, match="not shown any more"):  # asked for while another thread hid it
        world.ranges.array(shown)
    world.check()
    del part
    gc.collect()
    kept = world.ranges.array(following)
    world.ranges.close()
    assert not kept.any()
    driver.close()


def test_what_is_shown_cannot_be_written_through(world: World) -> None:
    """A reader changes a prefix that others share."""
    shown = world.ranges.show((1, 2))
    assert world.ranges.is_read_only
    if isinstance(world.driver, CudaDriver):
        with pytest.raises(DeviceLost):
            poke(world.driver, shown.address, 9)
    else:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [(int(line.split("-")[0], 16), line.split()[1]) for line in lines]
        assert [access for start, access in spans if shown.address <= start < shown.address + STRIDE] == ["r--s"]


def test_more_blocks_than_a_process_may_map_are_refused(driver: CopyingDriver) -> None:
    """A process runs into the kernel's limit of mappings, where anything may fail."""
    world = World(driver, blocks_max=5)
    first = world.ranges.show((1, 2, 3))
    with pytest.raises(OutOfMemory, match="3 blocks more than the 3 shown exceed the 5"):
        world.ranges.show((1, 2, 3))
    world.ranges.show((1, 2))
    world.ranges.hide(first)
    world.ranges.show((1, 2, 3))
    world.check()


@pytest.mark.parametrize("verb", ["reserve", "map", "set_access"])
def test_a_call_that_fails_changes_nothing(world: World, verb: str) -> None:
    """A sequence that could not be mapped stays half mapped, and its memory and addresses are lost."""
    for nth in range(1, 7):
        world.failing.fail(verb, nth)
        try:
            world.ranges.show((1, 2, 3))
        except DriverError:
            assert world.ranges.blocks_shown == 0
            assert len(world.driver._ledger.mappings()) == 2 * SLOTS  # type: ignore[attr-defined]
            assert len(world.driver._ledger.ranges()) <= 2  # type: ignore[attr-defined]
        else:
            break
        world.check()
    assert nth > 1
    world.failing.fail("", 0)
    assert world.seen(world.ranges.show((3, 1))) == [3, 1]


def test_a_failing_unmap_leaves_the_sequence_shown(world: World) -> None:
    """The books say that nobody shows a slot whose memory is still mapped."""
    shown = world.ranges.show((1, 2))
    world.failing.fail("unmap", 1)
    with pytest.raises(DriverError):
        world.ranges.hide(shown)
    assert world.ranges.shows(1)
    world.ranges.hide(shown)
    assert not world.ranges.shows(1)
    world.check()


def test_slots_without_memory_are_refused(world: World) -> None:
    """A sequence has a hole, which a kernel falls into."""
    world.arena.shrink(range(22, 24), lambda slot: True)
    with pytest.raises(InvariantError, match="memory"):
        world.ranges.show((1, SLOTS - 1))
    assert world.ranges.blocks_shown == 0
    assert world.driver.used_bytes == 2 * SLOTS * PAGE
    assert world.seen(world.ranges.show((1, SLOTS - 2))) == [1, SLOTS - 2]


def test_memory_that_goes_from_under_a_sequence_is_found(world: World) -> None:
    """Nobody notices that a sequence shows memory which is no slot's any more."""
    shown = world.ranges.show((1, SLOTS - 1))
    world.arena.shrink(range(22, 24), lambda slot: True)
    assert any("have no memory" in finding for finding in world.ranges.check())
    world.arena.trim()
    assert world.seen(shown) == [1, SLOTS - 1]  # it lives as long as it is mapped
    assert world.driver.used_bytes == 2 * SLOTS * PAGE
    world.ranges.hide(shown)
    assert world.driver.used_bytes == 2 * (SLOTS - 1) * PAGE
    assert world.ranges.check() == []


def test_slots_that_straddle_granules_are_refused() -> None:
    """A sequence shows a part of its neighbour's slot."""
    driver = MemfdDriver(4 * STRIDE, STRIDE)
    with pytest.raises(InvariantError, match="do not divide"):
        SequenceRanges(driver, Arena(driver, stride_bytes=PAGE, slots_reserved=4), None)
    driver.close()


def test_closing_gives_everything_back(world: World) -> None:
    """Addresses and mappings stay behind."""
    world.ranges.show((1, 2, 3))
    world.ranges.hide(world.ranges.show((1, 2)))
    world.ranges.close()
    assert len(world.driver._ledger.ranges()) == 1  # type: ignore[attr-defined]
    world.arena.close()
    assert world.driver.used_bytes == 0


def test_a_lost_device_does_not_stop_the_closing(fake_cuda: FakeCuda) -> None:
    """A tier cannot be closed after its device has failed."""
    driver = CudaDriver()
    arena = Arena(driver, stride_bytes=driver.granule_bytes, slots_reserved=4)
    arena.grow(4 * driver.granule_bytes)
    ranges = SequenceRanges(driver, arena, None)
    shown = ranges.show((1, 2))
    fake_cuda.fault("cuMemUnmap", 700, nth=0)
    with pytest.raises(DeviceLost):
        ranges.hide(shown)
    ranges.close()
    fake_cuda.fault("cuMemUnmap", 700, nth=10**6)  # the fake lets go, so that nothing is left on it
    arena.close()
    driver.close()


def test_any_order_of_showing_and_hiding(world: World) -> None:
    """Counts, ranges and memory part company after some sequence of calls."""
    rng = random.Random(5)
    shown: list[SequenceRange] = []
    for _ in range(60):
        if shown and rng.random() < 0.5:
            world.ranges.hide(shown.pop(rng.randrange(len(shown))))
        else:
            slots = rng.sample(range(1, SLOTS), rng.randint(1, 9))
            shown.append(world.ranges.show(slots))
            assert world.seen(shown[-1]) == slots
        world.check()
    for each in shown:
        assert world.seen(each) == [*each.slots]
    fake = load()
    if isinstance(world.driver, CudaDriver) and isinstance(fake, FakeCuda):
        assert fake.report == ""
