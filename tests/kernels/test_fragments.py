"""Gather and scatter: fragments of a foreign cache to slots and back, and nothing else is touched."""

import numpy as np
import pytest

from kvtier.errors import UsageError
from kvtier.kernels.base import FragmentKernels
from kvtier.kernels.fragments import Fragments
from kvtier.kernels.reference import ReferenceKernels
from tests.kernels.emulated import EmulatedKernels
from tests.kernels.guarded import guarded


@pytest.fixture(params=["reference", "device"])
def kernels(request: pytest.FixtureRequest) -> FragmentKernels:
    if request.param == "reference":
        return ReferenceKernels()
    return EmulatedKernels(request.getfixturevalue("emulator"))


def foreign(rng: np.random.Generator, count: int, blocks: int, fragment_bytes: int) -> list[np.ndarray]:
    """Arrays of a layer-first cache, V beside K in each array: strides exceed the fragment."""
    whole = [guarded(rng.integers(0, 256, (blocks, 2, fragment_bytes), np.uint8)) for _ in range(count)]
    return [array[:, 1] for array in whole]


@pytest.mark.parametrize(("count", "fragment_bytes"), [(1, 16), (2, 2048), (5, 512 + 16), (3, 6144), (2, 16384)])
def test_gather_then_scatter(kernels: FragmentKernels, count: int, fragment_bytes: int) -> None:
    """A block arrives in another slot, in another order, short of bytes, or with a neighbour overwritten."""
    rng = np.random.default_rng(count * fragment_bytes)
    arrays = foreign(rng, count, 7, fragment_bytes)
    fragments = Fragments.in_order(arrays)
    pool = guarded(rng.integers(0, 256, (6, count * fragment_bytes + 32), np.uint8))
    blocks, slots = np.array([6, 0, 3], np.int32), np.array([1, 5, 2], np.int32)

    expected = pool.copy()
    for block, slot in zip(blocks, slots, strict=True):
        expected[slot, : count * fragment_bytes] = np.concatenate([array[block] for array in arrays])
    kernels.gather(fragments, blocks, pool, slots)
    assert np.array_equal(pool, expected)

    others = foreign(rng, count, 7, fragment_bytes)
    wanted = [array.copy() for array in others]
    for array, source in zip(wanted, arrays, strict=True):
        array[[6, 1, 2]] = source[blocks]
    kernels.scatter(pool, slots, Fragments.in_order(others), np.array([6, 1, 2], np.int32))
    assert all(np.array_equal(array, want) for array, want in zip(others, wanted, strict=True))


def test_offsets_place_fragments(kernels: FragmentKernels) -> None:
    """A foreign cache that lists V before K would be restored with both exchanged."""
    arrays = foreign(np.random.default_rng(1), 2, 3, 64)
    pool = guarded(np.zeros((2, 192), np.uint8))
    kernels.gather(Fragments(tuple(arrays), (128, 0)), np.array([2], np.int32), pool, np.array([1], np.int32))
    assert np.array_equal(pool[1, 128:], arrays[0][2])
    assert np.array_equal(pool[1, :64], arrays[1][2])
    assert not pool[0].any()
    assert not pool[1, 64:128].any()


def test_fragments_of_two_lengths_are_refused() -> None:
    """Offsets would overlap, and a layer be overwritten by its neighbour."""
    with pytest.raises(UsageError, match="fragments of \\[16, 32\\] bytes"):
        Fragments.in_order([np.zeros((2, 16), np.uint8), np.zeros((2, 32), np.uint8)])
