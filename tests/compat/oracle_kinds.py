"""The models that the logs are of: which groups, and what the manager is told beside them.

A config is plain JSON, as it stands in a log's first line; the manager is built from it and from nothing else.
Units: tokens.
"""

import math
from dataclasses import dataclass

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.compat.oracle_pool import InsertionOrder


@dataclass(frozen=True)
class Kind:
    """A model, and what its requests are like.

    loads: a connector may load blocks. drafts_max: lookahead tokens. identities: salt, adapter and images occur.
    crowded: an admission may happen in the step of the operation before it.
    """

    groups: tuple
    hash_tokens: int
    eagle: bool = False
    caching: bool = True
    retention_tokens: int | None = None
    watermark: float = 0.0
    loads: bool = True
    drafts_max: int = 3
    identities: bool = False
    crowded: bool = False


def kinds(b):
    """All kinds by name, for blocks of `b` tokens."""
    full, full2, full4, draft = _full(b), _full(2 * b), _full(4 * b), _full(b, eagle=True)
    swa, swa2, swa3, swa_draft = _swa(b, 2 * b), _swa(2 * b, 4 * b), _swa(3 * b, 2 * b), _swa(b, 2 * b, eagle=True)
    tail, wide = _swa(b, b + 1), _swa(b, 4 * b)
    local = _group("chunked_local", b, chunk_tokens=3 * b)
    mamba, mamba2, mamba4, states = _mamba(b), _mamba(2 * b), _mamba(4 * b), _mamba(b, mode="all")
    spec, spec2, spec_states = _mamba(b, drafts=1), _mamba(2 * b, drafts=1), _mamba(b, mode="all", drafts=2)
    cross = _group("cross", b, encoder_tokens_max=6 * b)
    bare = {"loads": False, "drafts_max": 0}
    return {
        "mla": Kind((_group("mla", b),), b),
        "swa": Kind((_swa(b, 2 * b + 1),), b),
        "chunkedonly": Kind((local,), b),
        "fullchunked": Kind((full, local), b),
        "sizes": Kind((full2, swa), b),
        "sizes2": Kind((full, swa2), b),
        "sizes3": Kind((full2, swa3), b),
        "twins": Kind((swa, full, swa, full), b),
        "twoswa": Kind((swa, _swa(b, 3 * b + 1)), b),
        "three": Kind((full, swa, _swa(b, 3 * b + 1, retained_tokens=b)), b, watermark=0.07),
        "eagle": Kind((full,), b, eagle=True),
        "eaglefull": Kind((draft, swa), b, eagle=True),
        "eagleswa": Kind((full, swa_draft), b, eagle=True),
        "eagleall": Kind((full, swa), b, eagle=True),
        "eaglethree": Kind((full, swa, _swa(b, 3 * b + 1, eagle=True)), b, eagle=True),
        "eaglesizes": Kind((full2, wide), b, eagle=True),
        "mambaall": Kind((full, states), b, drafts_max=0),
        "mambaallspec": Kind((full, spec_states), b, drafts_max=2),
        "mambaalign": Kind((full, mamba), b, watermark=0.05, drafts_max=0),
        "mambaspec": Kind((full, spec), b, drafts_max=1),
        "mambaonly": Kind((mamba,), b, drafts_max=0),
        "mambaeagle": Kind((draft, spec), b, eagle=True, drafts_max=1),
        "mambatwins": Kind((full, mamba, mamba), b, drafts_max=0),
        "mambasmall": Kind((full2, mamba), b, drafts_max=0),
        "mambastep": Kind((full, mamba), b, crowded=True, drafts_max=0),
        "mambafine": Kind((full, mamba2), b, **bare),
        "mambahash": Kind((full2, mamba2), b, **bare),
        "mambahash4": Kind((full4, mamba4), b, identities=True, **bare),
        "mambahashswa": Kind((full2, mamba2, swa), b, **bare),
        "mambahashspec": Kind((full2, spec2), b, loads=False, drafts_max=1),
        "mambahasheagle": Kind((full2, spec2), b, eagle=True, loads=False, drafts_max=1),
        "retain": Kind((full, tail), b, retention_tokens=4 * b),
        "retain0": Kind((full, tail), b, retention_tokens=0),
        "retaineagle": Kind((full, tail), b, eagle=True, retention_tokens=4 * b),
        "retainmamba": Kind((full, mamba), b, retention_tokens=3 * b, drafts_max=0),
        "retainmamba0": Kind((full, mamba), b, retention_tokens=0, drafts_max=0),
        "retainhash": Kind((full2, mamba2), b, retention_tokens=2 * b, **bare),
        "retainhash0": Kind((full2, mamba2), b, retention_tokens=0, **bare),
        "cross": Kind((full, cross), b, caching=False, **bare),
        "nocache": Kind((full,), b, caching=False),
        "nocacheswa": Kind((full, swa), b, caching=False),
        "rich": Kind((full,), b, watermark=0.1, identities=True),
        "richswa": Kind((full, swa), b, watermark=0.1, identities=True),
    }


