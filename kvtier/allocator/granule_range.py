"""GranuleRange: one reserved address range, granules of which are mapped and unmapped.

Owns: the reservation. What is mapped where is its user's to know; here is how it is done: every run in one call where
the driver has such a call, and undone step by step when a step fails.
Units:   granules (index), bytes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvtier.allocator.driver import Handle, MemoryDriver
from kvtier.allocator.geometry import runs


class GranuleRange:
    """`granules` granules of addresses, aligned; they never move."""

    def __init__(self, driver: MemoryDriver, granules: int) -> None:
        """Reserve them. The driver stays the caller's."""
        self._driver = driver
        self._granule_bytes = driver.granule_bytes
        self.granules = granules
        self._range = driver.reserve(granules * driver.granule_bytes)

    @property
    def address(self) -> int:
        """Where it begins, for ever."""
        return self._range.address

    def view(self) -> Any:
        """uint8 array over the whole range, zero-copy; only attached granules may be indexed."""
        return self._driver.view(self._range)

    @property
    def has_views(self) -> bool:
        """Whether somebody still holds a view: it would see what is attached next."""
        return self._driver.has_views(self._range)

    def attach(self, arriving: Mapping[int, Handle], undo: ExitStack, *, write: bool = True) -> None:
        """Map granules, ascending, and open each run of them in one call; `undo` unmaps them again, one by one."""
        size = self._granule_bytes
        for granule, handle in arriving.items():
            self._driver.map(self._range, granule * size, handle)
            undo.callback(self._driver.unmap, self._range, granule * size, size)
        for run in runs(arriving):
            self._driver.set_access(self._range, run.start * size, len(run) * size, write=write)

    def detach(self, run: range) -> None:
        """Unmap a run in one call."""
        self._driver.unmap(self._range, run.start * self._granule_bytes, len(run) * self._granule_bytes)

    def detach_all(self, leaving: Mapping[int, Handle]) -> None:
        """Unmap granules, run by run; if one fails, those before are mapped again with what they hold."""
        with ExitStack() as undo:
            for run in runs(sorted(leaving)):
                self.detach(run)
                undo.callback(partial(self.attach, {granule: leaving[granule] for granule in run}, ExitStack()))
            undo.pop_all()

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Fill any stretch of attached memory with zeroes."""
        self._driver.zero(self._range, offset_bytes, length_bytes)

    def free(self) -> None:
        """Give the addresses back; nothing is attached any more."""
        self._driver.free_range(self._range)
