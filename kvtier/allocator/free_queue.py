"""FreeQueue: an ordered set of small integers, each reachable in constant time.

Owns: the order, nothing else. The same queue keeps the free slots of a pool and the handles of policy `lru`.
Always:  next[prev[i]] == i == prev[next[i]] for every member; members are reachable from the sentinel both ways.
Units:   indexes, 0 <= index <= INDEX_MAX. Eight bytes per index ever pushed, no object per member.

A ring through a sentinel needs no branch for an empty queue, a head or a tail. The sentinel takes cell 0, hence
index i lives in cell i + 1.
"""

from array import array
from collections.abc import Iterator

from kvtier.errors import InvariantError

INDEX_MAX = 2**31 - 3  # its cell number must fit a signed 32-bit integer

_SENTINEL = 0
_ABSENT = -1


class FreeQueue:
    """Doubly linked list over two columns that grow by doubling. All verbs are O(1) but iteration and `check`."""

    def __init__(self, indexes: int = 0) -> None:
        """An empty queue with room for 0 .. indexes-1 (more is made when it is needed)."""
        self._next = array("i", [_ABSENT]) * (indexes + 1)
        self._prev = array("i", [_ABSENT]) * (indexes + 1)
        self._next[_SENTINEL] = self._prev[_SENTINEL] = _SENTINEL
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and 0 <= index < len(self._next) - 1 and self._next[index + 1] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """From head to tail. The queue must not change meanwhile."""
        following = self._next
        cell = following[_SENTINEL]
        while cell != _SENTINEL:
            yield cell - 1
            cell = following[cell]

    def push_back(self, index: int) -> None:
        """Append. Raises InvariantError if `index` is a member already, or no index at all."""
        self._link(self._new_cell(index), before=_SENTINEL)

    def push_front(self, index: int) -> None:
        """Prepend. Raises InvariantError if `index` is a member already, or no index at all."""
        self._link(self._new_cell(index), before=self._next[_SENTINEL])

    def pop_front(self) -> int | None:
        """Take the head out; None from an empty queue."""
        if self._len == 0:
            return None
        cell = self._next[_SENTINEL]
        self._unlink(cell)
        return cell - 1

    def remove(self, index: int) -> None:
        """Take out any member. Raises InvariantError if it is none."""
        self._unlink(self._cell(index))

    def move_to_back(self, index: int) -> None:
        """Make a member the tail. Raises InvariantError if it is none."""
        cell = self._cell(index)
        self._unlink(cell)
        self._link(cell, before=_SENTINEL)

    def check(self) -> list[str]:
        """Walk both ways and count the columns."""
        forward = self._walk(self._next)
        backward = self._walk(self._prev)
        findings = []
        if forward is None or backward is None:
            return ["free queue: the ring does not close"]
        if forward != backward[::-1]:
            findings.append("free queue: the two directions disagree")
        linked = sum(cell != _ABSENT for cell in self._next) - 1
        if not len(forward) == linked == self._len:
            findings.append(f"free queue: {len(forward)} reachable, {linked} linked, {self._len} counted")
        return findings

    def _cell(self, index: int) -> int:
        if index not in self:
            raise InvariantError(f"free queue: {index} is not a member")
        return index + 1

    def _new_cell(self, index: int) -> int:
        if index in self:
            raise InvariantError(f"free queue: {index} is a member already")
        if not 0 <= index <= INDEX_MAX:
            raise InvariantError(f"free queue: {index} is not within 0 .. {INDEX_MAX}")
        missing = index + 2 - len(self._next)
        if missing > 0:
            spare = array("i", [_ABSENT]) * max(missing, len(self._next))
            self._next.extend(spare)
            self._prev.extend(spare)
        return index + 1

    def _link(self, cell: int, before: int) -> None:
        after = self._prev[before]
        self._next[after] = self._prev[before] = cell
        self._prev[cell] = after
        self._next[cell] = before
        self._len += 1

    def _unlink(self, cell: int) -> None:
        after, before = self._prev[cell], self._next[cell]
        self._next[after] = before
        self._prev[before] = after
        self._next[cell] = self._prev[cell] = _ABSENT
        self._len -= 1

    def _walk(self, column: "array[int]") -> list[int] | None:
        """The members in the order of `column`; None if it leaves the ring or does not come back."""
        cells: list[int] = []
        cell = column[_SENTINEL]
        while cell != _SENTINEL:
            if cell == _ABSENT or len(cells) >= len(column):
                return None
            cells.append(cell)
            cell = column[cell]
        return cells