def _group(kind, block_tokens, eagle=False, **more):
    return {"kind": kind, "block_tokens": block_tokens, "eagle": eagle} | more


def _full(block_tokens, eagle=False):
    return _group("full", block_tokens, eagle)


def _swa(block_tokens, window, eagle=False, retained_tokens=0):
    return _group("sliding_window", block_tokens, eagle, window=window, retained_tokens=retained_tokens)


def _mamba(block_tokens, mode="align", drafts=0):
    return _group("mamba", block_tokens, mode=mode, speculative_blocks=drafts)


def config_of(kind, blocks, block_tokens):
    """What a log's first line says of its manager."""
    return {
        "groups": list(kind.groups),
        "blocks_total": blocks,
        "hash_tokens": kind.hash_tokens,
        "tokens_max": 16 * block_tokens + 3,
        "tokens_in_flight": 5 * block_tokens,
        "caching": kind.caching,
        "eagle": kind.eagle,
        "retention_tokens": kind.retention_tokens,
        "watermark": kind.watermark,
    }


def scheduler_tokens(config):
    """The block that a scheduler plans with: hits and loads end on its boundaries."""
    return math.lcm(*(group["block_tokens"] for group in config["groups"]))


def manager_of(config):
    """vLLM's manager of that config."""
    groups = [
        KVCacheGroupSpec([f"layer{i}"], _spec(group), is_eagle_group=group["eagle"])
        for i, group in enumerate(config["groups"])
    ]
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=config["blocks_total"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=config["retention_tokens"],
        ),
        max_model_len=config["tokens_max"],
        scheduler_block_size=scheduler_tokens(config),
        hash_block_size=config["hash_tokens"] if config["caching"] else scheduler_tokens(config),
        max_in_flight_tokens=config["tokens_in_flight"],
        enable_caching=config["caching"],
        use_eagle=config["eagle"],
        log_stats=True,
        enable_kv_cache_events=True,
        watermark=config["watermark"],
    )
    manager.block_pool.cached_block_hashes_by_block = InsertionOrder()
    return manager


def _spec(group):
    size = group["block_tokens"]
    heads = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    match group["kind"]:
        case "full":
            return FullAttentionSpec(**heads)
        case "mla":
            return MLAAttentionSpec(**heads)
        case "sliding_window":
            window, retained = group["window"], group["retained_tokens"]
            return SlidingWindowSpec(**heads, sliding_window=window, extra_retained_tokens=retained)
        case "chunked_local":
            return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group["chunk_tokens"])
        case "cross":
            return CrossAttentionSpec(**heads)
        case "mamba":
            mode, drafts = group["mode"], group["speculative_blocks"]
            state = {"shapes": ((1,),), "dtypes": (torch.float32,)}
            return MambaSpec(block_size=size, **state, mamba_cache_mode=mode, num_speculative_blocks=drafts)
