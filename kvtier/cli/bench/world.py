"""Caches for the benches: a configuration from numbers of slots, and requests against it.

Owns no state. Blocks come in two shapes: SMALL, one page each, where only the bookkeeping is measured, and LARGE, a
real model's, where bytes are moved. Units: blocks, slots, bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.cache.leases import Lease
from kvtier.cli.bench.progress import Step, still
from kvtier.config import Config, load_config
from kvtier.engine.cache import TieredCache
from kvtier.engine.sync import SyncCache
from kvtier.errors import KvtierError
from kvtier.types import PAGE_BYTES

BLOCK_TOKENS = 16
SMALL = {"layers": 1, "kv_heads": 1, "head_dim": 32}  # 2 x 16 x 32 x 4 = 4,096 bytes
LARGE = {"layers": 30, "kv_heads": 3, "head_dim": 64}  # 30 x 2 x 16 x 3 x 64 x 4 = 737,280 bytes
SMALL_BYTES = PAGE_BYTES
LARGE_BYTES = 737_280
SPARE_SLOTS = 4  # beside what a bench puts into a memory tier, the null slot included


def config(
    shape: dict[str, int], block_bytes: int, gpu_slots: int, host_slots: int, store: Path, store_blocks: int
) -> Config:
    """gpu, host and lmdb tiers. Demotion doesn't run ahead of a flush, and a hint may fill the whole host tier."""
    sizes = [(gpu_slots + SPARE_SLOTS) * 65 // 64 * block_bytes, (host_slots + SPARE_SLOTS) * block_bytes]
    sizes[1] = max(sizes)
    disk = max(sizes[1], store_blocks * block_bytes * 3 // 2) + (64 << 20)
    calm = {"low_watermark": 0.0, "high_watermark": 0.01}
    tree: dict[str, Any] = {
        "model": {"name": "bench", "weights_epoch": "v1", "dtype": "float32", "block_tokens": BLOCK_TOKENS, **shape},
        "tiers": [
            {"type": "gpu", "capacity": sizes[0], "device": "host", **calm},
            {"type": "host", "capacity": sizes[1], "pin": "off", "hugepages": "off", **calm},
            {"type": "lmdb", "capacity": disk, "path": str(store.absolute()), **calm},
        ],
        "prefetch": {"budget": 1.0},
        "limits": {"load_deadline": "60s"},
    }
    return load_config(tree, environ={})  # the user's KVTIER_ variables are for the user's caches


def prompt(config: Config, number: int, blocks: int) -> Keys:
    """The keys of a prompt of its own."""
    first = number * 1_000_003
    return hash_blocks([(first + i) % 2**32 for i in range(blocks * BLOCK_TOKENS)], config.model)


def reserved(cache: SyncCache, keys: Keys, blocks: int) -> Lease:
    """A lease on the prompt, its known prefix restored. Raises KvtierError where a bench made its tiers too small."""
    lease = cache.reserve(cache.match(keys, owner="bench"), blocks)
    if not isinstance(lease, Lease):
        raise KvtierError(f"the bench's own tiers are too small: {lease!r}")
    return lease


def commit_all(cache: SyncCache, lease: Lease, keys: Keys) -> None:
    cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))


def small_disk_bytes(stored_blocks: int) -> int:
    """What a store of so many SMALL blocks takes: slots, a record of a few hundred bytes each, what it begins with."""
    return stored_blocks * SMALL_BYTES * 5 // 4 + (32 << 20)


def keep(cache: SyncCache, prompts: Sequence[Keys], step: Step = still) -> None:
    """Serve prompts nobody has met, and bring them down to the store."""
    for keys in prompts:
        blocks = len(keys.groups[0])
        lease = reserved(cache, keys, blocks)
        commit_all(cache, lease, keys)
        cache.release(lease)
        flush(cache)
        step()


def flush(cache: SyncCache) -> None:
    flushed = cache.flush()
    if flushed.failed:
        raise KvtierError(f"{flushed.failed} of {flushed.blocks} blocks did not reach the store")


def fill(cache: SyncCache | TieredCache, lease: Lease, source: np.random.Generator) -> None:
    """Write random KV into a lease's slots: disks may treat zeroes kindly."""
    slots = list(lease.slots())
    for layer in range(LARGE["layers"]):
        for view in cache.kv(0, layer).values():
            view[slots] = source.random((len(slots), *view.shape[1:]), dtype=np.float32)
