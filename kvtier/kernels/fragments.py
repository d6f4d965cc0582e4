"""Blocks between a foreign cache and our slots, on the CPU.

A foreign cache keeps a block as fragments: in each of several arrays (one per layer and K or V) the row at the block's
index. A slot holds the fragments at offsets of their own, by default one after the other.

Always: bytes outside the named slots and blocks stay as they are.
Units:  bytes, blocks (foreign index), slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import UsageError
from kvtier.kernels.arrays import Bytes, Indices


@dataclass(frozen=True, slots=True)
class Fragments:
    """The foreign arrays, uint8 [blocks, fragment_bytes] each, any stride between blocks, and their place in a slot."""

    arrays: tuple[Bytes, ...]
    offsets_bytes: tuple[int, ...]

    @classmethod
    def in_order(cls, arrays: Sequence[Bytes]) -> "Fragments":
        """Fragments that lie one after the other in a slot. Raises UsageError unless all have one length."""
        lengths = {array.shape[1] for array in arrays}
        if len(lengths) != 1:
            raise UsageError(f"fragments of {sorted(lengths)} bytes; each length needs a call of its own")
        step = lengths.pop()
        return cls(tuple(arrays), tuple(range(0, step * len(arrays), step)))

    @property
    def fragment_bytes(self) -> int:
        """Bytes of one fragment of one block."""
        length_bytes: int = self.arrays[0].shape[1]
        return length_bytes


def gather(fragments: Fragments, blocks: Indices, pool: Bytes, slots: Indices) -> None:
    """Copy foreign `blocks` into `slots` of the pool [slots, stride_bytes]. No slot may occur twice."""
    for array, offset in zip(fragments.arrays, fragments.offsets_bytes, strict=True):
        pool[slots, offset : offset + fragments.fragment_bytes] = array[blocks]


def scatter(pool: Bytes, slots: Indices, fragments: Fragments, blocks: Indices) -> None:
    """Copy `slots` of the pool [slots, stride_bytes] into foreign `blocks`. No block may occur twice."""
    for array, offset in zip(fragments.arrays, fragments.offsets_bytes, strict=True):
        array[blocks] = pool[slots, offset : offset + fragments.fragment_bytes]
