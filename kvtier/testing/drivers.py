"""What every memory driver must do, as tests; and a driver that fails when told to.

Enrol a driver: subclass `DriverContract` in a test module and give it a fixture `driver` (a fresh one of at least
`GRANULES` granules of capacity, closed afterwards). Nothing here asks which driver it has.
"""

from typing import Any

import pytest

from kvtier.allocator.driver import Handle, MemoryDriver, Range
from kvtier.errors import ClosedError, DriverError, OutOfMemory

GRANULES = 8


def mapped(driver: MemoryDriver, addresses: Range, granule: int, granules: int = 1) -> Handle:
    """A new handle, mapped at a granule of the range and writable."""
    size = driver.granule_bytes
    handle = driver.create(granules * size)
    driver.map(addresses, granule * size, handle)
    driver.set_access(addresses, granule * size, granules * size, write=True)
    return handle


class DriverContract:
    """Each test's first line says what would be broken if it failed."""

    def test_memory_is_where_it_was_mapped(self, driver: MemoryDriver) -> None:
        """Two handles share bytes, or a view does not show what lies in its range."""
        size = driver.granule_bytes
        addresses = driver.reserve(3 * size)
        assert addresses.address % size == 0
        mapped(driver, addresses, 0)
        mapped(driver, addresses, 2)
        view = driver.view(addresses)
        assert view.shape == (3 * size,)
        view[:size] = 1
        view[2 * size :] = 2
        assert {int(view[0]), int(view[size - 1])} == {1}
        assert {int(view[2 * size]), int(view[-1])} == {2}

    def test_content_follows_the_handle(self, driver: MemoryDriver) -> None:
        """A handle that is mapped elsewhere loses its bytes: pooled handles would be worthless."""
        size = driver.granule_bytes
        addresses = driver.reserve(2 * size)
        handle = mapped(driver, addresses, 0)
        driver.view(addresses)[:size] = 9
        driver.unmap(addresses, 0, size)
        driver.map(addresses, size, handle)
        driver.set_access(addresses, size, size, write=False)
        assert int(driver.view(addresses)[size]) == 9

    def test_one_handle_may_be_mapped_twice(self, driver: MemoryDriver) -> None:
        """Aliased views show different bytes."""
        size = driver.granule_bytes
        first, second = driver.reserve(size), driver.reserve(size)
        handle = mapped(driver, first, 0)
        driver.map(second, 0, handle)
        driver.set_access(second, 0, size, write=True)
        driver.view(first)[5] = 77
        assert int(driver.view(second)[5]) == 77

    def test_memory_outlives_its_handle_until_unmapped(self, driver: MemoryDriver) -> None:
        """Releasing a handle takes memory away from under a mapping, or unmapping leaks it."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        handle = mapped(driver, addresses, 0)
        driver.view(addresses)[0] = 5
        driver.release(handle)
        assert driver.used_bytes == size
        assert int(driver.view(addresses)[0]) == 5
        driver.unmap(addresses, 0, size)
        assert driver.used_bytes == 0

    def test_capacity_is_a_value_of_its_own_error(self, driver: MemoryDriver) -> None:
        """Running out cannot be told from misuse, or a failed create keeps memory."""
        size = driver.granule_bytes
        handles: list[Handle] = []
        with pytest.raises(OutOfMemory):
            handles.extend(iter(lambda: driver.create(size), None))
        assert len(handles) >= GRANULES
        assert driver.used_bytes == len(handles) * size
        driver.release(handles.pop())
        handles.append(driver.create(size))
        for handle in handles:
            driver.release(handle)
        assert driver.used_bytes == 0

    def test_several_mappings_go_in_one_call(self, driver: MemoryDriver) -> None:
        """A contiguous run cannot be unmapped at once."""
        size = driver.granule_bytes
        addresses = driver.reserve(4 * size)
        for granule, granules in ((0, 1), (1, 2), (3, 1)):
            driver.release(mapped(driver, addresses, granule, granules))
        driver.unmap(addresses, 0, 3 * size)
        assert driver.used_bytes == size
        driver.unmap(addresses, 3 * size, size)
        assert driver.used_bytes == 0
        driver.free_range(addresses)

    def test_misuse_is_refused_and_changes_nothing(self, driver: MemoryDriver) -> None:
        """A wrong call half happens: what it mapped or unmapped is lost to the books."""
        size = driver.granule_bytes
        addresses = driver.reserve(4 * size)
        double = mapped(driver, addresses, 0, 2)
        single = driver.create(size)
        gone = driver.create(size)
        driver.release(gone)
        driver.view(addresses)[: 2 * size] = 3
        for call, *arguments in (
            (driver.reserve, size + 1),
            (driver.create, 0),
            (driver.create, size // 2),
            (driver.map, addresses, size, single),  # over a mapping
            (driver.map, addresses, 4 * size, single),  # beyond the range
            (driver.map, addresses, 1, single),
            (driver.map, addresses, 2 * size, gone),
            (driver.unmap, addresses, 0, size),  # half of a mapping
            (driver.unmap, addresses, size, size),
            (driver.unmap, addresses, 0, 3 * size),  # the last granule is not mapped
            (driver.release, gone),
            (driver.free_range, addresses),  # something is mapped
        ):
            with pytest.raises(DriverError):
                call(*arguments)
        with pytest.raises(DriverError):
            driver.set_access(addresses, size, 2 * size, write=True)
        assert driver.used_bytes == 3 * size
        assert int(driver.view(addresses)[2 * size - 1]) == 3
        driver.map(addresses, 2 * size, single)
        driver.unmap(addresses, 0, 3 * size)
        driver.release(double)
        driver.free_range(addresses)
        with pytest.raises(DriverError):
            driver.free_range(addresses)

    def test_close_undoes_everything_and_refuses_the_rest(self, driver: MemoryDriver) -> None:
        """Memory stays taken after close, or a closed driver hands out more."""
        size = driver.granule_bytes
        addresses = driver.reserve(2 * size)
        handle = mapped(driver, addresses, 1)
        driver.create(size)
        driver.close()
        driver.close()
        assert driver.used_bytes == 0
        for call in (
            lambda: driver.reserve(size),
            lambda: driver.create(size),
            lambda: driver.release(handle),
            lambda: driver.view(addresses),
        ):
            with pytest.raises(ClosedError):
                call()


class FailingDriver:
    """A driver that holds a driver, and fails the n-th call of one verb from now on, without doing it."""

    def __init__(self, inner: MemoryDriver) -> None:
        self._inner = inner
        self._verb = ""
        self._calls_left = 0

    def fail(self, verb: str, calls: int) -> None:
        """The `calls`-th call of `verb` from now on raises DriverError, once."""
        self._verb, self._calls_left = verb, calls

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._inner, verb)
        if verb != self._verb or self._calls_left == 0:
            return found
        self._calls_left -= 1
        if self._calls_left:
            return found

        def failing(*_arguments: object, **_options: object) -> None:
            raise DriverError(verb, 999, "failed on request")

        return failing
