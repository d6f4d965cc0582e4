"""Rules between values: the order of tiers, and sizes that cannot help.

Owns no state. Each rule adds a ConfigError with the numbers and the smallest value that works; none changes
anything. What works, and less well than it reads, is told in `notes`.
Units: bytes; a block's bytes are its stride, whole pages of 4 KiB as on host and disk.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, gcd
from pathlib import Path

from kvtier.blocks.algorithms import HASHES
from kvtier.blocks.coding import LOSSY
from kvtier.blocks.spec import DTYPES, SEGMENT_NAMES, BlockSpec, block_specs
from kvtier.config.codecs import codecs_of, stride_bytes_max
from kvtier.config.notes import slots_of
from kvtier.config.schema import (
    TIER_TYPES,
    GpuTierConfig,
    HostTierConfig,
    LimitsConfig,
    LmdbTierConfig,
    PrefetchConfig,
    TierConfig,
    TraceConfig,
)
from kvtier.config.units import readable_bytes
from kvtier.errors import ConfigError
from kvtier.types import PAGE_BYTES, ModelSpec

TRACE_SALT_BYTES_MAX = 64  # of a BLAKE2b key
TRACE_BYTES_MIN = 1 << 20
PACKED = (".xz", ".gz", ".zst")  # as `kvtier simulate` knows them

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
    """Refuse a tier that cannot hold what demotion keeps copied below the one above: pure churn (dynamo PR#6506).

    Each copy would push out another, whose original must then be copied down again, for ever.
    """
    for index, (above, tier) in enumerate(pairwise(tiers), start=1):
        needed_bytes = ceil(above.high_watermark * above.capacity_bytes)
        if tier.capacity_bytes < needed_bytes:
            problems.append(_churns(index, tier, above, needed_bytes))


def check_hash(hash_name: str, tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """Refuse keys that do not outlive the process where a tier outlives it."""
    if HASHES.get(hash_name).encoding != "pickle":
        return
    for index, tier in enumerate(tiers):
        if isinstance(tier, LmdbTierConfig):
            problem = (
                f"hash {hash_name!r} hashes a pickle, and equal tokens can pickle differently: its keys do not "
                f"outlive the process, and tiers[{index}] ({tier.name}) does"
            )
            other = "xxhash_cbor, or sha256_cbor where tenants must be kept apart" if hash_name == "xxhash" else ""
            remedy = f"Use {other or 'sha256_cbor'}; or leave out the {tier.type} tier."
            problems.append(ConfigError("model.hash", problem, remedy))


def check_range(index: int, tier: TierConfig, problems: list[ConfigError]) -> None:
    """Refuse a range of addresses that is smaller than what is to lie in it."""
    if isinstance(tier, GpuTierConfig) and tier.capacity_max_bytes < tier.capacity_bytes:
        has, needs = readable_bytes(tier.capacity_max_bytes), readable_bytes(tier.capacity_bytes, up=True)
        problem = f"{has} of addresses do not hold the capacity of {needs}"
        problems.append(ConfigError(f"tiers[{index}].capacity_max", problem, f"Use at least {needs}, or leave it out."))


def check_access(model: ModelSpec, tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """Refuse reading in place where there is nothing to read, or no kernel of ours that would."""
    if not any(isinstance(tier, GpuTierConfig) and tier.access == "uva" for tier in tiers):
        return
    unread = [group for group in model.groups if group.kind != "full" or group.dtype.startswith("float8")]
    if len(tiers) < 2 or not isinstance(tiers[1], HostTierConfig):
        problem, remedy = "uva reads host memory in place, and no host tier lies below", "Add one, or use copy."
        problems.append(ConfigError("tiers[0].access", problem, remedy))
    elif any(isinstance(tier, GpuTierConfig) and tier.sequence_views for tier in tiers):
        problem = "with uva blocks stay in host memory, and sequence_views show slots of the device"
        problems.append(ConfigError("tiers[0].access", problem, "Use copy, or leave sequence_views out."))
    elif unread:
        problem = f"uva is for kvtier's kernels, and none reads {unread[0].kind} groups of {unread[0].dtype}"
        problems.append(ConfigError("tiers[0].access", problem, "Use copy."))


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
    terms = _block_terms(largest, model)
    for index, (tier, codec) in enumerate(zip(tiers, codecs_of(tiers), strict=True)):
        stride_bytes = stride_bytes_max(model, codec)
        if tier.capacity_bytes < BLOCKS_MIN * stride_bytes:
            coded = f"{terms}, in {codec}" if codec in LOSSY else terms
            where = f"tiers[{index}].capacity"
            problems.append(_too_small(where, tier.capacity_bytes, BLOCKS_MIN, stride_bytes, coded))
    if limits.queue_bytes < largest.stride_bytes:
        problems.append(_too_small("limits.queue", limits.queue_bytes, 1, largest.stride_bytes, terms))


def check_sequence_views(model: ModelSpec, tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """Refuse what cannot be mapped token behind token. A device has larger pages, which are known when it is opened."""
    if not any(isinstance(tier, GpuTierConfig) and tier.sequence_views for tier in tiers):
        return
    path, specs = "tiers[0].sequence_views", block_specs(model)
    if model.layout != "token_major":
        problem = f"in layout {model.layout} a layer's tokens of one block do not lie beside those of the next"
        problems.append(ConfigError(path, problem, "Use model.layout: token_major, or leave it out."))
    lengths = {spec.block_bytes: spec.group for spec in specs}
    if len(lengths) > 1:
        problem = f"groups have blocks of {' and '.join(map(str, sorted(lengths)))} bytes, and slots are all as long"
        problems.append(ConfigError(path, problem, "Choose block_tokens that make them equal, or leave it out."))
    for block_bytes, group in lengths.items():
        if block_bytes % PAGE_BYTES:
            problems.append(_not_whole_pages(path, block_bytes, model.groups[group].block_tokens))


def check_prefetch(
    model: ModelSpec, tiers: Sequence[TierConfig], prefetch: PrefetchConfig, problems: list[ConfigError]
) -> None:
    """Refuse a budget that was asked for and comes to no slot at all (sglang PR#26449)."""
    if len(tiers) < 3 or not isinstance(tiers[1], HostTierConfig) or "budget" not in prefetch.model_fields_set:
        return
    slots = slots_of(tiers[1], stride_bytes_max(model, codecs_of(tiers)[1]))
    if prefetch.budget and not int(prefetch.budget * slots):
        problem = f"{prefetch.budget:g} of the {slots} slots of {tiers[1].name} is less than one: no hint could help"
        remedy = f"Use at least {ceil(100 / slots)}%, 0 to do without, or a larger {tiers[1].name}."
        problems.append(ConfigError("prefetch.budget", problem, remedy))


def check_store_outside_weights(weights: Path | None, tiers: Sequence[TierConfig], problems: list[ConfigError]) -> None:
    """With `weights_epoch: auto` a store among the weights would make a new epoch of each start."""
    for index, tier in enumerate(tiers):
        if weights is not None and isinstance(tier, LmdbTierConfig) and tier.path.is_relative_to(weights):
            problem = f"{tier.path} lies inside model.weights, whose files weights_epoch: auto watches"
            remedy = "Put the store elsewhere; its own changes would make every start forget what it holds."
            problems.append(ConfigError(f"tiers[{index}].path", problem, remedy))


def check_trace(trace: TraceConfig, problems: list[ConfigError]) -> None:
    """A salt that its hash takes whole, and a file that holds some requests and is called what it is."""
    if trace.record is not None and trace.record.suffix.lower() in PACKED:
        problem = f"{trace.record} is written as plain text, and its name says that it is packed"
        remedy = f"Name it {trace.record.with_suffix('')}; what is set aside of it can be packed."
        problems.append(ConfigError("trace.record", problem, remedy))
    if trace.salt is not None and len(trace.salt.encode()) > TRACE_SALT_BYTES_MAX:
        problem = f"has {len(trace.salt.encode())} bytes, and its hash takes {TRACE_SALT_BYTES_MAX}"
        problems.append(ConfigError("trace.salt", problem, "Use a shorter text."))
    if trace.max_bytes < TRACE_BYTES_MIN:
        problem = f"{readable_bytes(trace.max_bytes)} is less than {readable_bytes(TRACE_BYTES_MIN)}"
        problems.append(ConfigError("trace.max", problem, "A long request alone takes hundreds of KiB: use 1GiB, say."))


def _too_small(path: str, have_bytes: int, blocks: int, stride_bytes: int, terms: str) -> ConfigError:
    """terms: how a block comes by its bytes."""
    need_bytes = blocks * stride_bytes
    problem = (
        f"{readable_bytes(have_bytes)} is less than {blocks} block{'s' * (blocks > 1)} of "
        f"{readable_bytes(stride_bytes)} ({terms})"
    )
    return ConfigError(path, problem, f"Use at least {readable_bytes(need_bytes, up=True)}, or fewer block_tokens.")


def _not_whole_pages(path: str, block_bytes: int, block_tokens: int) -> ConfigError:
    tokens = PAGE_BYTES // gcd(block_bytes // block_tokens, PAGE_BYTES)
    problem = f"a block of {block_bytes} bytes is not whole pages of {PAGE_BYTES}, which memory is mapped in"
    return ConfigError(path, problem, f"Use block_tokens: {tokens} or a multiple of it, or leave it out.")


def _block_terms(spec: BlockSpec, model: ModelSpec) -> str:
    """How a block comes by its bytes."""
    group = model.groups[spec.group]
    terms = [f"{len(group.layers)} layers", " and ".join(SEGMENT_NAMES[group.kind]), f"{group.block_tokens} tokens"]
    terms += [f"{group.kv_heads} heads", f"dim {group.head_dim}", f"{DTYPES[group.dtype][0]} bytes of {group.dtype}"]
    whole = f"{spec.block_bytes} bytes, in whole pages" if spec.block_bytes != spec.stride_bytes else ""
    return " x ".join(terms) + (f" = {whole}" if whole else "")


def _churns(index: int, tier: TierConfig, above: TierConfig, needed_bytes: int) -> ConfigError:
    has, needs = readable_bytes(tier.capacity_bytes), readable_bytes(needed_bytes, up=True)
    problem = (
        f"{tier.name} holds {has}, less than the {needs} that demotion keeps copied below {above.name} "
        f"(high_watermark {above.high_watermark:g} of {readable_bytes(above.capacity_bytes)}): "
        "blocks would be copied down for ever"
    )
    remedy = f"Use at least {needs}, a lower high_watermark of {above.name}, or leave the tier out."
    return ConfigError(f"tiers[{index}].capacity", problem, remedy)
