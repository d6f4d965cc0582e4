"""Real caches with tiny blocks for the tests of the public API. Every block's content follows from its key."""

import numpy as np

import kvtier
from kvtier.cache.leases import Lease

BLOCK_TOKENS = 4
LAYERS = 2


def config_for(path=None, gpu="64KiB", host="128KiB", lmdb="16MiB", **changes):
    """Blocks of 2 KiB in slots of 4 KiB: 15 usable gpu slots and 32 host slots, unless told otherwise."""
    model = {"name": "tiny", "weights_epoch": "v1", "layers": LAYERS, "kv_heads": 2, "head_dim": 16}
    model |= {"dtype": "float32", "block_tokens": BLOCK_TOKENS} | changes.pop("model", {})
    tiers = [{"type": "gpu", "capacity": gpu}]
    if host:
        tiers.append({"type": "host", "capacity": host, "pin": "off", "hugepages": "off"})
    if path is not None:
        tiers.append({"type": "lmdb", "path": str(path), "capacity": lmdb} | changes.pop("disk", {}))
    low, high = changes.pop("watermarks", (0.1, 0.2))
    for tier in tiers:
        tier |= {"low_watermark": low, "high_watermark": high}
    return kvtier.load_config({"model": model, "tiers": tiers} | changes)


def prompt(config, number, blocks):
    """The keys of a prompt of its own."""
    return kvtier.hash_blocks([number * 1000 + i for i in range(blocks * BLOCK_TOKENS)], config.model)


def values_of(key, layer, name):
    """What a block's segment holds: 22 bits of the key and 2 of the place, which float32 can tell apart."""
    return np.float32((int.from_bytes(key[:3], "big") >> 2) * 4 + layer * 2 + (name == "v"))


def check_ready(cache, lease, keys):
    """Assert that every restored block holds its key's values in every layer."""
    for group, row in enumerate(keys.groups):
        ready = lease.tokens_ready // BLOCK_TOKENS
        for slot, key in list(zip(lease.slots(group), row, strict=False))[:ready]:
            for layer in range(LAYERS):
                for name, view in cache.kv(group, layer).items():
                    assert (view[slot] == values_of(key, layer, name)).all(), (slot, layer, name)


def compute(cache, lease, keys):
    """Write and commit what is not restored."""
    for group, row in enumerate(keys.groups):
        pairs = list(zip(lease.slots(group), row, strict=False))[lease.tokens_ready // BLOCK_TOKENS :]
        for slot, key in pairs:
            for layer in range(LAYERS):
                for name, view in cache.kv(group, layer).items():
                    view[slot] = values_of(key, layer, name)
        cache.commit(lease, pairs)


def finish(cache, lease, keys):
    """Check, compute and release."""
    assert isinstance(lease, Lease), lease
    check_ready(cache, lease, keys)
    compute(cache, lease, keys)
    cache.release(lease)
    return lease


def serve(cache, keys):
    """One request with the blocking API."""
    return finish(cache, cache.reserve(cache.match(keys, owner="t"), len(keys.groups[0])), keys)


async def aserve(cache, keys):
    """One request with the asyncio API."""
    return finish(cache, await cache.reserve(cache.match(keys, owner="t"), len(keys.groups[0])), keys)
