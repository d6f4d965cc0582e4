"""SizeClasses: the size class of each handle that a policy knows.

Owns: one column of u32, by handle. What a handle had when it was last assigned one stays there after it left.
Units:   bytes, rounded by whoever assigns them; handles.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import filterfalse

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import grown, stretch
from kvtier.errors import InvariantError
from kvtier.policies.orders import LONG_BATCH

SIZE_CLASS_MAX = 2**32 - 1


class SizeClasses:
    """Four bytes per handle up to the largest one seen."""

    def __init__(self) -> None:
        self._column = array("I")

    def __len__(self) -> int:
        """Handles below this one have a cell."""
        return len(self._column)

    def of(self, handles: NDArray[np.integer]) -> NDArray[np.uint32]:
        """Those of these handles, which must have a cell."""
        sizes: NDArray[np.uint32] = np.frombuffer(self._column, np.uint32)[handles]
        return sizes

    def assign(self, handles: Sequence[int] | NDArray[np.int64], size_class: int) -> None:
        """These have this size class. Raises InvariantError if it is not a u32, or one of them no handle."""
        if not 0 <= size_class <= SIZE_CLASS_MAX:
            raise InvariantError(f"size class {size_class} is not within 0 .. {SIZE_CLASS_MAX}")
        if len(handles) >= LONG_BATCH:
            self.assign_each(np.asarray(handles, np.int64), size_class)
            return
        column = self._column
        cells = len(column)
        for handle in handles:
            if not 0 <= handle < cells:
                stretch(column, grown(cells, handle))
                cells = len(column)
            column[handle] = size_class

    def assign_each(self, handles: NDArray[np.integer], size_classes: NDArray[np.integer] | int) -> None:
        """As `assign`, a size class of its own for each."""
        if len(handles):
            lowest, top = int(handles.min()), int(handles.max())
            if lowest < 0 or top >= len(self._column):
                stretch(self._column, grown(len(self._column), lowest if lowest < 0 else top))
            np.frombuffer(self._column, np.uint32)[handles] = size_classes

    def of_residents(self, handles: NDArray[np.int64], resident: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Those of these handles, -1 for one that is not resident."""
        sizes = np.full(len(handles), -1, np.int64)
        sizes[resident] = np.frombuffer(self._column, np.uint32)[handles[resident]]
        return sizes

    def eligible(self, handles: Iterator[int], pinned: Container[int], size_class: int | None) -> Iterator[int]:
        """Those of `handles` that are not pinned and of that class (None: any), in order, none sought in advance."""
        if size_class is None:
            return handles if pinned == () else filterfalse(pinned.__contains__, handles)
        column = self._column
        return (handle for handle in handles if column[handle] == size_class and handle not in pinned)
