"""ForeignCache: how blocks lie in tensors that another engine made, and where their parts go in a slot of ours.

Engines keep a cache by layers, and each has an order of its own: [2, blocks, tokens, heads, dim], [blocks, 2, ...],
heads before tokens, K and V apart. Here all of it becomes *fragments*: runs of bytes, one for every block, at a
constant stride. A slot holds a block's fragments one after the other, in the order of the tensors and, inside one, of
memory. Bytes are kept as they lie: whoever keeps blocks for longer than the process names their order (`axes`) in the
namespace.

Always: fragments of different blocks don't overlap; a block's fragments fill its part of a slot without a gap.
Units:  bytes, blocks (foreign index).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import UsageError
from kvtier.tiers.foreign.tensors import ForeignTensor, tensor_of

FRAGMENTS_MAX = 65535  # thread blocks along a grid's second axis


@dataclass(frozen=True, slots=True)
class ForeignFragment:
    """Block b has `length_bytes` at address + b * stride_bytes; in a slot they lie at `offset_bytes`."""

    address: int
    stride_bytes: int
    length_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class ForeignCache:
    """`blocks` blocks as fragments. on_device: in a CUDA device's memory.

    axes: the tensors' axes without the blocks' (and without those of length 1), outermost in memory first.
    """

    blocks: int
    fragments: tuple[ForeignFragment, ...]
    on_device: bool = True
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for fragments that overlap, or leave a gap in the slot."""
        if self.blocks < 1 or not 0 < len(self.fragments) <= FRAGMENTS_MAX:
            raise UsageError(
                f"{self.blocks} blocks of {len(self.fragments)} fragments; use 1 or more, of 1 to {FRAGMENTS_MAX}"
            )
        offset_bytes = 0
        for index, fragment in enumerate(self.fragments):
            if self.blocks > 1 and not 0 < fragment.length_bytes <= fragment.stride_bytes:
                raise UsageError(
                    f"fragment {index}: {fragment.length_bytes} bytes of a block, and {fragment.stride_bytes} bytes "
                    "from one block to the next"
                )
            if fragment.offset_bytes != offset_bytes:
                raise UsageError(
                    f"fragment {index} lies at byte {fragment.offset_bytes} of a slot, not at {offset_bytes}"
                )
            offset_bytes += fragment.length_bytes

    @classmethod
    def of(cls, arrays: Sequence[Any], *, blocks: int, block_axis: int = 0) -> "ForeignCache":
        """The cache in these arrays (see `tensor_of`), in the order in which a slot is to hold their parts.

        blocks: how many the engine's pool has. block_axis: which axis counts them. Raises UsageError, with both
        numbers, where an array has another count of blocks, order of axes or kind of memory than expected.
        """
        tensors = [tensor_of(array) for array in arrays]
        if not tensors:
            raise UsageError("a cache of no tensors; pass one or more")
        first_axes, fragments, offset_bytes = None, list[ForeignFragment](), 0
        for index, tensor in enumerate(tensors):
            axis = _block_axis(index, tensor, block_axis, blocks)
            starts, run_bytes, axes = _runs(index, tensor, axis)
            first_axes = axes if first_axes is None else first_axes
            if axes != first_axes:
                raise UsageError(f"tensor {index} has its axes in the order {axes} in memory, tensor 0 {first_axes}")
            if tensor.on_device != tensors[0].on_device:
                raise UsageError(f"tensor {index} and tensor 0 lie in different memory, one on a device, one not")
            if len(fragments) + len(starts) > FRAGMENTS_MAX:
                raise UsageError(f"more than {FRAGMENTS_MAX} fragments: tensor {index} alone has {len(starts)}")
            for start in starts:
                stride_bytes = tensor.strides_bytes[axis]
                fragments.append(ForeignFragment(tensor.address + start, stride_bytes, run_bytes, offset_bytes))
                offset_bytes += run_bytes
        return cls(blocks, tuple(fragments), tensors[0].on_device, first_axes or ())

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a slot."""
        return sum(fragment.length_bytes for fragment in self.fragments)

    @property
    def fragment_bytes(self) -> int:
        """Bytes of a fragment, on the average: which way of copying is faster depends on it."""
        return self.block_bytes // len(self.fragments)

    @property
    def by_length(self) -> dict[int, list[ForeignFragment]]:
        """The fragments, by their length."""
        ordered = sorted(self.fragments, key=lambda fragment: fragment.length_bytes)
        return {
            length: list(same) for length, same in itertools.groupby(ordered, lambda fragment: fragment.length_bytes)
        }


def _block_axis(index: int, tensor: ForeignTensor, block_axis: int, blocks: int) -> int:
    axes = len(tensor.shape)
    if not -axes <= block_axis < axes:
        raise UsageError(f"tensor {index} has {axes} axes, and axis {block_axis} is to count blocks")
    if tensor.shape[block_axis] != blocks:
        raise UsageError(
            f"tensor {index} has {tensor.shape[block_axis]} blocks along axis {block_axis} of {tensor.shape}, "
            f"the engine {blocks}"
        )
    return block_axis % axes


def _runs(index: int, tensor: ForeignTensor, block_axis: int) -> tuple[list[int], int, tuple[int, ...]]:
    """One block of a tensor: where its runs of bytes start, how long each is, and its axes in the order of memory."""
    sizes = {axis: size for axis, size in enumerate(tensor.shape) if axis != block_axis and size != 1}
    if 0 in sizes.values():
        raise UsageError(f"tensor {index} of shape {tensor.shape} has no bytes")
    strides = {axis: tensor.strides_bytes[axis] for axis in sizes}
    axes = tuple(sorted(sizes, key=lambda axis: -strides[axis]))
    outer, run_bytes = list(axes), tensor.item_bytes
    while outer and strides[outer[-1]] == run_bytes:
        run_bytes *= sizes[outer.pop()]
    starts = [0]
    for place, axis in enumerate(outer):
        inner = outer[place + 1] if place + 1 < len(outer) else None
        reach_bytes = run_bytes if inner is None else strides[inner] * sizes[inner]
        if strides[axis] < reach_bytes:
            raise UsageError(
                f"tensor {index}: {strides[axis]} bytes from one to the next along axis {axis}, and each takes "
                f"{reach_bytes}"
            )
        starts = [start + step * strides[axis] for start in starts for step in range(sizes[axis])]
    return starts, run_bytes, axes
