"""Where a foreign engine's blocks lie, as its tensors say; what cannot be is refused with both numbers."""

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.errors import UsageError
from kvtier.tiers.foreign.cache import FRAGMENTS_MAX, ForeignCache, ForeignFragment
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.tiers.foreign.tensors import ForeignTensor, _DlTensor, tensor_of


def refused(problem: str) -> "pytest.RaisesExc[UsageError]":
    return pytest.raises(UsageError, match=re.escape(problem))


# ---------------------------------------------------------------- tensors


class OnlyDlpack:
    """An array that says where it lies by DLPack alone."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self._array, self._device, self.asked = array, device, {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **asked: int) -> object:
        self.asked = asked
        return self._array.__dlpack__()


VIEWS = [
    np.zeros((3, 4, 8), np.float16),
    np.zeros((3, 5, 4, 8), np.float32)[1:, 1:4],
    np.zeros((5, 8, 4), np.uint8).transpose(2, 0, 1)[:, ::2],
]


@pytest.mark.parametrize("array", VIEWS, ids=["dense", "a part", "turned"])
def test_an_array_says_where_it_lies(array: np.ndarray) -> None:
    """A tensor's blocks are looked for where they are not: strides in items for bytes, or an offset left out."""
    torch = pytest.importorskip("torch")
    wanted = ForeignTensor(array.ctypes.data, array.shape, array.strides, array.itemsize, False)
    assert tensor_of(array) == tensor_of(torch.from_numpy(array)) == tensor_of(OnlyDlpack(array)) == wanted
    assert tensor_of(wanted) is wanted


def test_an_array_on_a_device_is_known_as_such() -> None:
    """What lies on the device is taken for host memory; or DLPack's producer waits for a stream of its own."""
    array = VIEWS[0]
    interface = {"shape": (3, 4, 8), "typestr": "<f2", "data": (4096, False), "version": 3}
    dense = ForeignTensor(4096, (3, 4, 8), (64, 16, 2), 2, True)
    assert tensor_of(SimpleNamespace(__cuda_array_interface__=interface)) == dense
    strided = SimpleNamespace(__cuda_array_interface__=interface | {"strides": (64, 2, 8)})
    assert tensor_of(strided).strides_bytes == (64, 2, 8)
    there = OnlyDlpack(array, device=2)
    assert tensor_of(there).on_device
    assert there.asked == {"stream": -1}
    size = {
        "shape": (3, 4),
        "is_cuda": True,
        "data_ptr": lambda: 64,
        "stride": lambda: (4, 1),
        "element_size": lambda: 2,
    }
    assert tensor_of(SimpleNamespace(**size)) == ForeignTensor(64, (3, 4), (8, 2), 2, True)


class Capsule:
    """A DLPack array of 3 x 4 pairs of bytes on a device, 64 bytes behind where its memory starts, without strides."""

    def __init__(self) -> None:
        self._shape = (ctypes.c_int64 * 2)(3, 4)
        self._tensor = _DlTensor(4096, 2, 0, 2, 2, 16, 1, self._shape, None, 64)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> object:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


def test_a_capsule_is_read_as_dlpack_says() -> None:
    """The offset of a capsule is left out, or one without strides is followed to address 0."""
    assert tensor_of(Capsule()) == ForeignTensor(4096 + 64, (3, 4), (8, 2), 2, True)


def test_what_is_no_tensor_is_refused() -> None:
    """A list is followed as a pointer, or a read-only array is written to."""
    with refused("list says nothing of its memory; pass a torch tensor"):
        tensor_of([1, 2])
    with refused("is read-only; blocks are loaded into it, too"):
        tensor_of(np.frombuffer(b"abcd", np.uint8))
    with refused("an array on a DLPack device of type 13; CUDA devices are 2, CPUs 1"):
        tensor_of(OnlyDlpack(VIEWS[0], device=13))


# ---------------------------------------------------------------- layouts


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], address: int = 1 << 20, **more: int) -> ForeignTensor:
    return ForeignTensor(address, shape, strides, more.get("item_bytes", 2), bool(more.get("on_device", True)))


def test_k_first_and_blocks_first_give_the_same_slot() -> None:
    """An engine that was started with another layout of its cache restores K as V, or a layer as its neighbour."""
    k_first = ForeignCache.of([tensor((2, 9, 4, 8), (576, 64, 16, 2))], blocks=9, block_axis=1)
    blocks_first = ForeignCache.of([tensor((9, 2, 4, 8), (128, 64, 16, 2))], blocks=9)
    at = 1 << 20
    assert k_first.fragments == (ForeignFragment(at, 64, 64, 0), ForeignFragment(at + 576, 64, 64, 64))
    assert blocks_first.fragments == (ForeignFragment(at, 128, 128, 0),)  # both in one run
    assert k_first.block_bytes == blocks_first.block_bytes == 128
    assert (k_first.fragment_bytes, blocks_first.fragment_bytes) == (64, 128)


