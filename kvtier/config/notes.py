"""What a configuration does less well than it reads: sentences with numbers, for whoever starts it.

Owns no state; refuses nothing. Units: bytes, slots.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from kvtier.blocks.spec import block_specs
from kvtier.config.schema import GpuTierConfig, TierConfig
from kvtier.config.units import readable_bytes
from kvtier.types import ModelSpec


def notes_on(model: ModelSpec, tiers: Sequence[TierConfig]) -> tuple[str, ...]:
    """In the order of the tiers."""
    stride_bytes = max(spec.stride_bytes for spec in block_specs(model))
    return (*_smaller_than_above(tiers), *_coarse_watermarks(tiers, stride_bytes))


def slots_of(tier: TierConfig, stride_bytes: int) -> int:
    """How many blocks a tier holds, nearly; one slot of the top tier is the null block."""
    return tier.capacity_bytes // stride_bytes - isinstance(tier, GpuTierConfig)


def _smaller_than_above(tiers: Sequence[TierConfig]) -> Iterator[str]:
    """It still serves as the way down, and keeps what left the tier above last: no reason to refuse it."""
    for index, (above, tier) in enumerate(pairwise(tiers), start=1):
        if tier.capacity_bytes < above.capacity_bytes:
            has, more = readable_bytes(tier.capacity_bytes), readable_bytes(above.capacity_bytes, up=True)
            yield (
                f"tiers[{index}].capacity: {tier.name} holds {has}, less than the {more} of {above.name} above it: "
                f"much of what it has will lie in {above.name} too"
            )


def _coarse_watermarks(tiers: Sequence[TierConfig], stride_bytes: int) -> Iterator[str]:
    """The lowest tier demotes nowhere."""
    for index, tier in enumerate(tiers[:-1]):
        slots = slots_of(tier, stride_bytes)
        low, high = ceil(tier.low_watermark * slots), ceil(tier.high_watermark * slots)
        if low == high:
            yield (
                f"tiers[{index}].high_watermark: of {slots} slots of {tier.name}, low_watermark {tier.low_watermark:g} "
                f"and high_watermark {tier.high_watermark:g} both come to {low}: blocks go down one at a time"
            )
