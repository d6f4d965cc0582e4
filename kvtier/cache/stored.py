"""What a persistent tier has kept, in columns: a million records of their own would take seconds and 100 MB.

Owns the columns, one cell per copy. Always: they are equally long, and each key is there once.
Units: bytes; places and generations as the tier counts them.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.types import StoredBlock, StoreKey, page_aligned


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Copies in the order of their writing, oldest first."""

    keys: list[StoreKey]
    places: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    lengths: NDArray[np.uint32]  # in bytes, as attention reads them
    strides: NDArray[np.int64]  # in bytes: what they take, which is less where the tier codes them

    @classmethod
    def of(cls, blocks: Iterable[StoredBlock]) -> "StoredBlocks":
        """The same blocks in columns; nothing to do for those that are."""
        if isinstance(blocks, cls):
            return blocks
        keys: list[StoreKey] = []
        places, generations, lengths, strides = array("I"), array("Q"), array("I"), array("q")
        for block in blocks:  # none outlives its turn: a list of them would leave holes of 100 bytes for each key
            keys.append(block.key)
            places.append(block.place)
            generations.append(block.generation)
            lengths.append(block.length_bytes)
            strides.append(block.stride_bytes or page_aligned(block.length_bytes))
        return cls(
            keys,
            np.array(places, np.uint32),
            np.array(generations, np.uint64),
            np.array(lengths, np.uint32),
            np.array(strides, np.int64),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredBlock]:
        columns = (column.tolist() for column in (self.places, self.generations, self.lengths, self.strides))
        for key, *cells in zip(self.keys, *columns, strict=True):
            yield StoredBlock(key, *cells)
