"""ReferenceKernels: every kernel on the CPU, with numpy. The oracle of the device's kernels, and the path without one.

Owns nothing. Takes numpy arrays and CPU tensors of torch (torch is not needed for the former).
Always: one block after the other, so that the bytes of one cannot depend on its neighbours.
Units:  bytes, slots, blocks, tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CorruptBlock, UsageError
from kvtier.kernels import attention, checksum, exponents, fragments, quantize
from kvtier.kernels.arrays import Bytes, host_array, item_bytes, kv_values
from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.floats import F32, from_float
from kvtier.kernels.fragments import Fragments


class ReferenceKernels:
    """`kvtier.kernels.base.Kernels` on the CPU."""

    def gather(self, fragments_of: Fragments, blocks: Any, pool: Any, slots: Any) -> None:
        fragments.gather(fragments_of, host_array(blocks), host_array(pool), host_array(slots))

    def scatter(self, pool: Any, slots: Any, fragments_of: Fragments, blocks: Any) -> None:
        fragments.scatter(host_array(pool), host_array(slots), fragments_of, host_array(blocks))

    def quantize(self, arrays: Sequence[Any], blocks: Any, coded_pool: Any, coded_slots: Any, codec: str) -> None:
        plain, dtype = _same_dtype(arrays)
        for block, place in _pairs(blocks, coded_slots):
            coded = quantize.encode(np.concatenate([array[block] for array in plain]), dtype, codec)
            _put(host_array(coded_pool)[place], coded)

    def dequantize(
        self, coded_pool: Any, coded_slots: Any, arrays: Sequence[Any], blocks: Any, codec: str
    ) -> list[bool]:
        plain, dtype = _same_dtype(arrays)
        (rows, row_values), sound = plain[0].shape[1:], []
        for block, place in _pairs(blocks, coded_slots):
            try:
                restored = quantize.decode(host_array(coded_pool)[place], dtype, rows * len(plain), row_values, codec)
            except CorruptBlock:
                sound.append(False)
                continue
            for array, part in zip(plain, np.split(restored, len(plain)), strict=True):
                array[block] = part
            sound.append(True)
        return sound

    def pack(self, pool: Any, slots: Any, coded_pool: Any, coded_slots: Any, dtype: str, values: int) -> None:
        length_bytes = values * item_bytes(dtype)
        for slot, place in _pairs(slots, coded_slots):
            block = np.ascontiguousarray(host_array(pool)[slot, :length_bytes])
            _put(host_array(coded_pool)[place], exponents.encode(block.view(_bits_type(dtype)), dtype))

    def unpack(self, coded_pool: Any, coded_slots: Any, pool: Any, slots: Any, dtype: str, values: int) -> list[bool]:
        sound = []
        for slot, place in _pairs(slots, coded_slots):
            try:
                block = exponents.decode(host_array(coded_pool)[place], dtype, values).view(np.uint8)
            except CorruptBlock:
                sound.append(False)
                continue
            host_array(pool)[slot, : len(block)] = block
            sound.append(True)
        return sound

    def checksums(self, pool: Any, slots: Any, seeds: Any, length_bytes: int) -> NDArray[np.uint64]:
        return checksum.checksums(host_array(pool), host_array(slots), host_array(seeds), length_bytes)

    def attend(self, queries: Any, kv: PagedKv, batch: Batch, scale: float | None = None) -> tuple[F32, F32]:
        return attention.attend(queries, kv, batch, scale)

    def merge(self, parts: Any, log_sums: Any, dtype: str) -> tuple[NDArray[Any], F32]:
        merged, merged_log_sums = attention.merge(host_array(parts), host_array(log_sums))
        return from_float(merged, dtype), merged_log_sums


def _same_dtype(arrays: Sequence[Any]) -> tuple[list[NDArray[Any]], str]:
    plain = [kv_values(array) for array in arrays]
    if len({(array.shape[1:], name) for array, name in plain}) != 1:
        raise UsageError("the arrays of a block's fragments must have one shape and dtype; code others in another call")
    return [array for array, _ in plain], plain[0][1]


def _pairs(blocks: Any, places: Any) -> list[tuple[int, int]]:
    return list(zip(host_array(blocks).tolist(), host_array(places).tolist(), strict=True))


def _bits_type(dtype: str) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if item_bytes(dtype) == 4 else np.uint16


def _put(slot: Bytes, coded: Bytes) -> None:
    if len(coded) > len(slot):
        raise UsageError(f"a coded block of {len(coded)} bytes, and a coded slot of {len(slot)}; see coded_bytes_max")
    slot[: len(coded)] = coded
