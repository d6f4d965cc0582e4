"""Attention over a block table on the CPU, and the merge of partial results: what the device's kernels must give.

Computed in float64 and rounded at the end: this is an oracle first. A query at position p sees the cached tokens t
with t < kv_tokens, t <= p and, under a window w, t > p - w. With the position at kv_tokens or beyond, that is the whole
cached prefix: the engine then attends to the new tokens itself and merges both results by their log-sum-exp.

Always: a token that a query does not see changes nothing, not even as NaN; what no query sees is not read. A query
        that sees nothing gets zeroes and a log-sum-exp of -inf.
Units:  tokens, positions (absolute, from 0), slots. Log-sum-exp is natural, of the scaled scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import UsageError
from kvtier.kernels.arrays import Indices, kv_values
from kvtier.kernels.floats import F32, to_float

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's K and V of all slots, each [slots, block_tokens, kv_heads, head_dim], any strides; one dtype.

    Entry e >= 0 of a block table is slot e of `keys` and `values`; e < 0 is slot ~e of the host's pool, read in place.
    """

    keys: Any
    values: Any
    host_keys: Any = None
    host_values: Any = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Which tokens attend to which: `sequences` sequences, their queries packed one after the other.

    query_starts [sequences + 1]: the first query of each sequence, and the number of all. positions [sequences]: of
    each first query. kv_tokens [sequences]: cached tokens. tables [sequences, width]: slots, block by block. All int32.
    """

    query_starts: Indices
    positions: Indices
    kv_tokens: Indices
    tables: Indices
    window: int | None = None

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """For each query: its sequence, itself, and the half-open range of the tokens that it sees."""
        for sequence, (start, stop) in enumerate(zip(self.query_starts[:-1], self.query_starts[1:], strict=True)):
            for query in range(int(start), int(stop)):
                after = int(self.positions[sequence]) + query - int(start) + 1
                seen_from = max(0, after - self.window) if self.window else 0
                yield sequence, query, seen_from, min(int(self.kv_tokens[sequence]), after)

    def expect_sound(self, queries: int, block_tokens: int) -> None:
        """Raises UsageError if the parts of the batch do not fit together."""
        sequences = len(self.positions)
        if len(self.query_starts) != sequences + 1 or len(self.kv_tokens) != sequences or len(self.tables) != sequences:
            raise UsageError("a batch needs a position, kv_tokens and a table row per sequence, and one start more")
        if self.query_starts[0] != 0 or self.query_starts[-1] != queries or (np.diff(self.query_starts) < 0).any():
            raise UsageError(f"query_starts must rise from 0 to the {queries} queries")
        if sequences and int(self.kv_tokens.max()) > self.tables.shape[1] * block_tokens:
            raise UsageError(f"kv_tokens {int(self.kv_tokens.max())} exceed what {self.tables.shape[1]} blocks hold")
        if self.window is not None and self.window < 1:
            raise UsageError(f"a window of {self.window} tokens; use 1 or more, or None")


def attend(queries: Any, kv: PagedKv, batch: Batch, scale: float | None = None) -> tuple[F32, F32]:
    """Attention of packed queries [queries, heads, head_dim]; `heads` is a multiple of kv_heads.

    scale: of the scores; None is head_dim ** -0.5. Returns float32 results [queries, heads, head_dim] and their
    log-sum-exp [queries, heads]. Raises UsageError if shapes or dtypes do not fit together.
    """
    rows, dtype = kv_values(queries)
    pools = _Pools(kv, dtype)
    batch.expect_sound(len(rows), pools.block_tokens)
    heads, head_dim = rows.shape[1:]
    if head_dim != pools.head_dim or heads % pools.kv_heads:
        raise UsageError(
            f"queries of {heads} heads, {head_dim} values each, over {pools.kv_heads} KV heads of {pools.head_dim}"
        )
    grouped = to_float(rows, dtype).astype(np.float64).reshape(len(rows), pools.kv_heads, -1, head_dim)
    out = np.zeros(grouped.shape, np.float32)
    log_sums = np.full(grouped.shape[:-1], -np.inf, np.float32)
    for sequence, query, start, stop in batch.spans():
        if start < stop:
            keys, values = pools.read(batch.tables[sequence], start, stop)
            scores = np.einsum("hgd,thd->hgt", grouped[query], keys) * (head_dim**-0.5 if scale is None else scale)
            largest = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True)
            out[query] = np.einsum("hgt,thd->hgd", weights / total, values)
            log_sums[query] = (largest + np.log(total))[..., 0]
    return out.reshape(rows.shape), log_sums.reshape(len(rows), heads)


def merge(parts: F32, log_sums: F32) -> tuple[F32, F32]:
    """Merge results of the same queries over disjoint tokens.

    parts: [parts, ..., head_dim], each normalised; log_sums: [parts, ...]. Returns results [..., head_dim] and their
    log-sum-exp [...]. A part whose log-sum-exp is -inf saw nothing and is not read. Raises UsageError if the shapes do
    not belong together.
    """
    if parts.shape[:-1] != log_sums.shape or not len(parts):
        raise UsageError(f"parts {parts.shape} and log-sum-exps {log_sums.shape}: one is wanted for each row of a part")
    largest = np.fmax.reduce(log_sums.astype(np.float64), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(np.isneginf(log_sums), 0.0, np.exp(log_sums - largest))
        total = weights.sum(axis=0)
        shares = np.where(total == 0, 0.0, weights / total)
        merged = np.where(shares[..., None] == 0, 0.0, parts) * shares[..., None]
        return merged.sum(axis=0).astype(np.float32), (largest + np.log(total)).astype(np.float32)


class _Pools:
    """K and V of the device's and the host's slots as float64, read by table."""

    def __init__(self, kv: PagedKv, dtype: str) -> None:
        self._dtype = dtype
        self._device = self._pair(kv.keys, kv.values)
        self._host = None if kv.host_keys is None else self._pair(kv.host_keys, kv.host_values)
        _, self.block_tokens, self.kv_heads, self.head_dim = self._device[0].shape

    def _pair(self, keys: Any, values: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        (keys, keys_dtype), (values, values_dtype) = kv_values(keys), kv_values(values)
        if not keys_dtype == values_dtype == self._dtype or keys.shape != values.shape or keys.ndim != 4:
            raise UsageError(
                f"K {keys_dtype} {keys.shape}, V {values_dtype} {values.shape}, queries {self._dtype}: these must agree"
            )
        return keys, values

    def read(self, table: Indices, start: int, stop: int) -> tuple[F64, F64]:
        """K and V of the tokens start to stop, each [tokens, kv_heads, head_dim]."""
        first_block = start // self.block_tokens
        entries = table[first_block : -(-stop // self.block_tokens)].tolist()
        own = slice(start - first_block * self.block_tokens, stop - first_block * self.block_tokens)
        blocks = [self._block(entry) for entry in entries]
        keys, values = (np.concatenate(parts)[own].astype(np.float64) for parts in zip(*blocks, strict=True))
        return keys, values

    def _block(self, entry: int) -> tuple[F32, F32]:
        """K and V of one block, each [block_tokens, kv_heads, head_dim]."""
        pools, slot = (self._device, entry) if entry >= 0 else (self._host, ~entry)
        if pools is None:
            raise UsageError(f"a table names slot {slot} of the host, and no host pool is given")
        return to_float(pools[0][slot], self._dtype), to_float(pools[1][slot], self._dtype)
