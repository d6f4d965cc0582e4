"""What every memory driver must do, as tests; and a driver that fails when told to.

Enrol a driver: subclass `DriverContract` in a test module and give it a fixture `driver` (a fresh one of at least
`GRANULES` granules of capacity, closed afterwards). Nothing here asks which driver it has, nor touches its memory but
by copies: `poke` and `peek` do that. What copies promise is in `kvtier.testing.streams`.
"""

from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.allocator.driver import Handle, MemoryDriver, Range, SupportsStreams
from kvtier.errors import ClosedError, DriverError, OutOfMemory

GRANULES = 8


class CopyingDriver(MemoryDriver, SupportsStreams, Protocol):
    """What the contracts need: a driver with streams."""


def mapped(driver: MemoryDriver, addresses: Range, granule: int, granules: int = 1) -> Handle:
    """A new handle, mapped at a granule of the range and writable."""
    size = driver.granule_bytes
    handle = driver.create(granules * size)
    driver.map(addresses, granule * size, handle)
    driver.set_access(addresses, granule * size, granules * size, write=True)
    return handle


def pieces(*numbers: int) -> NDArray[np.uint64]:
    """uint64 array, as `Streams.copy` takes it."""
    return np.array(numbers, np.uint64)


def poke(driver: SupportsStreams, address: int, value: int, length_bytes: int = 1) -> None:
    """Fill memory with a byte, by a copy; it is there on return."""
    _move(driver, address, np.full(length_bytes, value, np.uint8), inwards=True)


def peek(driver: SupportsStreams, address: int, length_bytes: int = 1) -> NDArray[np.uint8]:
    """What memory holds, by a copy: uint8 array [length_bytes]."""
    held = np.zeros(length_bytes, np.uint8)
    _move(driver, address, held, inwards=False)
    return held


def _move(driver: SupportsStreams, address: int, held: NDArray[np.uint8], *, inwards: bool) -> None:
    stream = driver.streams.make_stream()
    there, here = pieces(address), pieces(held.ctypes.data)
    driver.streams.copy(*((there, here) if inwards else (here, there)), pieces(len(held)), stream)
    driver.streams.finish(stream)
    driver.streams.drop_stream(stream)


class DriverContract:
    """Each test's first line says what would be broken if it failed."""

    def test_memory_is_where_it_was_mapped(self, driver: CopyingDriver) -> None:
        """Two handles share bytes, or memory is not at the address where it was mapped."""
        size = driver.granule_bytes
        addresses = driver.reserve(3 * size)
        assert addresses.address % size == 0
        mapped(driver, addresses, 0)
        mapped(driver, addresses, 2)
        poke(driver, addresses.address, 1, size)
        poke(driver, addresses.address + 2 * size, 2, size)
        assert np.unique(peek(driver, addresses.address, size)) == [1]
        assert np.unique(peek(driver, addresses.address + 2 * size, size)) == [2]

    def test_content_follows_the_handle(self, driver: CopyingDriver) -> None:
        """A handle that is mapped elsewhere loses its bytes: pooled handles would be worthless."""
        size = driver.granule_bytes
        addresses = driver.reserve(2 * size)
        handle = mapped(driver, addresses, 0)
        poke(driver, addresses.address, 9, size)
        driver.unmap(addresses, 0, size)
        driver.map(addresses, size, handle)
        driver.set_access(addresses, size, size, write=False)
        assert peek(driver, addresses.address + size) == [9]

    def test_one_handle_may_be_mapped_twice(self, driver: CopyingDriver) -> None:
        """Aliased ranges show different bytes."""
        size = driver.granule_bytes
        first, second = driver.reserve(size), driver.reserve(size)
        handle = mapped(driver, first, 0)
        driver.map(second, 0, handle)
        driver.set_access(second, 0, size, write=True)
        poke(driver, first.address + 5, 77)
        assert peek(driver, second.address + 5) == [77]

    def test_any_stretch_can_be_zeroed(self, driver: CopyingDriver) -> None:
        """New slots hold what a former block left, or zeroes spill over their neighbours."""
        size = driver.granule_bytes
        addresses = driver.reserve(3 * size)
        mapped(driver, addresses, 0)
        mapped(driver, addresses, 1)
        poke(driver, addresses.address, 8, 2 * size)
        driver.zero(addresses, size - 3, 10)
        held = peek(driver, addresses.address, 2 * size)
        assert np.flatnonzero(held == 0).tolist() == list(range(size - 3, size + 7))
        with pytest.raises(DriverError):
            driver.zero(addresses, 2 * size - 1, 2)
        with pytest.raises(DriverError):
            driver.zero(addresses, -1, 1)

    def test_memory_outlives_its_handle_until_unmapped(self, driver: CopyingDriver) -> None:
        """Releasing a handle takes memory away from under a mapping, or unmapping leaks it."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        handle = mapped(driver, addresses, 0)
        poke(driver, addresses.address, 5)
        driver.release(handle)
        assert driver.used_bytes == size
        assert peek(driver, addresses.address) == [5]
        driver.unmap(addresses, 0, size)
        assert driver.used_bytes == 0

    def test_capacity_is_a_value_of_its_own_error(self, driver: CopyingDriver) -> None:
        """Running out cannot be told from misuse, a failed create keeps memory, or the books and the device differ."""
        size = driver.granule_bytes
        handles: list[Handle] = []
        total_bytes = driver.memory_info().total_bytes
        with pytest.raises(OutOfMemory):
            handles.extend(iter(lambda: driver.create(size), None))
        assert len(handles) >= GRANULES
        assert driver.used_bytes == len(handles) * size
        assert driver.memory_info() == (total_bytes - driver.used_bytes, total_bytes)
        driver.release(handles.pop())
        assert driver.memory_info().free_bytes == total_bytes - driver.used_bytes
        handles.append(driver.create(size))
        for handle in handles:
            driver.release(handle)
        assert driver.used_bytes == 0
        assert driver.memory_info().free_bytes == total_bytes

    def test_several_mappings_go_in_one_call(self, driver: CopyingDriver) -> None:
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

    def test_misuse_is_refused_and_changes_nothing(self, driver: CopyingDriver) -> None:
        """A wrong call half happens: what it mapped or unmapped is lost to the books."""
        size = driver.granule_bytes
        addresses = driver.reserve(4 * size)
        double = mapped(driver, addresses, 0, 2)
        single = driver.create(size)
        gone = driver.create(size)
        driver.release(gone)
        poke(driver, addresses.address, 3, 2 * size)
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
        assert peek(driver, addresses.address + 2 * size - 1) == [3]
        driver.map(addresses, 2 * size, single)
        with pytest.raises(DriverError):
            driver.unmap(addresses, size, 2 * size)  # begins in the middle of one, though another one ends it
        driver.unmap(addresses, 0, 3 * size)
        driver.release(double)
        driver.free_range(addresses)
        with pytest.raises(DriverError):
            driver.free_range(addresses)

    def test_close_undoes_everything_and_refuses_the_rest(self, driver: CopyingDriver) -> None:
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
            lambda: driver.zero(addresses, size, 1),
            lambda: driver.memory_info(),
            lambda: driver.streams.make_event(),
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