def test_the_order_of_axes_is_told() -> None:
    """Blocks that were kept with heads before tokens are restored into a cache with tokens before heads."""
    tokens_first = ForeignCache.of([tensor((9, 4, 2, 8), (128, 32, 16, 2))], blocks=9)
    heads_first = ForeignCache.of([tensor((9, 4, 2, 8), (128, 16, 64, 2))], blocks=9)
    assert (tokens_first.axes, heads_first.axes) == ((1, 2, 3), (2, 1, 3))
    assert tokens_first.fragments == heads_first.fragments
    one_head = ForeignCache.of([tensor((9, 4, 1, 8), (64, 16, 9999, 2))], blocks=9)
    assert one_head.axes == (1, 3)
    assert len(one_head.fragments) == 1


def test_padding_between_rows_is_not_copied() -> None:
    """Padding is taken for payload, and every row behind it is off."""
    padded = ForeignCache.of([tensor((9, 3, 8), (80, 24, 2))], blocks=9)
    assert [(f.address - (1 << 20), f.length_bytes, f.offset_bytes) for f in padded.fragments] == [
        (0, 16, 0),
        (24, 16, 16),
        (48, 16, 32),
    ]


def test_lengths_may_differ() -> None:
    """A latent cache, whose two tensors are not equally wide, is refused or cut."""
    cache = ForeignCache.of([tensor((9, 8), (16, 2)), tensor((9, 24), (48, 2), 1 << 21)], blocks=9)
    assert (cache.block_bytes, cache.fragment_bytes) == (64, 32)
    assert {length: [f.offset_bytes for f in same] for length, same in cache.by_length.items()} == {16: [0], 48: [16]}


@pytest.mark.parametrize(
    ("tensors", "options", "problem"),
    [
        ([], {}, "a cache of no tensors"),
        ([tensor((8, 4), (8, 2))], {}, "tensor 0 has 8 blocks along axis 0 of (8, 4), the engine 9"),
        ([tensor((2, 9, 4), (72, 8, 2))], {}, "tensor 0 has 2 blocks along axis 0 of (2, 9, 4), the engine 9"),
        ([tensor((9, 4), (8, 2))], {"block_axis": 2}, "tensor 0 has 2 axes, and axis 2 is to count blocks"),
        ([tensor((9, 0), (8, 2))], {}, "tensor 0 of shape (9, 0) has no bytes"),
        (
            [tensor((9, 4), (6, 2))],
            {},
            "fragment 0: 8 bytes of a block, and 6 bytes from one block to the next",
        ),
        ([tensor((9, 4), (0, 2))], {}, "8 bytes of a block, and 0 bytes from one block to the next"),
        ([tensor((9, 2, 4), (64, 6, 2))], {}, "tensor 0: 6 bytes from one to the next along axis 1, and each takes 8"),
        ([tensor((9, 2, 4), (64, 0, 2))], {}, "tensor 0: 0 bytes from one to the next along axis"),
        ([tensor((9, 4), (8, -2))], {}, "tensor 0: -2 bytes from one to the next along axis 1, and each takes 2"),
        (
            [tensor((9, 2, 4), (16, 8, 2)), tensor((9, 2, 4), (16, 2, 4))],
            {},
            "tensor 1 has its axes in the order (2, 1) in memory, tensor 0 (1, 2)",
        ),
        (
            [tensor((9, 4), (8, 2)), tensor((9, 4), (8, 2), on_device=0)],
            {},
            "tensor 1 and tensor 0 lie in different memory",
        ),
        (
            [tensor((9, FRAGMENTS_MAX + 1, 4), (1 << 20, 16, 2))],
            {},
            f"more than {FRAGMENTS_MAX} fragments: tensor 0 alone has {FRAGMENTS_MAX + 1}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_cannot_be_are_refused(
    tensors: list[ForeignTensor], options: dict[str, int], problem: str
) -> None:
    """A wrong axis, or a tensor of another pool, gives copies that overwrite somebody else's memory."""
    with refused(problem):
        ForeignCache.of(tensors, blocks=9, **options)


def test_fragments_by_hand_are_looked_at_as_well() -> None:
    """A gap in the slot keeps what lay there; an overlap restores one layer's bytes as another's."""
    with refused("fragment 1 lies at byte 48 of a slot, not at 32"):
        ForeignCache(2, (ForeignFragment(0, 32, 32, 0), ForeignFragment(64, 32, 32, 48)))
    with refused("0 blocks of 1 fragments"):
        ForeignCache(0, (ForeignFragment(0, 32, 32, 0),))
    with refused("2 blocks of 0 fragments"):
        ForeignCache(2, ())


# ---------------------------------------------------------------- places


def test_places_are_parts_of_slots() -> None:
    """A chunk's second block lands on its first, or on another rank's part."""
    places = HostPlaces(address=1 << 16, stride_bytes=4096, slots=3, offset_bytes=256, part_bytes=512, parts=2)
    assert (places.count, places.length_bytes) == (6, 3 * 4096)
    wanted = [(1 << 16) + slot * 4096 + 256 + part * 512 for slot in range(3) for part in range(2)]
    assert places.addresses(np.arange(6)).tolist() == wanted
    with refused("blocks of 513 bytes, and places of 512"):
        places.expect_room(513)
    for parts, offset in ((8, 256), (0, 0), (1, -1)):
        with refused(f"{parts} parts of 512 bytes from byte {offset} on, in slots of 4096"):
            HostPlaces(1 << 16, 4096, 3, offset, 512, parts)
