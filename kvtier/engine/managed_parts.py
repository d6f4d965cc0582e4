"""The parts of a managed cache: the memory of its pages, the cache over the tiers below, the manager's groups.

Owns nothing: who asks closes what it was given. Always: what a configuration cannot be built on is told by its place.
Units: bytes.
"""

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.specs import FullAttention, Mla, Spec
from kvtier.config.schema import Config, GpuTierConfig, HostTierConfig
from kvtier.engine.build import open_at
from kvtier.engine.sync import SyncCache
from kvtier.errors import ConfigError
from kvtier.tiers.arena_tier import ArenaTier
from kvtier.types import GroupSpec


def pages_of(gpu: GpuTierConfig, length_bytes_max: int) -> ArenaTier:
    """The GPU tier's memory, of a fixed size: a block table is a promise."""
    if gpu.sequence_views:
        raise ConfigError(
            "tiers[0].sequence_views", "a manager's pages are read through its block tables", "Leave it out"
        )
    if gpu.access != "copy":
        raise ConfigError("tiers[0].access", "a manager's pages hold all that a request reads", "Use copy.")
    fixed = gpu.model_copy(update={"capacity_max_bytes": gpu.capacity_bytes})
    pages = open_at(0, fixed, NamespaceTable(), length_bytes_max)
    assert isinstance(pages, ArenaTier)
    return pages


def cache_over(config: Config) -> SyncCache:
    """An open cache over the tiers below the pages. Raises ConfigError if blocks cannot pass through the first."""
    first = config.tiers[0]
    if not isinstance(first, HostTierConfig):
        text = f"a tier of type {first.type!r} lies directly below the pages that a manager runs"
        raise ConfigError("tiers[1].type", text, "Put a host tier between: blocks pass through its slots.")
    cache = SyncCache(config)
    cache._start(first=1)
    return cache


def spec_of(group: GroupSpec) -> Spec:
    """What the manager calls the layers of a group."""
    if group.kind == "mla":
        return Mla(block_tokens=group.block_tokens, latent_dim=group.head_dim, dtype=group.dtype)
    return FullAttention(
        block_tokens=group.block_tokens, kv_heads=group.kv_heads, head_dim=group.head_dim, dtype=group.dtype
    )
