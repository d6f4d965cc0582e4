"""Attention over sequence views, against gathering the blocks and against a block table; and what a view costs.

    python benchmarks/sequence_views.py [--tokens 1280] [--queries 128] [--rounds 21] [--layers 30] [--kv-heads 3]
        [--head-dim 64] [--query-heads 9] [--json]

Two caches hold the same values: one with sequence views (layout token_major), one in the default layout, which is the
better one to gather from. Each way runs torch's `scaled_dot_product_attention` on one thread over the same tokens, all
layers one after the other, as a step of a model without the rest of it: one query, then a prefill of `--queries`
behind the cached tokens. "contiguous" reads a copy that was made before: nothing can be faster. The block table is
numpy's reference of our kernels, in float64, for one layer: an oracle, which tells no speed of a device.
Units: milliseconds per step, microseconds per block; all of CPU time, for one thread works and others may be busy.
"""

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import movement_program
import numpy as np

from kvtier.blocks.hashing import hash_blocks
from kvtier.cache.leases import Lease
from kvtier.cli.bench.report import Cost, Report
from kvtier.cli.bench.timing import interleave, plain
from kvtier.config import Config, load_config
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.errors import KvtierError
from kvtier.kernels.attention import Batch, PagedKv, attend

NAME = "sequence views"
BLOCK_TOKENS = 16
VIEW, GATHER, GATHER_SAME, CONTIGUOUS = "view", "gather", "gather, token_major", "contiguous"


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int = field(default=1280, metadata={"help": "of the sequence, whole blocks of 16"})
    queries: int = field(default=128, metadata={"help": "of the prefill"})
    rounds: int = field(default=21, metadata={"help": "of each way, in turns"})
    layers: int = field(default=30, metadata={"help": "of the model"})
    kv_heads: int = field(default=3, metadata={"help": "of the model"})
    head_dim: int = field(default=64, metadata={"help": "of the model"})
    query_heads: int = field(default=9, metadata={"help": "of the model"})


def disk_bytes(sizes: Sizes) -> int:
    return 0


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    if sizes.tokens % BLOCK_TOKENS:
        raise KvtierError(f"--tokens {sizes.tokens} are not whole blocks of {BLOCK_TOKENS}")
    torch = _torch()
    with ExitStack() as stack:
        viewed = stack.enter_context(open_sync(_config(sizes, "token_major")))
        paged = stack.enter_context(open_sync(_config(sizes, "layer_token_major")))
        leases = _scattered(viewed, sizes), _scattered(paged, sizes)
        _fill(sizes, (viewed, leases[0]), (paged, leases[1]))
        ways = _ways(torch, sizes, viewed, paged, *leases)
        for queries in (1, sizes.queries):
            _race(report, torch, sizes, ways, queries)
        _block_table(report, sizes, paged, leases[1])
        _costs(report, sizes, viewed, leases[0])


