"""The sections of a configuration: which keys there are, what they default to, and what they become.

Owns no state; everything is frozen. A field's name says the unit (`capacity_bytes`), its validation alias is the
key in the YAML (`capacity`). Rules about one value live in its annotation, rules between values in `rules`.
Units: bytes, seconds, tokens, fractions from 0 to 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import Field

from kvtier.blocks.algorithms import HASHES
from kvtier.blocks.coding import CODECS, LOSSY, NONE
from kvtier.blocks.spec import DTYPES, LAYOUTS, SEGMENT_NAMES
from kvtier.config.fields import (
    ByteRateOrOff,
    Bytes,
    BytesOrZero,
    Count,
    CountOrZero,
    Device,
    Flag,
    Fraction,
    MaybeCount,
    MaybePath,
    MaybeRate,
    MaybeText,
    MaybeWear,
    Name,
    PathText,
    Seconds,
    Section,
    Text,
    not_yet,
    one_of,
)
from kvtier.errors import UsageError
from kvtier.registry import POLICY_ENTRY_POINTS, suggestion
from kvtier.types import ModelSpec

RAW_ONLY = ("is not for the tier that attention reads: its slots hold KV as it is", "Put it on a host or lmdb tier.")
NO_FIXED_SIZE = ("makes blocks of no fixed size, and a host tier has slots of one", "Use it on the lmdb tier.")
MaybeDtype = Annotated[str | None, one_of("dtype", DTYPES)]
Kind = one_of(
    "kind",
    SEGMENT_NAMES,
    not_yet("sliding_window", "mamba", "chunked_local", "cross", use="full or mla groups only"),
)


class _PolicyNames:
    """The shipped policies, and those that other packages declare; asked anew each time, and nothing is imported."""

    def __iter__(self) -> Iterator[str]:
        yield from ("lru", "arc", "hit_density", "fifo", "lfu", "two_q", "s3_fifo", "sieve", "w_tinylfu")
        yield from (point.name for point in entry_points(group=POLICY_ENTRY_POINTS))


Policy = Annotated[str, one_of("policy", _PolicyNames(), elsewhere=r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")]
Admission = Annotated[str, one_of("admission", ["always", "second_access", "ghost_hit", "tinylfu"])]
Wanted = one_of("choice", ["auto", "on", "off"])
GROUP_KEYS = ("kind", "layers", "kv_heads", "head_dim", "dtype", "block_tokens")


class GroupSection(Section):
    """One entry of `model.groups`. `layers` is a number of layers, or their indexes."""

    kind: Annotated[str, Kind] = Field(default="full", examples=["full"])
    layers: Any = Field(examples=["30"])
    kv_heads: MaybeCount = Field(default=None, examples=["3"])
    head_dim: Count = Field(examples=["64"])
    dtype: MaybeDtype = Field(default=None, examples=["bfloat16"])
    block_tokens: MaybeCount = Field(default=None, examples=["16"])


class ModelSection(Section):
    """`model`. Either the shape of its only group, or `groups`."""

    name: Text = Field(examples=["SmolLM2-135M-Instruct"])
    weights: MaybePath = Field(default=None, examples=["./model"])
    weights_epoch: Text = Field(default="auto", examples=["v1"])
    layers: MaybeCount = Field(default=None, examples=["30"])
    kv_heads: MaybeCount = Field(default=None, examples=["3"])
    head_dim: MaybeCount = Field(default=None, examples=["64"])
    dtype: MaybeDtype = Field(default=None, examples=["bfloat16"])
    block_tokens: Count = Field(default=16, examples=["16"])
    groups: Any = Field(default=None, examples=["[...]"])
    layout: Annotated[str, one_of("layout", LAYOUTS)] = Field(
        default="layer_token_major", examples=["layer_token_major"]
    )
    hash: Annotated[str, one_of("hash", HASHES)] = Field(default="sha256_cbor", examples=["sha256_cbor"])
    hash_seed: MaybeText = Field(default=None, examples=["'0'"])
    tensor_parallel: Count = Field(default=1, examples=["1"])
    pipeline_parallel: Count = Field(default=1, examples=["1"])
    context_parallel: Count = Field(default=1, examples=["1"])
    codec: Annotated[str, one_of("codec", (NONE, *LOSSY))] = Field(default=NONE, examples=["none"])


class _Tier(Section):
    type: str
    name: Name
    capacity_bytes: Bytes = Field(validation_alias="capacity", examples=["4GiB"])
    policy: Policy = Field(default="lru", examples=["lru"])
    low_watermark: Fraction = Field(default=0.10, examples=["0.10"])
    high_watermark: Fraction = Field(default=0.20, examples=["0.20"])


class GpuTierConfig(_Tier):
    """The slots that attention reads. device: `host`, `cuda`, `cuda:1`...; `auto` is host memory in this version.

    capacity_max: the addresses reserved, up to which `resize` can grow the tier; by default its capacity.
    sequence_views: slots can be shown one behind the other; for layout token_major.
    access: `copy` brings what is hit into the slots; `uva` leaves it in host memory, where kvtier's kernels read it.
    """

    type: Literal["gpu"] = Field(default="gpu", examples=["gpu"])
    name: Name = Field(default="gpu", examples=["gpu"])
    capacity_max_bytes: Bytes = Field(
        default_factory=lambda found: found.get("capacity_bytes", 0), validation_alias="capacity_max", examples=["1GiB"]
    )
    device: Device = Field(default="auto", examples=["auto"])
    sequence_views: Flag = Field(default=False, examples=["true"])
    codec: Annotated[str, one_of("codec", [NONE], dict.fromkeys(CODECS[1:], RAW_ONLY))] = Field(
        default=NONE, examples=["none"]
    )
    access: Annotated[str, one_of("access", ["copy", "uva"])] = Field(default="copy", examples=["copy"])


class HostTierConfig(_Tier):
    """One slab of host memory. pin, hugepages: `auto` takes what can be had, `on` insists, `off` does not ask."""

    type: Literal["host"] = Field(default="host", examples=["host"])
    name: Name = Field(default="host", examples=["host"])
    pin: Annotated[str, Wanted] = Field(default="auto", examples=["auto"])
    hugepages: Annotated[str, Wanted] = Field(default="auto", examples=["auto"])
    codec: Annotated[str, one_of("codec", (NONE, *LOSSY), {"exp4": NO_FIXED_SIZE})] = Field(
        default=NONE, examples=["int8"]
    )
    admission: Admission = Field(default="always", examples=["always"])


class LmdbTierConfig(_Tier):
    """A store on disk: at most `capacity_bytes`, and it leaves `min_free_bytes` of its file system alone.

    wear: how much the drive may be written per day; None: as much as comes.
    """

    type: Literal["lmdb"] = Field(default="lmdb", examples=["lmdb"])
    name: Name = Field(default="lmdb", examples=["lmdb"])
    path: PathText = Field(examples=["./kvtier-data"])
    min_free_bytes: BytesOrZero = Field(default=0, validation_alias="min_free", examples=["5GiB"])
    durability: Annotated[str, one_of("durability", ["none", "batch", "strict"])] = Field(
        default="batch", examples=["batch"]
    )
    payload: Annotated[str, one_of("payload", ["slab", "inline"])] = Field(default="slab", examples=["slab"])
    verify: Flag = Field(default=True, examples=["true"])
    codec: Annotated[str, one_of("codec", CODECS)] = Field(default=NONE, examples=["exp4"])
    scrub_bytes_per_s: ByteRateOrOff = Field(default=0, validation_alias="scrub", examples=["20MiB/s"])
    admission: Admission = Field(default="always", examples=["always"])
    wear: MaybeWear = Field(default=None, examples=["500GiB/day"])


# A `codec` that is not said is that of the tier above, if that is lossy: see `config.codecs`.
TierConfig = GpuTierConfig | HostTierConfig | LmdbTierConfig
TIER_TYPES: dict[str, type[TierConfig]] = {"gpu": GpuTierConfig, "host": HostTierConfig, "lmdb": LmdbTierConfig}


class PrefetchConfig(Section):
    """How many requests ahead to look, and which share of the tier below the top hints may fill."""

    lookahead_requests: CountOrZero = Field(default=8, examples=["8"])
    budget: Fraction = Field(default=0.25, examples=["0.25"])


class LimitsConfig(Section):
    """How long a request waits for a load, and how many bytes may be on their way at once.

    prefill_tokens_per_s: how fast the engine computes a prompt, until it reports that itself, from 0.001 to 1e9; None:
    not known.
    governor: do not load what is computed faster.
    pin_quota: the share of each tier's blocks that hints may keep there.
    """

    load_deadline_s: Seconds = Field(default=0.5, validation_alias="load_deadline", examples=["500ms"])
    queue_bytes: Bytes = Field(default=256 << 20, validation_alias="queue", examples=["256MiB"])
    prefill_tokens_per_s: MaybeRate = Field(default=None, examples=["2500"])
    governor: Flag = Field(default=True, examples=["true"])
    pin_quota: Fraction = Field(default=0.25, examples=["0.25"])


class TraceConfig(Section):
    """Where requests are recorded, if at all: their blocks' hashes (with a salt nobody can test a prompt against
    them), times and sizes. max: when the file is set aside and begun anew."""

    record: MaybePath = Field(default=None, examples=["./requests.jsonl"])
    salt: MaybeText = Field(default=None, examples=["any secret text"])
    max_bytes: Bytes = Field(default=1 << 30, validation_alias="max", examples=["1GiB"])


@dataclass(frozen=True)
class Setting:
    """One value of a loaded configuration, spelled as in the YAML, and where it came from."""

    value: object
    origin: str


@dataclass(frozen=True)
class Config:
    """A configuration that can work: every value is present, checked and in its own unit.

    settings: the same values by YAML path (``tiers[1].capacity``), with origins; empty for one made by hand.
    notes: what works, and less well than it reads, in sentences.
    """

    model: ModelSpec
    tiers: tuple[TierConfig, ...]
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    settings: Mapping[str, Setting] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def origin(self, path: str) -> str:
        """Where a value came from: a file and line, a variable, the command line, or `default`.

        Raises UsageError for a path that this configuration does not have.
        """
        if path not in self.settings:
            raise UsageError(f"no setting {path!r}. {suggestion(path, self.settings)}")
        return self.settings[path].origin
