"""FreeQueue: an ordered set of small integers, such as the free slots of a pool.

Owns: the order, nothing else. Always: what `Rings` promises, for its only ring.
Units:   indexes, 0 <= index <= INDEX_MAX.
"""

from collections.abc import Iterator

from kvtier.allocator.rings import Rings
from kvtier.errors import InvariantError

_RING = 1


class FreeQueue(Rings):
    """A single ring that can be fed at both ends. All verbs are O(1) but iteration and `check`."""

    def __init__(self, indexes: int = 0) -> None:
        """An empty queue with room for 0 .. indexes-1 (more is made when it is needed)."""
        super().__init__(_RING, indexes)

    def __len__(self) -> int:
        return self.lens[_RING]

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.ring_of(index) == _RING

    def __iter__(self) -> Iterator[int]:
        """From head to tail. The queue must not change meanwhile."""
        return self.walk(_RING)

    def push_back(self, index: int) -> None:
        """Append. Raises InvariantError if `index` is a member already, or no index at all."""
        self._insert(index, _RING, before=_RING)

    def push_front(self, index: int) -> None:
        """Prepend. Raises InvariantError if `index` is a member already, or no index at all."""
        self._insert(index, _RING, before=self._next[_RING])

    def pop_front(self) -> int | None:
        """Take the head out; None from an empty queue."""
        return self.pop(_RING)

    def move_to_back(self, index: int) -> None:
        """Make a member the tail. Raises InvariantError if it is none."""
        if index not in self:
            raise InvariantError(f"free queue: {index} is not a member")
        self.move((index,), _RING)
