"""The shape of one block: an ordered list of segments.

A block of a group is one contiguous run of `block_bytes`. A segment is one layer's K, V or latent inside it,
described by offset, shape and strides in bytes, so that a zero-copy view over all slots is the segment with one
more axis in front. The layout is part of the namespace and never guessed from a shape (LMCache#4463).

Layouts (outermost axis first)      strides of one K segment, T tokens, H heads, D bytes per head
    layer_token_major  [layer][K/V][token][head][dim]   contiguous: H*D, D, item
    layer_head_major   [layer][K/V][head][token][dim]   shown as [token][head][dim]: D, T*D, item
    token_major        [token][layer][K/V][head][dim]   token stride = all layers: L*2*H*D, D, item
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtier.types import GroupSpec, ModelSpec, page_aligned

LAYOUTS = ("layer_token_major", "layer_head_major", "token_major")

# name -> (bytes per element, numpy dtype that carries the bits; numpy has neither bfloat16 nor float8)
DTYPES = {
    "float32": (4, "float32"),
    "float16": (2, "float16"),
    "bfloat16": (2, "uint16"),
    "float8_e4m3": (1, "uint8"),
    "float8_e5m2": (1, "uint8"),
}

SEGMENT_NAMES = {"full": ("k", "v"), "mla": ("latent",)}


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's part of a block. Shape is always [tokens, heads, dim], whatever the order in memory."""

    name: str
    layer: int
    dtype: str
    shape: tuple[int, int, int]
    offset_bytes: int
    strides_bytes: tuple[int, int, int]

    @property
    def length_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True)
class BlockSpec:
    """The segments of one group's block, in the order they lie in memory (token_major interleaves them)."""

    group: int
    segments: tuple[Segment, ...]

    @cached_property
    def block_bytes(self) -> int:
        return sum(segment.length_bytes for segment in self.segments)

    @property
    def block_tokens(self) -> int:
        return self.segments[0].shape[0]

    @cached_property
    def stride_bytes(self) -> int:
        """A slot's size on host and disk: whole pages, so that O_DIRECT can move it."""
        return page_aligned(self.block_bytes)

    def of_layer(self, layer: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.layer == layer]


def block_specs(model: ModelSpec) -> tuple[BlockSpec, ...]:
    """The block shape of every group of the model, by group index."""
    return tuple(_spec_of(index, group, model.layout) for index, group in enumerate(model.groups))


def span_tokens(specs: Sequence[BlockSpec]) -> int:
    """The shortest run of tokens that has whole blocks in every group: what is found of a prompt is some of these."""
    return math.lcm(*(spec.block_tokens for spec in specs))


def span_bytes(specs: Sequence[BlockSpec]) -> int:
    """What all groups keep of such a run, without padding."""
    span = span_tokens(specs)
    return sum(spec.block_bytes * (span // spec.block_tokens) for spec in specs)


def _spec_of(index: int, group: GroupSpec, layout: str) -> BlockSpec:
    names = SEGMENT_NAMES[group.kind]
    item = DTYPES[group.dtype][0]
    shape = (group.block_tokens, group.kv_heads, group.head_dim)
    tokens, heads, dim = shape
    segment_bytes = tokens * heads * dim * item
    token_bytes = heads * dim * item  # of one segment
    segments = []
    for position, (layer, name) in enumerate((layer, name) for layer in group.layers for name in names):
        if layout == "layer_token_major":
            offset, strides = position * segment_bytes, (token_bytes, dim * item, item)
        elif layout == "layer_head_major":
            offset, strides = position * segment_bytes, (dim * item, tokens * dim * item, item)
        elif layout == "token_major":
            row_bytes = len(group.layers) * len(names) * token_bytes
            offset, strides = position * token_bytes, (row_bytes, dim * item, item)
        else:
            raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
        segments.append(Segment(name, layer, group.dtype, shape, offset, strides))
    return BlockSpec(index, tuple(segments))
