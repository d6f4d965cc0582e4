"""What callers of kernels rely on, whoever runs them: the CPU (`reference`) or a device.

Four small abilities, each over batches. Arrays are those of the place where the kernels run: numpy or CPU tensors for
the reference. Nobody takes ownership; results are new unless a method says where it writes.

Always: slots and blocks that a call does not name keep their bytes. No slot that is written may be named twice in a
        call. Damaged bytes end in a False per block, never in an access outside the arrays.
Units:  bytes, slots, blocks (foreign index), tokens.
Pools:  uint8 [slots, stride_bytes]. A *coded pool* holds coded blocks, of at most `coded.coded_bytes_max` bytes each.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.fragments import Fragments


class FragmentKernels(Protocol):
    """Moves whole blocks between a foreign cache and slots."""

    def gather(self, fragments: Fragments, blocks: Any, pool: Any, slots: Any) -> None:
        """Copy foreign blocks [n] (int32) into the slots [n] (int32) of the pool."""
        ...

    def scatter(self, pool: Any, slots: Any, fragments: Fragments, blocks: Any) -> None:
        """Copy the slots [n] of the pool into foreign blocks [n]."""
        ...


class CodecKernels(Protocol):
    """Codes blocks on the way down and decodes them on the way up. Codecs and dtypes by name (`coded`, `arrays`)."""

    def quantize(self, arrays: Sequence[Any], blocks: Any, coded_pool: Any, coded_slots: Any, codec: str) -> None:
        """Write blocks [n] of KV arrays, as int8 or fp8, into coded slots [n].

        arrays: one per fragment, [blocks, rows, head_dim] of one dtype; slots of ours are one, the pool seen as
        rows. A coded block holds the rows of all arrays, in their order.
        """
        ...

    def dequantize(
        self, coded_pool: Any, coded_slots: Any, arrays: Sequence[Any], blocks: Any, codec: str
    ) -> list[bool]:
        """The way back. Returns per block whether its head was that of such a block; if not, nothing is written."""
        ...

    def pack(self, pool: Any, slots: Any, coded_pool: Any, coded_slots: Any, dtype: str, values: int) -> None:
        """Write the first `values` values of each slot [n], losslessly (exp4, or raw), into coded slots [n]."""
        ...

    def unpack(self, coded_pool: Any, coded_slots: Any, pool: Any, slots: Any, dtype: str, values: int) -> list[bool]:
        """The way back. Returns per block whether it was sound; if not, the slot's bytes are undefined."""
        ...


class ChecksumKernels(Protocol):
    """Checksums of blocks where they lie."""

    def checksums(self, pool: Any, slots: Any, seeds: Any, length_bytes: int) -> Any:
        """xxh3_64 of the first `length_bytes` of each slot [n], with seeds [n] (uint64): uint64 [n]."""
        ...


class AttentionKernels(Protocol):
    """Attention over a block table; partial results can be merged."""

    def attend(self, queries: Any, kv: PagedKv, batch: Batch, scale: float | None = None) -> tuple[Any, Any]:
        """Results float32 [queries, heads, head_dim], and their log-sum-exp float32 [queries, heads].

        queries: [queries, heads, head_dim] of the KV's dtype. scale: None is head_dim ** -0.5.
        """
        ...

    def merge(self, parts: Any, log_sums: Any, dtype: str) -> tuple[Any, Any]:
        """Results over disjoint tokens into one, in the dtype, and their log-sum-exp (float32).

        parts: float32 [parts, queries, heads, head_dim]; log_sums: float32 [parts, queries, heads].
        """
        ...


class Kernels(FragmentKernels, CodecKernels, ChecksumKernels, AttentionKernels, Protocol):
    """All of them."""
