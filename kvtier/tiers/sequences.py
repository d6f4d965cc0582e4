"""Sequences: slots of a top tier shown one behind the other, so that attention needs neither a block table nor a copy.

Owns: the ranges in which they are shown. The tier's lock keeps them and its remaps apart, for a driver has one caller
at a time: callers' threads show and hide, the executor's remaps.
Always:  a slot that is shown keeps its memory. Units: slots (index), bytes.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvtier.allocator.sequence_ranges import SequenceRange, SequenceRanges
from kvtier.notices import say_once

log = logging.getLogger("kvtier")


class Sequences:
    """Any thread may show and hide."""

    def __init__(
        self, name: str, ranges: SequenceRanges, lock: AbstractContextManager[Any], bind_thread: Callable[[], None]
    ) -> None:
        """name: the tier's. lock: held while its memory changes. bind_thread: what a driver's caller does first."""
        self._name = name
        self._ranges = ranges
        self._lock = lock
        self._bind_thread = bind_thread

    def show(self, slots: Sequence[int]) -> SequenceRange:
        """Map slots one behind the other, in this order, until `hide`. The caller holds them. Waits for a remap.

        Raises OutOfMemory beyond what may be shown at a time, DriverError, DeviceLost; then nothing changed.
        """
        with self._lock:
            self._bind_thread()
            shown = self._ranges.show(slots)
            read_only = self._ranges.is_read_only
        if not read_only:
            text = "sequence_views: this device has no read-only mappings; who writes through a view changes the slots"
            say_once(log, f"tier {self._name}", "sequence_views", text)
        return shown

    def hide(self, shown: SequenceRange) -> None:
        """Unmap it; nobody may be reading it. Raises DriverError or DeviceLost: then it is shown as before."""
        with self._lock:
            self._bind_thread()
            self._ranges.hide(shown)

    def array(self, shown: SequenceRange) -> Any:
        """uint8 array [bytes] over all of it, zero-copy: numpy's, which refuses to be written, or CuPy's.

        Raises UsageError once it is hidden, be it this moment.
        """
        with self._lock:
            self._bind_thread()
            memory = self._ranges.array(shown)
        if type(memory).__module__ == "numpy":
            memory.flags.writeable = False
        return memory

    def shows(self, slot: int) -> bool:
        """Whether a slot's memory must stay. The caller has the lock."""
        return self._ranges.shows(slot)

    def check(self) -> list[str]:
        """Recount what is shown."""
        with self._lock:
            return self._ranges.check()

    def close(self) -> None:
        """Hide everything. A view that somebody still holds never shows another's memory."""
        with self._lock:
            self._ranges.close()
