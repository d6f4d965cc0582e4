"""Checksums of blocks that lie in slots: xxh3_64, seeded per block, as the index keeps them (kvtier.blocks.codec).

The device computes the same number (src/checksum.cu), so a block can be checked before it leaves the device and after
it came back, without the host reading its bytes.

Units: bytes. Blocks for the device have a multiple of 16 bytes, and at least 256.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.blocks.codec import SEED_BYTES
from kvtier.kernels.arrays import Bytes, Indices
from kvtier.types import BlockKey, hash_of

BLOCK_BYTES_LEAST = 256  # XXH3 treats inputs of 240 bytes and fewer in other ways, which the device does not have
BLOCK_BYTES_UNIT = 16


def seeds_of(keys: Sequence[BlockKey]) -> NDArray[np.uint64]:
    """The seed of each block: the first 8 bytes of its hash, little-endian, a shorter hash padded with zeroes."""
    padded = b"".join(hash_of(key)[:SEED_BYTES].ljust(SEED_BYTES, b"\0") for key in keys)
    return np.frombuffer(padded, "<u8").astype(np.uint64)


def checksums(pool: Bytes, slots: Indices, seeds: NDArray[np.uint64], length_bytes: int) -> NDArray[np.uint64]:
    """The checksum of the first `length_bytes` of each slot. pool: [slots, stride_bytes]; slots, seeds: [blocks]."""
    sums = [
        xxhash.xxh3_64_intdigest(pool[slot, :length_bytes].data, seed=seed)
        for slot, seed in zip(slots.tolist(), seeds.tolist(), strict=True)
    ]
    return np.array(sums, np.uint64)
