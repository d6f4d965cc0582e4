"""HandlePool: physical memory made ahead of need, one granule a handle.

Owns: the idle handles. Making one costs 20 us on the host and 200 us on a device, so somebody who has the time fills
the pool, and who maps takes from it. Memory that comes back still holds what it held.
Always:  a handle is idle or with its taker, never both. One caller at a time.
Units:   granules, bytes.
"""

from collections.abc import Iterable
from contextlib import ExitStack

from kvtier.allocator.driver import Handle, MemoryDriver
from kvtier.errors import OutOfMemory


class HandlePool:
    """Idle handles of one driver."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._idle: list[Handle] = []

    @property
    def idle(self) -> tuple[Handle, ...]:
        return tuple(self._idle)

    def fill(self, granules: int) -> int:
        """Make handles until so many are idle, or memory has run out. Returns how many are idle.

        Raises DriverError; what was made until then stays.
        """
        while len(self._idle) < granules:
            try:
                self._idle.append(self._driver.create(self._driver.granule_bytes))
            except OutOfMemory:  # a wish, not a need: who takes will be told
                break
        return len(self._idle)

    def take(self, granules: int, undo: ExitStack) -> list[Handle]:
        """So many handles, idle ones first; `undo` gives them back. Raises OutOfMemory, then nothing changed."""
        with ExitStack() as failed:
            taken = self._idle[:granules]
            del self._idle[:granules]
            failed.callback(self.give, list(taken))
            for _ in range(granules - len(taken)):
                taken.append(self._driver.create(self._driver.granule_bytes))
                failed.callback(self._driver.release, taken[-1])
            undo.push(failed.pop_all())
        return taken

    def give(self, handles: Iterable[Handle]) -> None:
        """These are idle from now on. Nothing may be mapped to them."""
        self._idle.extend(handles)

    def trim(self, keep_granules: int = 0) -> int:
        """Give idle memory back to the machine, all but so much. Returns the bytes."""
        freed_bytes = 0
        while len(self._idle) > keep_granules:
            self._driver.release(self._idle[-1])
            freed_bytes += self._idle.pop().length_bytes
        return freed_bytes
