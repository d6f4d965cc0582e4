"""Rings: small integers in several orders, each integer in at most one of them and reachable in constant time.

Owns: the orders, nothing else. A policy keeps its lists of handles in one; `FreeQueue` is the case of a single ring.
Always:  next[prev[cell]] == cell == prev[next[cell]] all around each ring; `where[index]` names the ring of a member
         and is NOWHERE for any other index, whose links mean nothing; `lens[ring]` counts the members.
Units:   indexes, 0 <= index <= INDEX_MAX. Nine bytes per index up to the largest one seen, no object per member.

A ring through a sentinel needs no branch for an empty ring, a head or a tail. Rings are numbered from 1, so that new
cells, which are zero, are nowhere. The sentinel of ring r is cell r, and index i lives in cell i + rings + 1.
"""

from array import array
from collections.abc import Container, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import InvariantError

NOWHERE = 0
RINGS_MAX = 15
INDEX_MAX = 2**31 - 2 - RINGS_MAX  # its cell number must fit a signed 32-bit integer


class Rings:
    """Doubly linked lists over one pair of columns. Verbs cost O(1) per index, but for walking and `check`.

    `where` and `lens` may be read directly, where a call per index would cost more than the answer.
    """

    def __init__(self, rings: int, indexes: int = 0) -> None:
        """Empty rings 1 .. `rings` with room for 0 .. indexes-1 (more is made when it is needed)."""
        self._first_cell = rings + 1
        self._next = array("i", range(self._first_cell))  # a sentinel alone follows itself
        self._prev = array("i", range(self._first_cell))
        self.where = bytearray()
        self.lens = [0] * self._first_cell
        if indexes:
            self._make_room(indexes - 1)

    def ring_of(self, index: int) -> int:
        """The ring that has it, or NOWHERE."""
        return self.where[index] if 0 <= index < len(self.where) else NOWHERE

    def walk(self, ring: int) -> Iterator[int]:
        """The members from head to tail. The ring must not change meanwhile."""
        following, first_cell = self._next, self._first_cell
        cell = following[ring]
        while cell != ring:
            yield cell - first_cell
            cell = following[cell]

    def members(self, ring: int) -> NDArray[np.int32]:
        """As `walk`, all at once."""
        return np.fromiter(self.walk(ring), np.int32, self.lens[ring])

    def walk_back(self, ring: int) -> Iterator[int]:
        """The members from tail to head. The ring must not change meanwhile."""
        preceding, first_cell = self._prev, self._first_cell
        cell = preceding[ring]
        while cell != ring:
            yield cell - first_cell
            cell = preceding[cell]

    def move(self, indexes: Iterable[int], ring: int, sources: Container[int] | None = None) -> None:
        """Each becomes the tail of `ring`, in the given order, wherever it was before.

        sources: only those in one of these rings, the others are passed over. None: all, and those that are nowhere
        become members; raises InvariantError at the first that is no index.
        """
        following, preceding, where, lens = self._next, self._prev, self.where, self.lens
        first_cell, known = self._first_cell, len(where)
        tail = preceding[ring]  # what closes the ring, next[tail] and prev[ring], is written once, at the end
        try:
            for index in indexes:
                if not 0 <= index < known:
                    if sources is not None:
                        continue
                    self._make_room(index)
                    known = len(where)
                left = where[index]
                if sources is not None and left not in sources:
                    continue
                cell = index + first_cell
                if left:
                    if cell == tail:
                        continue
                    before, after = preceding[cell], following[cell]
                    following[before] = after
                    preceding[after] = before
                if left != ring:
                    where[index] = ring
                    lens[ring] += 1
                    if left:
                        lens[left] -= 1
                following[tail] = cell
                preceding[cell] = tail
                tail = cell
        finally:
            following[tail] = ring
            preceding[ring] = tail

    def fill(self, ring: int, indexes: NDArray[np.integer]) -> None:
        """As `move`, many at once: indexes that are nowhere, each there once."""
        if not len(indexes):
            return
        top = int(indexes.max())
        if top >= len(self.where):
            self._make_room(top)
        cells = indexes.astype(np.int32) + self._first_cell
        following, preceding = np.frombuffer(self._next, np.int32), np.frombuffer(self._prev, np.int32)
        before = np.concatenate(([preceding[ring]], cells[:-1]))
        following[before], preceding[cells] = cells, before
        following[cells[-1]], preceding[ring] = ring, cells[-1]
        np.frombuffer(self.where, np.uint8)[indexes] = ring
        self.lens[ring] += len(indexes)

    def marked(self, indexes: NDArray[np.integer], rings: Container[int]) -> NDArray[np.bool_]:
        """Which of these are members of one of those rings."""
        known = indexes < len(self.where)
        wanted = np.array([ring in rings for ring in range(256)], np.bool_)
        known[known] = wanted[np.frombuffer(self.where, np.uint8)[indexes[known]]]
        return known

    def remove(self, index: int) -> None:
        """Take out a member. Raises InvariantError if it is none."""
        self.remove_all((index,))

    def remove_all(self, indexes: Iterable[int]) -> None:
        """Take out members, one after the other. Raises InvariantError at the first that is none."""
        following, preceding, where, lens = self._next, self._prev, self.where, self.lens
        first_cell, known = self._first_cell, len(where)
        for index in indexes:
            ring = where[index] if 0 <= index < known else NOWHERE
            if ring == NOWHERE:
                raise InvariantError(f"rings: {index} is not a member")
            cell = index + first_cell
            before, after = preceding[cell], following[cell]
            following[before] = after
            preceding[after] = before
            where[index] = NOWHERE
            lens[ring] -= 1

    def pop(self, ring: int) -> int | None:
        """Take out the head; None from an empty ring."""
        cell = self._next[ring]
        if cell == ring:
            return None
        index = cell - self._first_cell
        self._next[ring] = after = self._next[cell]
        self._prev[after] = ring
        self.where[index] = NOWHERE
        self.lens[ring] -= 1
        return index

    def check(self) -> list[str]:
        """Walk each ring both ways and count its members."""
        findings = []
        for ring in range(1, self._first_cell):
            forward, backward = self._cells(self._next, ring), self._cells(self._prev, ring)
            if forward is None or backward is None:
                findings.append(f"ring {ring}: it does not close")
                continue
            if forward != backward[::-1]:
                findings.append(f"ring {ring}: the two directions disagree")
            marked = self.where.count(ring)
            if not len(forward) == marked == self.lens[ring]:
                findings.append(f"ring {ring}: {len(forward)} linked, {marked} marked, {self.lens[ring]} counted")
        return findings

    def _make_room(self, index: int) -> None:
        cells = grown(len(self.where), index)
        self.where.extend(bytes(cells - len(self.where)))
        for column in (self._next, self._prev):
            stretch(column, cells + self._first_cell)

    def _insert(self, index: int, ring: int, before: int) -> None:
        """An index that is nowhere becomes a member, in front of the cell `before`."""
        if self.ring_of(index) != NOWHERE:
            raise InvariantError(f"rings: {index} is a member already")
        if not 0 <= index < len(self.where):
            self._make_room(index)
        cell, behind = index + self._first_cell, self._prev[before]
        self._next[behind] = self._prev[before] = cell
        self._prev[cell] = behind
        self._next[cell] = before
        self.where[index] = ring
        self.lens[ring] += 1

    def _cells(self, column: "array[int]", ring: int) -> list[int] | None:
        """The members' cells in the order of `column`; None if it leaves the ring or does not come back."""
        cells: list[int] = []
        cell = column[ring]
        while cell != ring:
            if self.ring_of(cell - self._first_cell) != ring or len(cells) >= len(column):
                return None
            cells.append(cell)
            cell = column[cell]
        return cells


def grown(cells: int, index: int) -> int:
    """How long a column of so many cells becomes to have one for `index`: a quarter longer, if that is enough.

    So appending costs O(1) each, and little is wasted. Raises InvariantError for what is no index.
    """
    if not 0 <= index <= INDEX_MAX:
        raise InvariantError(f"rings: {index} is not within 0 .. {INDEX_MAX}")
    return max(index + 1, cells + cells // 4)


def stretch(column: "array[int]", cells: int) -> None:
    """Append zeros until `column` has so many cells."""
    column.frombytes(bytes(column.itemsize * (cells - len(column))))
