"""LRU: whoever was touched longest ago leaves first.

Owns: the order of the resident handles and the size class of each. No ghosts, no adaptation.
Always:  every handle in the queue has the size class of its last FILL; head = next to leave.

Snapshot (little-endian): magic, u32 count, count handles as u32 from head to tail, count size classes as u32,
u32 CRC-32 of everything before it. The CRC keeps a damaged handle from asking for gigabytes of columns.
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Container, Sequence

from kvtier.allocator.free_queue import INDEX_MAX, FreeQueue
from kvtier.errors import InvariantError
from kvtier.policies.base import Access

MAGIC = b"KVTLRU\x00\x01"
SIZE_CLASS_MAX = 2**32 - 1

_HEAD = struct.Struct("<8sI")
_TAIL = struct.Struct("<I")
_CELL_BYTES = 4


class LRU:
    """Policy `lru`. Touching costs O(1) per handle; candidates walk past what is pinned or of another class."""

    def __init__(self) -> None:
        self._order = FreeQueue()
        self._size_class = array("I")  # by handle

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Move handles to the end, in the given order. FILL makes them resident and sets their size class.

        Raises InvariantError for a size class that is not a u32.
        """
        if access is Access.FILL:
            self._fill(handles, size_class)
            return
        for handle in handles:
            if handle in self._order:
                self._order.move_to_back(handle)

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The `count` handles next to leave, first to leave first, or none. Does not change state."""
        chosen: list[int] = []
        if not 0 < count <= len(self._order):
            return chosen
        for handle in self._order:
            if (size_class is None or self._size_class[handle] == size_class) and handle not in pinned:
                chosen.append(handle)
                if len(chosen) == count:
                    return chosen
        return []

    def evict(self, handles: Sequence[int]) -> None:
        """These leave. Raises InvariantError for one that is not resident."""
        for handle in handles:
            self._order.remove(handle)

    def forget(self, handles: Sequence[int]) -> None:
        """These are gone; unknown ones are ignored."""
        for handle in handles:
            if handle in self._order:
                self._order.remove(handle)

    def snapshot(self) -> bytes:
        """The order and the size classes, in the format above."""
        handles = array("I", self._order)
        classes = array("I", [self._size_class[handle] for handle in handles])
        body = _HEAD.pack(MAGIC, len(handles)) + _to_little_endian(handles) + _to_little_endian(classes)
        return body + _TAIL.pack(zlib.crc32(body))

    def restore(self, state: bytes) -> None:
        """Become what `snapshot` saw. Raises ValueError, and changes nothing, if `state` is none of an LRU's."""
        restored = LRU()
        for handle, size_class in _parse(state):
            restored._fill([handle], size_class)
        self._order, self._size_class = restored._order, restored._size_class

    def check(self) -> list[str]:
        """Recount the queue; every member needs a size class."""
        findings = self._order.check()
        if any(handle >= len(self._size_class) for handle in self._order):
            findings.append("lru: a resident handle without a size class")
        return findings

    def _fill(self, handles: Sequence[int], size_class: int) -> None:
        if not 0 <= size_class <= SIZE_CLASS_MAX:
            raise InvariantError(f"lru: size class {size_class} is not within 0 .. {SIZE_CLASS_MAX}")
        for handle in handles:
            if handle in self._order:
                self._order.move_to_back(handle)
            else:
                self._order.push_back(handle)
            missing = handle + 1 - len(self._size_class)
            if missing > 0:
                self._size_class.extend(array("I", [0]) * max(missing, len(self._size_class)))
            self._size_class[handle] = size_class


def _parse(state: bytes) -> list[tuple[int, int]]:
    """Handles with their size classes, from head to tail."""
    if len(state) < _HEAD.size + _TAIL.size:
        raise ValueError(f"not a snapshot of policy lru: only {len(state)} bytes")
    magic, count = _HEAD.unpack_from(state)
    if magic != MAGIC:
        raise ValueError(f"not a snapshot of policy lru: it begins with {magic!r}, not {MAGIC!r}")
    length_bytes = _HEAD.size + 2 * count * _CELL_BYTES + _TAIL.size
    if len(state) != length_bytes:
        raise ValueError(f"damaged snapshot of policy lru: {len(state)} bytes where {length_bytes} belong")
    body = state[: -_TAIL.size]
    if _TAIL.unpack_from(state, len(body))[0] != zlib.crc32(body):
        raise ValueError("damaged snapshot of policy lru: its CRC-32 does not match")
    cells = _from_little_endian(body[_HEAD.size :])
    handles, classes = cells[:count], cells[count:]
    if len(set(handles)) != count or any(handle > INDEX_MAX for handle in handles):
        raise ValueError("damaged snapshot of policy lru: a handle appears twice or is out of range")
    return list(zip(handles, classes, strict=True))


def _to_little_endian(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _from_little_endian(data: bytes) -> "array[int]":
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
