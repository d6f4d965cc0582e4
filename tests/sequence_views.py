"""A small cache with sequence views on host memory, for tests: what its views must show."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.cache.leases import Lease
from kvtier.config import Config

BLOCK_TOKENS = 8
LAYERS, HEADS, DIM = 2, 2, 16
BLOCK_BYTES = BLOCK_TOKENS * LAYERS * 2 * HEADS * DIM * 4  # a page
MODEL = {
    "name": "tiny",
    "weights_epoch": "v1",
    "layers": LAYERS,
    "kv_heads": HEADS,
    "head_dim": DIM,
    "dtype": "float32",
    "block_tokens": BLOCK_TOKENS,
    "layout": "token_major",
}


def config_for(gpu: Any = None, model: Any = None, below: Any = (), **more: Any) -> Config:
    """15 usable slots of a page on the gpu tier, 64 in host memory."""
    first = {"type": "gpu", "capacity": "64KiB", "capacity_max": "128KiB", "sequence_views": True} | (gpu or {})
    tiers = [first, {"type": "host", "capacity": "256KiB", "pin": "off", "hugepages": "off"}, *below]
    return kvtier.load_config({"model": MODEL | (model or {}), "tiers": tiers} | more)


@pytest.fixture
def cache() -> Iterator[Any]:
    """Afterwards all books agree."""
    with kvtier.open_sync(config_for()) as cache:
        yield cache
        assert [*cache.check(), *cache.top_tier.check()] == []


def keys_of(cache: Any, number: int, blocks: int, shared: int = 0) -> Any:
    """Keys of a prompt of its own, behind a prefix of `shared` blocks that all have."""
    own = [number * 1000 + i for i in range((blocks - shared) * BLOCK_TOKENS)]
    return kvtier.hash_blocks([*range(shared * BLOCK_TOKENS), *own], cache.config.model)


def lease_of(cache: Any, keys: Any, owner: str = "req", blocks: int | None = None) -> Lease:
    lease = cache.reserve(cache.match(keys, owner), blocks or len(keys.groups[0]))
    assert isinstance(lease, Lease)
    return lease


def write(cache: Any, lease: Lease, first: int = 0) -> None:
    """Each value of each block from the first one on tells its slot, layer, segment and place."""
    for slot in lease.slots()[first:]:
        for layer in range(LAYERS):
            for name, array in cache.kv(0, layer).items():
                array[slot] = values(slot, layer, name)


def values(slot: int, layer: int, name: str) -> Any:
    place = np.arange(BLOCK_TOKENS * HEADS * DIM, dtype=np.float32).reshape(BLOCK_TOKENS, HEADS, DIM)
    return place + 1000 * (slot + 100 * layer + 1000 * (name == "v"))


def expected(cache: Any, lease: Lease, layer: int, name: str) -> Any:
    """The tokens of a lease by a copy from its slots."""
    return np.concatenate([cache.kv(0, layer)[name][slot] for slot in lease.slots()])


def same(cache: Any, lease: Lease, view: Any) -> bool:
    return all(
        np.array_equal(view.kv(layer)[name], expected(cache, lease, layer, name))
        for layer in range(LAYERS)
        for name in ("k", "v")
    )
