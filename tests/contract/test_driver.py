"""The memfd driver keeps the contracts of drivers and streams, and gives memory back to the machine."""

import errno
import gc
import os
from collections.abc import Iterator

import pytest

from kvtier.allocator import host_memory
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.errors import DriverError, OutOfMemory
from kvtier.testing.drivers import GRANULES, DriverContract, mapped, peek
from kvtier.testing.fork import in_child, refusals
from kvtier.testing.streams import StreamContract


@pytest.fixture(params=[4096, 2 << 20], ids=["4KiB", "2MiB"])
def driver(request: pytest.FixtureRequest) -> Iterator[MemfdDriver]:
    driver = MemfdDriver(GRANULES * request.param, request.param)
    yield driver
    driver.close()


def accessible(view: memoryview, *, write: bool) -> bool:
    """Let the kernel touch the first byte: it answers EFAULT where we would die."""
    reader, writer = os.pipe()
    try:
        if write:
            os.write(writer, b"x")
            os.readv(reader, [view[:1]])
        else:
            os.write(writer, view[:1])
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(reader)
        os.close(writer)
    return True


class TestMemfdDriver(DriverContract, StreamContract):
    def test_a_view_is_the_memory(self, driver: MemfdDriver) -> None:
        """A view shows something else than what lies in its range."""
        size = driver.granule_bytes
        addresses = driver.reserve(2 * size)
        mapped(driver, addresses, 1)
        view = driver.view(addresses)
        assert view.shape == (2 * size,)
        assert view.ctypes.data == addresses.address
        view[size:] = 4
        assert peek(driver, addresses.address + 2 * size - 1) == [4]

    def test_it_knows_whether_somebody_looks(self, driver: MemfdDriver) -> None:
        """A range is given to another sequence while an array over a part of it still lives."""
        addresses = driver.reserve(2 * driver.granule_bytes)
        assert not driver.has_views(addresses)
        part = memoryview(driver.view(addresses)[3:].view("uint8"))[5:]
        assert driver.has_views(addresses)
        del part
        assert not driver.has_views(addresses)
        driver.free_range(addresses)
        with pytest.raises(DriverError):
            driver.has_views(addresses)

    def test_memory_goes_back_to_the_machine(self, driver: MemfdDriver) -> None:
        """Released memory stays in the file: a shrink would free nothing."""
        size = driver.granule_bytes
        addresses = driver.reserve(4 * size)
        handles = [mapped(driver, addresses, granule) for granule in range(4)]
        assert os.fstat(driver.fd).st_blocks * 512 == 4 * size
        for handle in handles[:3]:
            driver.release(handle)
        driver.unmap(addresses, 0, 2 * size)
        assert os.fstat(driver.fd).st_blocks * 512 == 2 * size

    def test_access_is_what_was_set(self, driver: MemfdDriver) -> None:
        """Unmapped or read-only memory can be written to: bugs show on the device only."""
        size = driver.granule_bytes
        addresses = driver.reserve(2 * size)
        view = memoryview(driver.view(addresses))
        assert not accessible(view, write=False)
        driver.map(addresses, 0, driver.create(size))
        assert not accessible(view, write=False)
        driver.set_access(addresses, 0, size, write=False)
        assert accessible(view, write=False)
        assert not accessible(view, write=True)
        driver.set_access(addresses, 0, size, write=True)
        assert accessible(view, write=True)
        assert not accessible(view[size:], write=False)
        driver.unmap(addresses, 0, size)
        assert not accessible(view, write=False)

    def test_new_memory_is_present(self, driver: MemfdDriver) -> None:
        """The first touch of a slot costs page faults, in the hot path."""
        if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
            pytest.skip("this kernel cannot fill page tables ahead of need")
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        mapped(driver, addresses, 0)
        view = driver.view(addresses)
        before = resident_faults()
        view[:] = 1
        assert resident_faults() - before < size // 4096 // 4 + 8

    def test_a_view_that_outlives_its_range_sees_zeroes(
        self, driver: MemfdDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stale view reads or writes memory that belongs to somebody else by now, or kills the process."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        unmapped: list[tuple[int, int]] = []
        monkeypatch.setattr(host_memory, "unmap_memory", lambda *span: unmapped.append(span))
        mapped(driver, addresses, 0)
        view = driver.view(addresses)[1:]
        view[:] = 8
        driver.close()
        assert not view.any()
        view[0] = 1
        assert unmapped == []
        del view
        gc.collect()
        assert unmapped == [(addresses.address, size)]

    def test_a_forked_child_is_refused_and_harms_nothing(self, driver: MemfdDriver) -> None:
        """A child changes or frees the memory of its parent."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        mapped(driver, addresses, 0)
        driver.view(addresses)[:] = 6

        def child() -> int:
            calls = (lambda: driver.create(size), lambda: driver.view(addresses), lambda: driver.fd)
            refused = refusals(calls)
            driver.close()
            return refused

        assert in_child(child) == 3
        assert int(driver.view(addresses)[size - 1]) == 6

    def test_a_machine_without_memory_says_so(self, driver: MemfdDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine that runs out looks like a broken driver, and what was had before stays taken."""

        def allocate(fd: int, offset: int, length_bytes: int) -> None:
            os.posix_fallocate(fd, offset, 4096)
            raise DriverError("fallocate", errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(host_memory, "allocate", allocate)
        with pytest.raises(OutOfMemory, match="the machine has no"):
            driver.create(driver.granule_bytes)
        assert driver.used_bytes == 0
        assert os.fstat(driver.fd).st_blocks == 0


def test_a_granule_is_whole_pages() -> None:
    """Memory is mapped at addresses that the kernel refuses, far from the mistake."""
    with pytest.raises(DriverError, match="multiple of"):
        MemfdDriver(1 << 20, 5000)


def resident_faults() -> int:
    """Minor page faults of this process so far."""
    with open("/proc/self/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[7])
