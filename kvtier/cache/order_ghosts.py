"""The ghosts in the rows of an order: blocks that a policy remembers and that have no copy in the tier.

Owns: their encoding, one after the other: u32 handle, u32 length, u8 length of the key, the key. Always: `namespaces`
are the local ids with which the keys begin. Numbers are little-endian, in keys big-endian.
Units:   handles, bytes.

There may be as many as blocks, and a key lies anywhere in memory: what is asked of it is asked while it is in the
processor's cache, so they are packed a thousand at a time.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvtier.types import GROUP_BYTES, NAMESPACE_BYTES, StoreKey, namespace_of

PACKED_AT_ONCE = 1024
_RECORDS_MIN = 32  # ghosts; for fewer, calls of numpy cost more than a loop
_HEAD = struct.Struct("<IIB")


@dataclass(frozen=True, slots=True)
class Ghost:
    """One of them: its handle, length and key (with a local namespace)."""

    handle: int
    length_bytes: int
    key: StoreKey


class PackedGhosts:
    """As many as were added, as bytes."""

    def __init__(self, data: bytes = b"", count: int = 0) -> None:
        """data: so many that were packed before. What their namespaces are is not looked up."""
        self._data = bytearray(data)
        self._count = count
        self.namespaces: set[int] = set()

    def __len__(self) -> int:
        return self._count

    def __bytes__(self) -> bytes:
        return bytes(self._data)

    def add(self, handles: Sequence[int], lengths_bytes: NDArray[np.uint32], keys: Sequence[StoreKey]) -> None:
        """handles[i] is a block of lengths_bytes[i] called keys[i]."""
        self._count += len(handles)
        sizes = {*map(len, keys)}
        if len(sizes) == 1 and len(keys) >= _RECORDS_MIN:
            self._add_records(handles, lengths_bytes, keys, sizes.pop())
            return
        heads = map(_HEAD.pack, handles, lengths_bytes, map(len, keys))
        self._data += b"".join(chain.from_iterable(zip(heads, keys, strict=True)))
        self.namespaces.update(map(namespace_of, keys))

    def _add_records(
        self, handles: Sequence[int], lengths_bytes: NDArray[np.uint32], keys: Sequence[StoreKey], key_bytes: int
    ) -> None:
        fields = [("handle", "<u4"), ("length", "<u4"), ("key_bytes", "u1"), ("key", f"V{key_bytes}")]
        records = np.empty(len(keys), np.dtype(fields))
        records["handle"], records["length"], records["key_bytes"] = handles, lengths_bytes, key_bytes
        joined = b"".join(keys)
        records["key"] = np.frombuffer(joined, f"V{key_bytes}")
        self._data += records.tobytes()
        ids = np.ndarray(len(keys), ">u4", joined, strides=(key_bytes,))
        self.namespaces.update(np.unique(ids).tolist())


def unpack_ghosts(data: bytes) -> list[Ghost]:
    """The ghosts in what `bytes` made of packed ones. Raises ValueError, TypeError or struct.error if it is none."""
    ghosts, at = [], 0
    while at < len(data):
        handle, length_bytes, key_bytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size + key_bytes
        if at > len(data) or key_bytes <= NAMESPACE_BYTES + GROUP_BYTES:
            raise ValueError("a ghost whose key is cut off or too short")
        ghosts.append(Ghost(handle, length_bytes, StoreKey(data[at - key_bytes : at])))
    return ghosts
