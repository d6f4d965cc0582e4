"""What a configuration does less well than it reads: sentences with numbers, for whoever starts it.

Owns no state; refuses nothing. Units: bytes, slots.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from kvtier.blocks.coding import Codings
from kvtier.config.codecs import codecs_of, stride_bytes_max
from kvtier.config.schema import GpuTierConfig, TierConfig
from kvtier.config.units import readable_bytes
from kvtier.types import ModelSpec


def notes_on(model: ModelSpec, tiers: Sequence[TierConfig]) -> tuple[str, ...]:
    """In the order of the tiers."""
    codecs = codecs_of(tiers)
    strides_bytes = [stride_bytes_max(model, codec) for codec in codecs]
    return (
        *_smaller_than_above(tiers, strides_bytes),
        *_coarse_watermarks(tiers, strides_bytes),
        *_codecs_in_vain(model, codecs),
    )


def slots_of(tier: TierConfig, stride_bytes: int) -> int:
    """How many blocks a tier holds, nearly; one slot of the top tier is the null block."""
    return tier.capacity_bytes // stride_bytes - isinstance(tier, GpuTierConfig)


def _smaller_than_above(tiers: Sequence[TierConfig], strides_bytes: Sequence[int]) -> Iterator[str]:
    """It still serves as the way down, and keeps what left the tier above last: no reason to refuse it."""
    for index, (above, tier) in enumerate(pairwise(tiers), start=1):
        fewer_blocks = tier.capacity_bytes // strides_bytes[index] < above.capacity_bytes // strides_bytes[index - 1]
        if tier.capacity_bytes < above.capacity_bytes and fewer_blocks:
            has, more = readable_bytes(tier.capacity_bytes), readable_bytes(above.capacity_bytes, up=True)
            yield (
                f"tiers[{index}].capacity: {tier.name} holds {has}, less than the {more} of {above.name} above it: "
                f"much of what it has will lie in {above.name} too"
            )


def _codecs_in_vain(model: ModelSpec, codecs: Sequence[str]) -> Iterator[str]:
    """Slots are whole pages: what saves no page of a block is not done at all."""
    for index, codec in enumerate(codecs):
        codings = Codings.of(codec, model)
        if codec == "exp4" and all(codings.room_bytes(raw_bytes) == raw_bytes for raw_bytes in codings.lengths_bytes):
            yield f"tiers[{index}].codec: exp4 saves no page of a block of this model; they are kept as they are"


def _coarse_watermarks(tiers: Sequence[TierConfig], strides_bytes: Sequence[int]) -> Iterator[str]:
    """The lowest tier demotes nowhere."""
    for index, tier in enumerate(tiers[:-1]):
        slots = slots_of(tier, strides_bytes[index])
        low, high = ceil(tier.low_watermark * slots), ceil(tier.high_watermark * slots)
        if low == high:
            yield (
                f"tiers[{index}].high_watermark: of {slots} slots of {tier.name}, low_watermark {tier.low_watermark:g} "
                f"and high_watermark {tier.high_watermark:g} both come to {low}: blocks go down one at a time"
            )
