"""Checksums on the device: the same numbers as the index keeps."""

import numpy as np
import pytest

from kvtier.blocks.codec import checksum
from kvtier.kernels.checksum import seeds_of
from kvtier.kernels.reference import ReferenceKernels
from kvtier.types import block_key
from tests.kernels.emulated import EmulatedKernels
from tests.kernels.guarded import guarded

KEYS = [block_key(bytes(range(32)), 0), block_key(b"short", 7), block_key(b"\xff" * 64, 1)]


def test_reference_is_the_rule_of_the_index() -> None:
    """A block checked on the device would fail against its record although nothing is wrong with it."""
    pool = np.random.default_rng(0).integers(0, 256, (4, 4096), np.uint8)
    slots = np.array([3, 0, 2], np.int32)
    sums = ReferenceKernels().checksums(pool, slots, seeds_of(KEYS), 4000)
    expected = [checksum(key, pool[slot, :4000].tobytes()) for key, slot in zip(KEYS, slots, strict=True)]
    assert sums.tolist() == expected


# Below and above a chunk of 1024 bytes, a tile of 32 chunks, and where the last stripe is whole or not.
@pytest.mark.parametrize("length_bytes", [256, 304, 960, 1008, 1024, 1040, 2048, 32768, 32784, 33792, 70000, 131072])
def test_device_agrees(device: EmulatedKernels, length_bytes: int) -> None:
    """A block of some length has another checksum on the device than on the host."""
    pool = guarded(np.random.default_rng(length_bytes).integers(0, 256, (4, length_bytes), np.uint8))
    slots, seeds = np.array([3, 0, 2], np.int32), seeds_of(KEYS)
    expected = ReferenceKernels().checksums(pool, slots, seeds, length_bytes)
    assert device.checksums(pool, slots, seeds, length_bytes).tolist() == expected.tolist()


@pytest.mark.parametrize("byte", [0, 63, 1023, 1024, 2047, 4095])
def test_every_byte_counts(device: EmulatedKernels, byte: int) -> None:
    """A flipped byte would go unnoticed, wherever the chunks meet."""
    pool = np.zeros((1, 4096), np.uint8)
    slots, seeds = np.zeros(1, np.int32), seeds_of(KEYS[:1])
    before = device.checksums(pool, slots, seeds, 4096)
    pool[0, byte] ^= 1
    after = device.checksums(pool, slots, seeds, 4096)
    assert before != after
    assert after.tolist() == ReferenceKernels().checksums(pool, slots, seeds, 4096).tolist()
