"""Random batches over paged KV: real block layouts, shuffled tables, and NaN wherever nobody may look."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier.blocks.spec import LAYOUTS, block_specs
from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.floats import from_float, to_float
from kvtier.types import GroupSpec, ModelSpec
from tests.kernels.guarded import guarded

LAYER = 1  # of two: an address that forgets the layer reads the other one's values

NOWHERE = 10**8  # a slot far outside of every pool


@dataclass(frozen=True)
class World:
    """Queries, paged KV and a batch; `dense` is the KV of each sequence in order, as float64 [tokens, heads, dim]."""

    queries: NDArray
    kv: PagedKv
    batch: Batch
    dtype: str
    dense: list[tuple[NDArray[np.float64], NDArray[np.float64]]]


def world(
    seed: int,
    dtype: str,
    head_dim: int,
    *,
    window: int | None = None,
    host_blocks: bool = False,
    kv_heads: int | None = None,
    tokens_max: int = 130,
) -> World:
    """A batch of up to three sequences: at the end, behind it or before it, single queries, and none."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3)) if kv_heads is None else kv_heads
    group, block_tokens = int(rng.choice([1, 2, 3, 5, 12])), int(rng.choice([1, 7, 16, 64]))
    sequences = int(rng.integers(1, 4))
    kv_tokens = (rng.integers(1, tokens_max, sequences) * (rng.random(sequences) < 0.9)).astype(np.int32)
    counts = rng.choice([0, 1, 1, 4, 9], sequences).astype(np.int32)
    counts[0] = max(1, counts[0])
    room = np.maximum(0, kv_tokens - counts)
    positions = np.choose(rng.integers(0, 3, sequences), [kv_tokens, room, room // 2]).astype(np.int32)
    width = max(1, int(-(-kv_tokens.max() // block_tokens)))
    tables = guarded(np.full((sequences, width), NOWHERE, np.int32))
    blocks = -(-kv_tokens // block_tokens)
    slots = rng.permutation(int(blocks.sum())).astype(np.int32)
    for sequence, own in enumerate(np.split(slots, np.cumsum(blocks)[:-1])):
        tables[sequence, : len(own)] = own
        if host_blocks:
            tables[sequence, : len(own)] = np.where(rng.random(len(own)) < 0.5, own, ~own)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    batch = Batch(starts, positions, kv_tokens, tables, window)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    kv = PagedKv(
        *_pool(rng, dtype, layout, int(blocks.sum()), block_tokens, kv_heads, head_dim),
        *(_pool(rng, dtype, layout, int(blocks.sum()), block_tokens, kv_heads, head_dim) if host_blocks else ()),
    )
    queries = from_float(rng.standard_normal((int(starts[-1]), kv_heads * group, head_dim)).astype(np.float32), dtype)
    dense = [_dense(kv, table, int(tokens), dtype) for table, tokens in zip(tables, kv_tokens, strict=True)]
    _poison(kv, batch, dtype)
    return World(queries, kv, batch, dtype, dense)


def _pool(
    rng: np.random.Generator, dtype: str, layout: str, slots: int, block_tokens: int, kv_heads: int, head_dim: int
) -> tuple[NDArray, NDArray]:
    """K and V of one layer in a pool of whole slots, as the block's own layout has them."""
    group = GroupSpec("full", (0, LAYER), kv_heads, head_dim, dtype, block_tokens)
    (spec,) = block_specs(ModelSpec("m", "e", (group,), layout=layout))
    kind = "uint16" if dtype == "bfloat16" else dtype
    memory = rng.standard_normal((slots, spec.block_bytes // np.dtype(kind).itemsize)).astype(np.float32)
    pool = guarded(from_float(memory, dtype)).view(np.uint8)
    views = []
    for segment in spec.of_layer(LAYER):
        first = pool[:, segment.offset_bytes :].view(kind)
        views.append(as_strided(first, (slots, *segment.shape), (pool.strides[0], *segment.strides_bytes)))
    return views[0], views[1]


def _dense(kv: PagedKv, table: NDArray[np.int32], tokens: int, dtype: str) -> tuple[NDArray, NDArray]:
    block_tokens = kv.keys.shape[1]
    parts: tuple[list[NDArray], list[NDArray]] = ([], [])
    for token in range(tokens):
        entry = int(table[token // block_tokens])
        pools = (kv.keys, kv.values) if entry >= 0 else (kv.host_keys, kv.host_values)
        for part, pool in zip(parts, pools, strict=True):
            part.append(pool[entry if entry >= 0 else ~entry, token % block_tokens].copy())
    shape = (tokens, *kv.keys.shape[2:])
    keys, values = (to_float(np.array(part, kv.keys.dtype).reshape(shape), dtype).astype(np.float64) for part in parts)
    return keys, values


def _poison(kv: PagedKv, batch: Batch, dtype: str) -> None:
    """Make NaN of every token that no query sees; blocks of which none is seen lead nowhere."""
    nan = np.uint16(0x7FC0) if dtype == "bfloat16" else np.dtype(dtype).type(np.nan)
    block_tokens, seen = kv.keys.shape[1], set()
    for sequence, _, start, stop in batch.spans():
        seen |= {(int(batch.tables[sequence, t // block_tokens]), t % block_tokens) for t in range(start, stop)}
    batch.tables[~np.isin(batch.tables, [entry for entry, _ in seen])] = NOWHERE
    for pools, entry_of in (((kv.keys, kv.values), int), ((kv.host_keys, kv.host_values), lambda slot: ~slot)):
        for slot in range(len(kv.keys)):
            for token in range(block_tokens):
                if (entry_of(slot), token) not in seen and pools[0] is not None:
                    pools[0][slot, token] = pools[1][slot, token] = nan


def dtypes_and_dims() -> list[tuple[str, int]]:
    """Every variant of the attention kernels."""
    return [(dtype, head_dim) for dtype in FORMATS for head_dim in (64, 96, 128, 192, 256)]
