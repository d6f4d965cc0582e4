"""Rules between values: the order of tiers, and sizes that cannot help.

Owns no state. Each rule adds a ConfigError with the numbers and the smallest value that works; none changes
anything. Units: bytes; a block's bytes are its stride, whole pages of 4 KiB as on host and disk.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvtier.blocks.spec import BlockSpec, block_specs
from kvtier.config.schema import TIER_TYPES, LimitsConfig, LmdbTierConfig, TierConfig
from kvtier.config.units import format_bytes
from kvtier.errors import ConfigError
from kvtier.types import ModelSpec

BLOCKS_MIN = 2  # with a single slot nothing can be kept while something is filled


def check_order(types: Sequence[str], problems: list[ConfigError]) -> None:
    """gpu first, then host and lmdb as wanted, each at most once. `types` are known ones."""
    order = list(TIER_TYPES)
    for index, kind in enumerate(types):
        path = f"tiers[{index}].type"
        if kind in types[:index]:
            problems.append(ConfigError(path, f"a second tier of type {kind!r}", f"Keep one {kind} tier."))
        elif any(order.index(kind) < order.index(above) for above in types[:index]):
            problem = f"{kind!r} is listed under a slower tier"
            problems.append(ConfigError(path, problem, f"List the fastest first: {', '.join(order)}."))
    if "gpu" not in types:
        problem = "there is no tier of type 'gpu', whose slots attention reads"
        remedy = "Begin with `- {type: gpu, capacity: 512MiB}`; without a GPU it lives in host memory."
        problems.append(ConfigError("tiers[0].type", problem, remedy))


def check_names(tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    names = [tier.name for tier in tiers]
    for index, name in enumerate(names):
        if name in names[:index]:
            first = names.index(name)
            problem = f"{name!r} is also the name of tiers[{first}]"
            problems.append(ConfigError(f"tiers[{index}].name", problem, "Give each tier a name of its own."))


def check_growth(tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """Refuse a tier that holds less than the one above it: pure churn (dynamo PR#6506)."""
    for index, (above, tier) in enumerate(pairwise(tiers), start=1):
        if tier.capacity_bytes < above.capacity_bytes:
            problems.append(_churns(index, tier, above))


def check_watermarks(index: int, tier: TierConfig, problems: list[ConfigError]) -> None:
    low, high = tier.low_watermark, tier.high_watermark
    if not 0 <= low < high < 1:
        problem = f"low_watermark {low} and high_watermark {high} are not 0 <= low < high < 1"
        remedy = "They are shares of free or clean slots: below low demotion starts, at high it stops."
        problems.append(ConfigError(f"tiers[{index}].low_watermark", problem, remedy))


def check_sizes(
    model: ModelSpec, tiers: Sequence[TierConfig], limits: LimitsConfig, problems: list[ConfigError]
) -> None:
    """Refuse tiers that hold next to nothing, and a queue under one block."""
    largest = max(block_specs(model), key=lambda spec: spec.stride_bytes)
    for index, tier in enumerate(tiers):
        if tier.capacity_bytes < BLOCKS_MIN * largest.stride_bytes:
            problems.append(_too_small(f"tiers[{index}].capacity", tier.capacity_bytes, BLOCKS_MIN, largest, model))
    if limits.queue_bytes < largest.stride_bytes:
        problems.append(_too_small("limits.queue", limits.queue_bytes, 1, largest, model))


def check_store_outside_weights(weights: Path | None, tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """With `weights_epoch: auto` a store among the weights would make a new epoch of each start."""
    for index, tier in enumerate(tiers):
        if weights is not None and isinstance(tier, LmdbTierConfig) and tier.path.is_relative_to(weights):
            problem = f"{tier.path} lies inside model.weights, whose files weights_epoch: auto watches"
            remedy = "Put the store elsewhere; its own changes would make every start forget what it holds."
            problems.append(ConfigError(f"tiers[{index}].path", problem, remedy))


def _too_small(path: str, have_bytes: int, blocks: int, spec: BlockSpec, model: ModelSpec) -> ConfigError:
    group = model.groups[spec.group]
    need_bytes = blocks * spec.stride_bytes
    problem = (
        f"{format_bytes(have_bytes)} is less than {blocks} block{'s' * (blocks > 1)} of "
        f"{format_bytes(spec.stride_bytes)} ({group.block_tokens} tokens of {len(group.layers)} layers)"
    )
    return ConfigError(path, problem, f"Use at least {format_bytes(need_bytes)}.")


def _churns(index: int, tier: TierConfig, above: TierConfig) -> ConfigError:
    has, needs = format_bytes(tier.capacity_bytes), format_bytes(above.capacity_bytes)
    problem = (
        f"{tier.name} holds {has}, less than the {needs} of {above.name} above it: "
        "blocks would leave it before they are missed above"
    )
    remedy = f"Use at least {needs}, or leave the tier out."
    return ConfigError(f"tiers[{index}].capacity", problem, remedy)
