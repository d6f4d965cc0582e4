"""Attention over a block table on the card, and what float64 says of it.

Owns: a problem (`Problem`, plain arrays) and its place on the card (`Placed`). A slot holds K then V of its tokens.
Always: slots that no table names are NaN, so that reading one shows; slot 0 is never named.
Units:  tokens, slots.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Stream
from kvtier.kernels import attention, launch_attention
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.floats import F32, from_float, to_float
from kvtier.kernels.launch import Launch
from kvtier.kernels.launch_attention import AttentionShape, BatchOnDevice, split_tokens_for
from kvtier.testing.gpu_check.card import Card, Desk

BLOCK_TOKENS = 16
POISON = 0xFF  # NaN in every dtype
SPARE_BYTES = 1 << 16  # a desk's, for the small arrays
PERIOD = 999_983  # values after which the pool repeats itself; a prime, so that no two slots are alike


@dataclass(frozen=True, slots=True)
class Problem:
    """pool: [slots, 2, block_tokens, kv_heads, head_dim]; queries: [queries, heads, head_dim]; bfloat16 as uint16."""

    pool: NDArray[Any]
    queries: NDArray[Any]
    batch: Batch
    dtype: str

    @property
    def splits_max(self) -> int:
        return -(-int(self.batch.kv_tokens.max()) // launch_attention.SPLIT_TOKENS_LEAST)

    @property
    def desk_bytes(self) -> int:
        """What `Placed` needs beside the pool."""
        results = (self.splits_max + 2) * self.queries.size * 5
        return self.queries.nbytes + results + self.batch.tables.nbytes + SPARE_BYTES

    def oracle(self) -> tuple[F32, str]:
        """Results float32 [queries, heads, head_dim], computed in float64, and by whom."""
        try:
            import torch  # noqa: F401
        except ImportError:
            kv = PagedKv(self.pool[:, 0], self.pool[:, 1])
            return attention.attend(self.queries, kv, self.batch)[0], "numpy, float64 (torch is not installed)"
        return _sdpa(self), "torch's scaled_dot_product_attention, float64"


def problem(
    seed: int,
    dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    kv_tokens: list[int],
    *,
    queries: int = 1,
    window: int | None = None,
) -> Problem:
    """One sequence per number of cached tokens, each with up to `queries` queries at its end."""
    rng = np.random.default_rng(seed)
    widths = [-(-tokens // BLOCK_TOKENS) for tokens in kv_tokens]
    order = iter(rng.permutation(sum(widths)) + 1)
    tables = np.zeros((len(kv_tokens), max(widths)), np.int32)
    pool = np.full((sum(widths) + 2, 2, BLOCK_TOKENS, heads[1], head_dim), np.nan, np.float32)
    for row, width in enumerate(widths):
        tables[row, :width] = [next(order) for _ in range(width)]
    pool[1:-1] = np.resize(rng.standard_normal(PERIOD, np.float32), pool[1:-1].shape)
    counts = [min(queries, tokens) for tokens in kv_tokens]
    batch = Batch(
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        positions=np.array([tokens - count for tokens, count in zip(kv_tokens, counts, strict=True)], np.int32),
        kv_tokens=np.array(kv_tokens, np.int32),
        tables=tables,
        window=window,
    )
    asked = rng.standard_normal((sum(counts), heads[0], head_dim), np.float32)
    with np.errstate(invalid="ignore"):
        return Problem(from_float(pool, dtype), from_float(asked, dtype), batch, dtype)


class Placed:
    """A problem on the card: `run` gives it to a stream, `result` fetches what came out."""

    def __init__(
        self, card: Card, question: Problem, pool_address: int, desk: Desk, *, stride_bytes: int | None = None
    ) -> None:
        """pool_address: where the pool lies, slots `stride_bytes` apart; by default one behind the other."""
        self._card, self._question = card, question
        batch, (count, heads, head_dim) = question.batch, question.queries.shape
        slot_bytes = question.pool[0].nbytes
        kv_heads, row_bytes = question.pool.shape[3], head_dim * item_bytes(question.dtype)
        self.tables = desk.put(batch.tables)
        on_device = BatchOnDevice(
            desk.put(batch.query_starts),
            desk.put(batch.positions),
            desk.put(batch.kv_tokens),
            self.tables,
            sequences=len(batch.positions),
            queries=count,
            queries_max=int(np.diff(batch.query_starts).max()),
            kv_tokens_max=int(batch.kv_tokens.max()),
        )
        shape = AttentionShape(
            device_keys=pool_address,
            keys_to_values=slot_bytes // 2,
            device_stride=stride_bytes or slot_bytes,
            token_stride=kv_heads * row_bytes,
            head_stride=row_bytes,
            table_width=batch.tables.shape[1],
            block_tokens=BLOCK_TOKENS,
            heads=heads,
            kv_heads=kv_heads,
            window=batch.window or 0,
            scale=head_dim**-0.5,
        )
        shape.split_tokens = split_tokens_for(on_device, shape, card.multiprocessors)
        rows, named = count * heads, {"dtype": question.dtype, "head_dim": head_dim}
        parts_out = desk.room(question.splits_max * rows * head_dim * 4)
        parts_sums, sums = desk.room(question.splits_max * rows * 4), desk.room(rows * 4)
        self._out = desk.room(question.queries.nbytes)
        card.fill(self._out, POISON, question.queries.nbytes)
        attend = launch_attention.attend(parts_out, parts_sums, desk.put(question.queries), on_device, shape, **named)
        parts = attend.grid[2]
        merge = launch_attention.merge(self._out, sums, parts_out, parts_sums, parts=parts, rows=rows, **named)
        self.launches: tuple[Launch, Launch] = (attend, merge)

    def run(self, stream: Stream | None = None) -> None:
        """Give both launches to the stream, the card's own by default."""
        for launch in self.launches:
            self._card.launcher.launch(launch, (stream or self._card.stream).key)

    def result(self) -> F32:
        """float32 [queries, heads, head_dim]; the stream must be over. What lay there becomes NaN."""
        raw = np.empty_like(self._question.queries)
        self._card.get(self._out, raw)
        self._card.fill(self._out, POISON, raw.nbytes)
        return to_float(raw, self._question.dtype)


def relative_error(found: F32, wanted: F32) -> float:
    """Norm of the difference by the norm of what is wanted; infinite if something is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))


def _sdpa(question: Problem) -> F32:
    import torch

    batch, out = question.batch, np.zeros(question.queries.shape, np.float32)
    group = question.queries.shape[1] // question.pool.shape[3]
    queries = to_float(question.queries, question.dtype).astype(np.float64)
    for row, (start, stop) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        tokens = int(batch.kv_tokens[row])
        blocks = to_float(question.pool[batch.tables[row, : -(-tokens // BLOCK_TOKENS)]], question.dtype)
        keys, values = (
            torch.from_numpy(blocks[:, part].reshape(-1, *blocks.shape[3:])[:tokens].astype(np.float64))
            .permute(1, 0, 2)
            .repeat_interleave(group, 0)
            for part in (0, 1)
        )
        places = torch.arange(int(batch.positions[row]), int(batch.positions[row]) + int(stop - start))[:, None]
        seen = torch.arange(tokens)[None] <= places
        if batch.window is not None:
            seen &= torch.arange(tokens)[None] > places - batch.window
        asked = torch.from_numpy(queries[start:stop]).permute(1, 0, 2)
        found = torch.nn.functional.scaled_dot_product_attention(asked, keys, values, seen)
        out[start:stop] = found.permute(1, 0, 2).numpy()
    return out
