"""How attention is launched: the record of addresses and strides, the split of long sequences, grid and arguments.

A launch writes one partial result per split; `merge` joins them, and may join what the engine computed elsewhere.
Units: tokens, rows (a query and a head), bytes; device addresses as integers.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from kvtier.errors import UsageError
from kvtier.kernels.attention import PagedKv
from kvtier.kernels.launch import Launch, address_of, expect_aligned
from kvtier.kernels.source import variant_of

THREADS = 128
ROWS = 8  # rows of one KV head that a thread block takes together
TILE_TOKENS = 32
SPLIT_TOKENS_LEAST = 256  # below, merging costs more than the parallelism gives
BLOCKS_PER_MULTIPROCESSOR = 2


class AttentionShape(ctypes.Structure):
    """Where K and V lie. The same fields in the same order as AttentionShape of src/attention.cu.

    Addresses are those of one layer's K in slot 0 of the device's and of the host's pool (0: none); strides in bytes.
    `keys_to_values` leads from a K to its V, in both pools. window 0: none.
    """

    _fields_ = (
        ("device_keys", ctypes.c_uint64),
        ("host_keys", ctypes.c_uint64),
        ("keys_to_values", ctypes.c_int64),
        ("device_stride", ctypes.c_uint64),
        ("host_stride", ctypes.c_uint64),
        ("token_stride", ctypes.c_uint64),
        ("head_stride", ctypes.c_uint64),
        ("table_width", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("split_tokens", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )

    # For type checkers: ctypes makes these from the fields.
    device_keys: int
    host_keys: int
    keys_to_values: int
    device_stride: int
    host_stride: int
    token_stride: int
    head_stride: int
    heads: int
    kv_heads: int
    window: int
    split_tokens: int


def shape_over(
    kv: PagedKv, heads: int, table_width: int, *, window: int | None = None, scale: float | None = None
) -> AttentionShape:
    """The shape of a layer's K and V as `cache.paged_kv` gives them; `split_tokens` is left to the caller.

    Arrays of CuPy or numpy; numpy's lie in host memory that the device reads at the same address. scale: None is
    head_dim ** -0.5. Raises UsageError if K and V, or the two pools, do not lie alike.
    """
    _, block_tokens, kv_heads, head_dim = kv.keys.shape
    pools = [(kv.keys, kv.values)] + ([] if kv.host_keys is None else [(kv.host_keys, kv.host_values)])
    inner = {array.strides[1:] for pair in pools for array in pair}
    distances = {_address(values) - _address(keys) for keys, values in pools}
    if len(inner) != 1 or len(distances) != 1 or any(k.strides[0] != v.strides[0] for k, v in pools):
        raise UsageError("K and V of both pools must lie alike in a slot; take them from one cache's paged_kv()")
    ((token_stride, head_stride, _),) = inner
    return AttentionShape(
        device_keys=_address(kv.keys),
        host_keys=0 if kv.host_keys is None else _address(kv.host_keys),
        keys_to_values=distances.pop(),
        device_stride=kv.keys.strides[0],
        host_stride=0 if kv.host_keys is None else kv.host_keys.strides[0],
        token_stride=token_stride,
        head_stride=head_stride,
        table_width=table_width,
        block_tokens=block_tokens,
        heads=heads,
        kv_heads=kv_heads,
        window=window or 0,
        scale=head_dim**-0.5 if scale is None else scale,
    )


def _address(array: Any) -> int:
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


@dataclass(frozen=True, slots=True)
class BatchOnDevice:
    """A batch as in `attention.Batch`, its arrays by address, and the numbers that the host must know of it."""

    query_starts: int
    positions: int
    kv_tokens: int
    tables: int
    sequences: int
    queries: int  # of all sequences
    queries_max: int  # of one sequence
    kv_tokens_max: int

    def row_tiles(self, shape: AttentionShape) -> int:
        """Thread blocks that the rows of the longest sequence need, per KV head."""
        return -(-self.queries_max * (shape.heads // shape.kv_heads) // ROWS)

    def span_max(self, shape: AttentionShape) -> int:
        """The most tokens that the rows of one thread block see."""
        within_window = shape.window + ROWS - 1 if shape.window else self.kv_tokens_max
        return max(1, min(self.kv_tokens_max, within_window))


def split_tokens_for(batch: BatchOnDevice, shape: AttentionShape, multiprocessors: int) -> int:
    """Tokens per split that keep a device of so many multiprocessors busy; a multiple of TILE_TOKENS."""
    blocks = max(1, batch.row_tiles(shape) * batch.sequences * shape.kv_heads)
    splits = -(-BLOCKS_PER_MULTIPROCESSOR * multiprocessors // blocks)
    tokens = max(SPLIT_TOKENS_LEAST, -(-batch.span_max(shape) // splits))
    return -(-tokens // TILE_TOKENS) * TILE_TOKENS


def attend(
    out: int, log_sums: int, queries: int, batch: BatchOnDevice, shape: AttentionShape, *, dtype: str, head_dim: int
) -> Launch:
    """Attention of all queries. Writes `grid[2]` parts: out float32 [parts, queries, heads, head_dim], log_sums
    float32 [parts, queries, heads].

    Raises UsageError where heads, alignment or the split do not fit.
    """
    if shape.kv_heads < 1 or shape.heads % shape.kv_heads or shape.heads < 1:
        raise UsageError(f"{shape.heads} heads over {shape.kv_heads} KV heads; the first must be a multiple")
    if shape.split_tokens < 1 or shape.split_tokens % TILE_TOKENS:
        raise UsageError(f"splits of {shape.split_tokens} tokens; use a multiple of {TILE_TOKENS}")
    expect_aligned(
        device_keys=shape.device_keys,
        host_keys=shape.host_keys,
        keys_to_values=shape.keys_to_values,
        device_stride=shape.device_stride,
        host_stride=shape.host_stride,
        token_stride=shape.token_stride,
        head_stride=shape.head_stride,
    )
    splits = -(-batch.span_max(shape) // shape.split_tokens)
    return Launch(
        variant_of("attention", dtype, head_dim),
        "kv_attend",
        (batch.row_tiles(shape), batch.sequences * shape.kv_heads, splits),
        (THREADS, 1, 1),
        (
            *map(address_of, (out, log_sums, queries, batch.query_starts, batch.positions)),
            *map(address_of, (batch.kv_tokens, batch.tables)),
            shape,
            address_of(batch.queries * shape.heads),
        ),
    )


def merge(
    out: int, log_sums: int, parts_out: int, parts_log_sums: int, *, parts: int, rows: int, dtype: str, head_dim: int
) -> Launch:
    """Join `parts` results over disjoint tokens: out [rows, head_dim] in the dtype, log_sums float32 [rows].

    rows: queries * heads. parts_out: float32 [parts, rows, head_dim]; parts_log_sums: float32 [parts, rows].
    """
    return Launch(
        variant_of("attention", dtype, head_dim),
        "kv_merge",
        (rows, 1, 1),
        (THREADS, 1, 1),
        (*map(address_of, (out, log_sums, parts_out, parts_log_sums)), ctypes.c_int32(parts)),
    )
