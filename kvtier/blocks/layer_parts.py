"""In which parts blocks are copied when layers are waited for one by one.

Pure. Always: the parts of a group cover its blocks, each byte once. Units: bytes, layers by the model's number.
"""

from collections.abc import Sequence

from kvtier.blocks.spec import DTYPES, BlockSpec, Segment
from kvtier.types import LayerPart

PART_BYTES_MIN = 28 << 10  # of a block: shorter pieces cross the link at a fraction of its speed (H100, CUDA 13)


def layer_parts(specs: Sequence[BlockSpec], part_bytes_min: int = PART_BYTES_MIN) -> tuple[LayerPart, ...]:
    """The parts of all groups, in the order in which a model needs them.

    One for each layer; neighbours share one as long as it is shorter than `part_bytes_min`. A group whose layout mixes
    the layers in a block (token_major) has a single part.
    """
    parts = [part for spec in specs for part in _parts_of(spec, part_bytes_min)]
    return tuple(sorted(parts, key=lambda part: min(part.layers)))


def _parts_of(spec: BlockSpec, part_bytes_min: int) -> list[LayerPart]:
    layers = tuple(dict.fromkeys(segment.layer for segment in spec.segments))  # as they lie in memory
    if not all(map(_is_contiguous, spec.segments)):
        return [LayerPart(spec.group, layers, 0, spec.block_bytes)]
    parts: list[LayerPart] = []
    for layer in layers:
        length_bytes = sum(segment.length_bytes for segment in spec.of_layer(layer))
        last = parts[-1] if parts else None
        if last is not None and last.length_bytes < part_bytes_min:
            joined = (*last.layers, layer)
            parts[-1] = LayerPart(spec.group, joined, last.offset_bytes, last.length_bytes + length_bytes)
        else:
            offset_bytes = last.offset_bytes + last.length_bytes if last is not None else 0
            parts.append(LayerPart(spec.group, (layer,), offset_bytes, length_bytes))
    return parts


def _is_contiguous(segment: Segment) -> bool:
    """Whether nothing of another segment lies between its values."""
    steps = zip(segment.shape, segment.strides_bytes, strict=True)
    return sum((count - 1) * stride for count, stride in steps) + DTYPES[segment.dtype][0] == segment.length_bytes