def _config(sizes: Sizes, layout: str) -> Config:
    model = {"name": "bench", "weights_epoch": "v1", "layers": sizes.layers, "kv_heads": sizes.kv_heads}
    model |= {"head_dim": sizes.head_dim, "dtype": "float32", "block_tokens": BLOCK_TOKENS, "layout": layout}
    block_bytes = sizes.layers * 2 * BLOCK_TOKENS * sizes.kv_heads * sizes.head_dim * 4
    slots = 2 * sizes.tokens // BLOCK_TOKENS + 3
    gpu = {"type": "gpu", "device": "host", "capacity": slots * block_bytes * 65 // 64}
    return load_config({"model": model, "tiers": [gpu | {"sequence_views": layout == "token_major"}]}, environ={})


def _scattered(cache: SyncCache, sizes: Sizes) -> Lease:
    """A lease whose slots lie in no order, as those of a cache that has been in use."""
    blocks, rng = sizes.tokens // BLOCK_TOKENS, random.Random(0)
    singles = [_lease(cache, number, 1) for number in range(2 * blocks)]
    rng.shuffle(singles)
    for single in singles:
        cache.release(single)
    return _lease(cache, -1, blocks)


def _lease(cache: SyncCache, number: int, blocks: int) -> Lease:
    keys = hash_blocks([number + 1, *range(blocks * BLOCK_TOKENS - 1)], cache.config.model)
    lease = cache.reserve(cache.match(keys, owner="bench"), blocks)
    if not isinstance(lease, Lease):
        raise KvtierError(f"the bench's own tier is too small: {lease!r}")
    return lease


def _fill(sizes: Sizes, *places: tuple[SyncCache, Lease]) -> None:
    """The same random values in both caches."""
    rng = np.random.default_rng(0)
    shape = (sizes.tokens // BLOCK_TOKENS, BLOCK_TOKENS, sizes.kv_heads, sizes.head_dim)
    for layer in range(sizes.layers):
        for name in ("k", "v"):
            values = rng.standard_normal(shape, dtype=np.float32)
            for cache, lease in places:
                cache.kv(0, layer)[name][list(lease.slots())] = values


Way = Callable[[int], list[Any]]  # layer -> [K, V], each [1, heads, tokens, dim]


def _ways(
    torch: Any, sizes: Sizes, viewed: SyncCache, paged: SyncCache, in_view: Lease, in_pages: Lease
) -> Mapping[str, Way]:
    view = viewed.sequence_view(in_view)
    shown = [[torch.from_dlpack(view.kv(layer)[name]) for name in ("k", "v")] for layer in range(sizes.layers)]
    copied = [[part.clone() for part in parts] for parts in shown]

    def gathering(cache: SyncCache, lease: Lease) -> Way:
        table = torch.tensor(lease.slots())
        pools = [[torch.from_dlpack(cache.kv(0, layer)[n]) for n in ("k", "v")] for layer in range(sizes.layers)]
        return lambda layer: [pool.index_select(0, table).flatten(0, 1) for pool in pools[layer]]

    ways: dict[str, Way] = {
        VIEW: lambda layer: shown[layer],
        GATHER: gathering(paged, in_pages),
        GATHER_SAME: gathering(viewed, in_view),
        CONTIGUOUS: lambda layer: copied[layer],
    }
    return {name: _by_heads(way) for name, way in ways.items()}


def _by_heads(way: Way) -> Way:
    return lambda layer: [part.permute(1, 0, 2)[None] for part in way(layer)]


def _race(report: Report, torch: Any, sizes: Sizes, ways: Mapping[str, Way], queries: int) -> None:
    attend_to = torch.nn.functional.scaled_dot_product_attention
    asked = torch.randn(1, sizes.query_heads, queries, sizes.head_dim)
    first = sizes.tokens - queries
    seen = torch.arange(sizes.tokens)[None] <= first + torch.arange(queries)[:, None]
    options = {"enable_gqa": True} | ({"attn_mask": seen} if queries > 1 else {})
    results = {name: attend_to(asked, *way(0), **options) for name, way in ways.items()}
    if not all(torch.allclose(results[VIEW], result, rtol=1e-5, atol=1e-6) for result in results.values()):
        raise KvtierError("the ways do not give the same results")

    def step(way: Way) -> None:
        for layer in range(sizes.layers):
            attend_to(asked, *way(layer), **options)

    timed = interleave({name: plain(partial(step, way)) for name, way in ways.items()}, sizes.rounds)
    what = "one query" if queries == 1 else f"{queries} queries"
    for name in ways:
        report.costs.append(Cost(f"{what}: {name}", "ms", [seconds * 1e3 for seconds in timed[name].cpu_s]))
    for name in ways:
        if name != VIEW:
            ratios = [rival / ours for rival, ours in zip(timed[name].cpu_s, timed[VIEW].cpu_s, strict=True)]
            report.costs.append(Cost(f"{what}: {name} / view, round by round", "x", ratios))


def _block_table(report: Report, sizes: Sizes, cache: SyncCache, lease: Lease) -> None:
    """The reference of our kernels: one query, one layer."""
    kv, rng = cache.kv(0, 0), np.random.default_rng(1)
    asked = rng.standard_normal((1, sizes.query_heads, sizes.head_dim), dtype=np.float32)
    starts, at, tokens = (np.array(row, np.int32) for row in ([0, 1], [sizes.tokens - 1], [sizes.tokens]))
    batch = Batch(starts, at, tokens, np.array([lease.slots()], np.int32))
    took_ms = []
    for _ in range(min(5, sizes.rounds)):
        begun_s = time.thread_time()
        attend(asked, PagedKv(kv["k"], kv["v"]), batch)
        took_ms.append((time.thread_time() - begun_s) * 1e3)
    report.costs.append(Cost("one query, one layer: block table, numpy's reference", "ms", took_ms))


def _costs(report: Report, sizes: Sizes, cache: SyncCache, lease: Lease) -> None:
    """Making and ending a view, and the first reading of one layer."""
    assert cache.top_tier is not None
    blocks, made, read, closed = len(lease.slots()), [], [], []
    for _ in range(sizes.rounds):
        begun_s = time.thread_time()
        view = cache.sequence_view(lease)
        made_s = time.thread_time()
        view.kv(0)["k"].sum()
        read_s = time.thread_time()
        view.close()
        made.append((made_s - begun_s) * 1e6 / blocks)
        read.append((read_s - made_s) * 1e6 / blocks)
        closed.append((time.thread_time() - read_s) * 1e6 / blocks)
    for what, values in (("making it", made), ("first sum over K of a layer", read), ("closing it", closed)):
        report.costs.append(Cost(f"view of {blocks} blocks: {what}", "us/block", values))
    report.notes.append(f"blocks of {cache.top_tier.stride_bytes:,} bytes, whose slots lie in no order")  # type: ignore[attr-defined]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise KvtierError("this takes torch: pip install 'kvtier[torch]'") from None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch


if __name__ == "__main__":
    movement_program.main(__name__)
