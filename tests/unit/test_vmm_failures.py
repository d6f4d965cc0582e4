"""Arena: changes happen wholly or not at all, whatever the driver refuses."""

from collections.abc import Callable

import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.vmm import Arena
from kvtier.errors import DeviceLost, DriverError
from kvtier.testing.drivers import CopyingDriver, FailingDriver
from tests.arena_bench import PAGE, arena_on, content, driver, machine_bytes, write
from tests.fakecuda.fake import FakeCuda, fake_cuda

__all__ = ["driver", "fake_cuda"]


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
