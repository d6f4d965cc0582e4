"""The bytes of a policy's snapshot: the frame that all of them share.

Little-endian: magic (8 bytes), the policy's own head (of fixed length), for each of its columns a u32 count, the
cells of the columns one after the other as u32, u32 CRC-32 of everything before it. The CRC keeps a damaged handle
from asking for gigabytes of columns.
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import INDEX_MAX

_MAGIC_BYTES = 8
_CELL_BYTES = 4
_CRC = struct.Struct("<I")
NO_NAME = -(2**31)


class SnapshotFormat:
    """Packs and unpacks the snapshots of one policy. Everything wrong with one is a ValueError that says so."""

    def __init__(self, policy: str, magic: bytes, head: str, columns: int) -> None:
        """head: what `struct` calls the fields of the policy's own, in little-endian order."""
        assert len(magic) == _MAGIC_BYTES
        self._policy = policy
        self._magic = magic
        self._head = struct.Struct("<" + head)
        self._counts = struct.Struct(f"<{columns}I")
        self._cells_at = _MAGIC_BYTES + self._head.size + self._counts.size

    def pack(self, head: Sequence[Any], columns: Sequence[Sequence[int] | NDArray[np.integer]]) -> bytes:
        """The snapshot. Cells must be u32."""
        counts = self._counts.pack(*map(len, columns))
        cells = [np.asarray(column).astype("<u4").tobytes() for column in columns]
        body = b"".join((self._magic, self._head.pack(*head), counts, *cells))
        return body + _CRC.pack(zlib.crc32(body))

    def unpack(self, state: bytes) -> tuple[tuple[Any, ...], list["array[int]"]]:
        """The fields of the head, and the columns."""
        if len(state) < self._cells_at + _CRC.size:
            raise ValueError(f"not a snapshot of policy {self._policy}: only {len(state)} bytes")
        if state[:_MAGIC_BYTES] != self._magic:
            raise ValueError(f"not a snapshot of policy {self._policy}: it begins with {bytes(state[:_MAGIC_BYTES])!r}")
        counts = self._counts.unpack_from(state, _MAGIC_BYTES + self._head.size)
        length_bytes = self._cells_at + sum(counts) * _CELL_BYTES + _CRC.size
        if len(state) != length_bytes:
            raise self.damaged(f"{len(state)} bytes where {length_bytes} belong")
        body = state[: -_CRC.size]
        if _CRC.unpack_from(state, len(body))[0] != zlib.crc32(body):
            raise self.damaged("its CRC-32 does not match")
        cells = _from_little_endian(body[self._cells_at :])
        columns, at = [], 0
        for count in counts:
            columns.append(cells[at : at + count])
            at += count
        return self._head.unpack_from(state, _MAGIC_BYTES), columns

    def names(self, lists: Iterable["array[int]"], renamed: Mapping[int, int] | None) -> NDArray[np.int64]:
        """The handle of now for each handle in the snapshot's lists, list by list: NO_NAME for one that has none.

        No two may be the same.
        """
        handles = np.concatenate([np.asarray(handles) for handles in lists]).astype(np.int64)
        if _repeats(handles) or handles.max(initial=0) > INDEX_MAX:
            raise self.damaged("a handle appears twice or is out of range")
        if renamed is None:
            return handles
        names = np.array([renamed.get(handle, NO_NAME) for handle in handles.tolist()], np.int64)
        named = names[names != NO_NAME]
        if _repeats(named) or not 0 <= named.min(initial=0) <= named.max(initial=0) <= INDEX_MAX:
            raise ValueError(f"snapshot of policy {self._policy}: two handles get one name, or one is out of range")
        return names

    def damaged(self, how: str) -> ValueError:
        """The error for a snapshot that claims to be one of ours and cannot be."""
        return ValueError(f"damaged snapshot of policy {self._policy}: {how}")


def _repeats(numbers: NDArray[np.int64]) -> bool:
    """Whether one is there twice. (np.unique hashes: fifty times as slow as to sort.)"""
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())


def _from_little_endian(data: bytes) -> "array[int]":
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
