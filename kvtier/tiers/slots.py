"""The copying that memory tiers on the host share: whole batches between slots and views of slots.

Owns nothing; the array is the tier's and is asked for in every batch, so that a closed or forked tier refuses.
Always:  nothing is copied before the whole batch is checked; behind a block's payload its slot holds zeroes, on
         either side. The copies release the GIL.
Units:   slots (index), bytes.

Pieces that abut on both sides are moved as one: saves 0.7 us per block, which is half of the time at 4 KiB and
nothing to speak of above 64 KiB. Addresses rather than numpy slices, because finding neighbours needs them anyway.
"""

import ctypes
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import InvariantError
from kvtier.types import DONE, Outcome, ReadItem, Status, WriteBatch

Piece = tuple[int, int, int]  # target address, source address, length in bytes


class SlotCopies:
    """Read and write for a tier whose copies lie in `usable` slots of the uint8 array [slots, stride_bytes]."""

    def __init__(self, name: str, array: Callable[[], NDArray[np.uint8]], usable: Container[int]) -> None:
        self._name = name
        self._array = array
        self._usable = usable

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy slots into the items' views; what a view has beyond the payload is zeroed."""
        slots = self._array()
        base, stride_bytes = slots.ctypes.data, slots.shape[1]
        pieces, tails = [], []
        for item in items:
            self._expect(item.place, item.length_bytes, stride_bytes, item.into)
            into = address_of(item.into)
            pieces.append((into, base + item.place * stride_bytes, item.length_bytes))
            tails.append((into + item.length_bytes, item.into.nbytes - item.length_bytes))
        _move(pieces)
        zero(tails)
        return [DONE] * len(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Copy the items into their slots. Evictions need no work: a slot's occupant is the directory's business.

        A sidecar is for tiers that outlive the process: here it is dropped, which is as good as kept.
        """
        slots = self._array()
        base, stride_bytes = slots.ctypes.data, slots.shape[1]
        pieces, tails = [], []
        for item in batch.items:
            self._expect(item.place, item.length_bytes, stride_bytes, item.source)
            target = base + item.place * stride_bytes
            pieces.append((target, address_of(item.source), item.length_bytes))
            tails.append((target + item.length_bytes, stride_bytes - item.length_bytes))
        _move(pieces)
        zero(tails)
        return [Outcome(Status.DONE, item.place) for item in batch.items] + [DONE] * (
            len(batch.evict) + bool(batch.sidecar)
        )

    def _expect(self, place: int, length_bytes: int, stride_bytes: int, view: memoryview) -> None:
        if place not in self._usable:
            raise InvariantError(f"tier {self._name}: slot {place} is none that holds blocks")
        if not 0 <= length_bytes <= min(stride_bytes, view.nbytes):
            raise InvariantError(
                f"tier {self._name}: {length_bytes} bytes in a slot of {stride_bytes} and a view of {view.nbytes}"
            )


def address_of(view: memoryview) -> int:
    """Where a contiguous view lies. The caller's item keeps it alive."""
    if view.readonly:
        return np.frombuffer(view, np.uint8).ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same moves in the same order, those that abut on both sides made one."""
    run: Piece | None = None
    for piece in pieces:
        if run and piece[0] == run[0] + run[2] and piece[1] == run[1] + run[2]:
            run = (run[0], run[1], run[2] + piece[2])
            continue
        if run:
            yield run
        run = piece
    if run:
        yield run


def _move(pieces: Iterable[Piece]) -> None:
    for target, source, length_bytes in joined(pieces):
        ctypes.memmove(target, source, length_bytes)


def zero(tails: Iterable[tuple[int, int]]) -> None:
    """Clear (address, length in bytes) stretches of host memory."""
    for address, length_bytes in tails:
        if length_bytes:
            ctypes.memset(address, 0, length_bytes)
