"""Which block has which handle: the one key dict of the engine, and what of a block is the same in every tier.

Owns: StoreKey -> handle, and by handle the key, the length, whether the block was used again, and by which sessions.
Always: a handle with
a name is in use. A handle is a small integer. It is used again once its block has no copy left and no policy remembers
it; whoever keeps one across calls holds a copy of it, so that it cannot be.

Units: handles, bytes. Columns are `array`s (a Python object per block costs 300 bytes and 2.6 s per million); they grow
by a quarter.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.types import StoreKey

ROWS_FIRST = 1024
NOBODY, SEVERAL = 0, 2**32 - 1  # instead of a session's number
NO_KEY = StoreKey(b"")


class Names:
    """Handles given, and given back. Whoever derives from it has columns of its own grow with these."""

    def __init__(self) -> None:
        self._handles: dict[StoreKey, int] = {}
        self._keys: list[StoreKey] = []  # an overtaken handle keeps its key, but the dict does not name it
        self._rows = 0  # handles ever given
        self._unused = array("I")  # handles given back
        self._columns: list[tuple[array[int], int]] = []  # and what is in the bytes of a new row
        self._length = self._column("I")
        self._reused = self._column("B")
        self._refused = self._column("B")  # the tier that did not want it since it was last used; 0: none
        self._session = self._column("I", NOBODY)  # the only one that has named it, by a number

    def begin(
        self,
        keys: Sequence[StoreKey],
        lengths: NDArray[np.uint32],
        handles: NDArray[np.int64],
        ghosts: Mapping[int, tuple[StoreKey, int]],
    ) -> list[int]:
        """Give the first names, all at once: keys[i], of lengths[i] bytes, has handles[i], no two the same.

        ghosts: more of them, by handle, with key and length. Returns those whose key has another handle, or whose
        handle another key: they got none. Handles in between that nobody got are free.
        """
        self._rows = 1 + max(int(handles.max(initial=-1)), max(ghosts, default=-1))
        self._lengthen(self._rows)
        numbers = handles.tolist()
        self._handles = dict(zip(keys, numbers, strict=True))
        for handle, key in zip(numbers, keys, strict=True):
            self._keys[handle] = key
        self._set(self._length, handles, lengths)
        refused = []
        for handle, (key, length_bytes) in ghosts.items():
            if self._keys[handle] != NO_KEY or self._handles.setdefault(key, handle) != handle:
                refused.append(handle)
            else:
                self._keys[handle] = key
                self._length[handle] = length_bytes
        if self._rows > len(self._handles):
            self._unused.extend(handle for handle in range(self._rows) if self._keys[handle] == NO_KEY)
        return refused

    def __len__(self) -> int:
        """Names: blocks that can be found, and ghosts, of which only some policy still knows."""
        return len(self._handles)

    def find(self, key: StoreKey) -> int | None:
        return self._handles.get(key)

    def admit(self, key: StoreKey, length_bytes: int) -> int:
        """The handle of `key`, a new one if it has none."""
        handle = self._handles.get(key)
        if handle is None:
            handle = self._unused.pop() if self._unused else self._new_row()
            self._handles[key] = handle
            self._keys[handle] = key
            self._length[handle] = length_bytes
            self._reused[handle] = False
            self._session[handle] = NOBODY
            self._refused[handle] = 0
        return handle

    def key(self, handle: int) -> StoreKey:
        """The block's name, even after it was overtaken (`is_named`)."""
        return self._keys[handle]

    def is_named(self, handle: int) -> bool:
        """False once a drop or reset has overtaken the block: no lookup finds this handle."""
        return self._handles.get(self._keys[handle]) == handle

    def length_bytes(self, handle: int) -> int:
        return self._length[handle]

    def keys_of(self, handles: Iterable[int]) -> list[StoreKey]:
        """As `key`, for each."""
        keys = self._keys
        return [keys[handle] for handle in handles]

    def lengths_of(self, handles: Sequence[int]) -> NDArray[np.uint32]:
        """As `length_bytes`, for each."""
        return np.frombuffer(self._length, np.uint32)[handles]

    def handles(self) -> Iterator[int]:
        """All handles that have a name. Do not change the directory while iterating."""
        return iter(self._handles.values())

    def unname(self, handle: int) -> None:
        """Nobody finds the block under its key any more; its copies live on until they are let go."""
        if self.is_named(handle):
            del self._handles[self._keys[handle]]

    def retire(self, handle: int) -> None:
        """Give the handle back, of which no copy is left. Nothing happens to one that was."""
        if self._keys[handle] != NO_KEY:
            self.unname(handle)
            self._keys[handle] = NO_KEY
            self._unused.append(handle)

    def note_reuse(self, handles: Iterable[int]) -> None:
        """A lookup found these blocks and a lease uses them: their frequency is known in every tier from now on."""
        for handle in handles:
            self._reused[handle] = True

    def was_reused(self, handle: int) -> bool:
        return bool(self._reused[handle])

    def note_session(self, handles: Iterable[int], number: int) -> None:
        """A session, by a number that is neither NOBODY nor SEVERAL, has used these blocks."""
        sessions = self._session
        for handle in handles:
            if sessions[handle] != number:
                sessions[handle] = number if sessions[handle] == NOBODY else SEVERAL

    def is_shared(self, handle: int) -> bool:
        """Whether more than one session has used it since it became known."""
        return self._session[handle] == SEVERAL

    def _column(self, typecode: str, fill: int = 0) -> "array[int]":
        """A column that has a cell for every handle; each byte of a new cell is `fill`."""
        column: array[int] = array(typecode)
        self._columns.append((column, fill))
        return column

    def _set(self, column: "array[int]", handles: NDArray[np.int64], cells: Any) -> None:
        """Write many cells of a column, or the same into all."""
        np.frombuffer(column, column.typecode)[handles] = cells  # no view outlives a call: the column could not grow

    def _new_row(self) -> int:
        row = self._rows
        if row == len(self._keys):
            self._lengthen(max(ROWS_FIRST, row // 4))
        self._rows += 1
        return row

    def _lengthen(self, rows: int) -> None:
        self._keys.extend([NO_KEY] * rows)
        for column, fill in self._columns:
            column.frombytes(bytes([fill]) * (rows * column.itemsize))
