"""int8 and fp8 (e4m3): the lossy codecs, with one scale per row. A row is the head_dim values of one token and head.

What follows the head: `values` codes of one byte, row after row, then one scale per row (bfloat16, little-endian).
A value is restored as code * scale, rounded to the block's dtype and kept within its finite range.

    scale    the row's largest magnitude / 127 (int8) or / 448 (fp8), rounded up to bfloat16: no code is ever clipped
    error    |x - restored| <= scale / 2 (int8); <= max(|x| / 16, scale / 1024) (fp8: 3 mantissa bits, steps of 2^-9);
             then one rounding to the dtype. scale <= largest / 127 * (1 + 2^-7) + 2^-133, the least bfloat16; with fp8
             / 448 likewise

A row with an infinity or a NaN becomes NaN as a whole, so that it shows. -0 becomes 0 in int8, and stays in fp8.

Always: the bytes are those of the device (src/quantize.cu), as all arithmetic is one IEEE operation at a time.
Units:  values, bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES
from kvtier.errors import CorruptBlock
from kvtier.kernels.arrays import Bytes
from kvtier.kernels.coded import CODECS, CodedHead, quantized_head
from kvtier.kernels.floats import (
    BFLOAT16_NAN,
    E4M3_LARGEST,
    F32,
    LARGEST,
    U16,
    bfloat16_to_float,
    e4m3_to_float,
    float_to_e4m3,
    from_float,
    to_float,
)

CODE_LARGEST = {"int8": 127.0, "fp8": E4M3_LARGEST}


def encode(rows: NDArray[Any], dtype: str, codec: str) -> Bytes:
    """The coded form of one block. rows: [rows, row_values] of float32, float16 or bfloat16 (uint16)."""
    head = quantized_head(CODECS[codec], dtype, *rows.shape)
    values = to_float(rows, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        largest = np.abs(values).max(axis=1, initial=0)
        scales = scales_of(largest, codec)
        usable = (largest > 0) & np.isfinite(largest)
        divisors = np.where(usable, bfloat16_to_float(scales), 1).astype(np.float32)
        ratios: F32 = values / divisors[:, None]
    ratios[~usable] = 0
    codes = np.rint(ratios).astype(np.int8).view(np.uint8) if codec == "int8" else float_to_e4m3(ratios)
    return np.concatenate(
        [np.frombuffer(head.pack(), np.uint8), codes.reshape(-1), scales.astype("<u2", copy=False).view(np.uint8)]
    )


def decode(coded: Bytes, dtype: str, rows: int, row_values: int, codec: str) -> NDArray[Any]:
    """The rows of a block, [rows, row_values] in its dtype; bytes after the coded form are ignored.

    Raises CorruptBlock if the head does not belong to such a block.
    """
    coded = np.ascontiguousarray(coded)
    head, expected = CodedHead.of(coded), quantized_head(CODECS[codec], dtype, rows, row_values)
    if head != expected:
        raise CorruptBlock(f"a coded block with the head {head}, where {expected} is expected")
    scales_at = HEAD_BYTES + head.values
    codes = coded[HEAD_BYTES:scales_at].reshape(rows, row_values)
    scales = coded[scales_at : head.length_bytes].view("<u2").astype(np.uint16)
    return restored(codes, scales, dtype, codec)


def restored(codes: Bytes, scales: U16, dtype: str, codec: str) -> NDArray[Any]:
    """Rows in their dtype, [rows, row_values], from their codes and scales [rows]."""
    plain = codes.view(np.int8).astype(np.float32) if codec == "int8" else e4m3_to_float(codes)
    with np.errstate(over="ignore", invalid="ignore"):
        values = plain * bfloat16_to_float(scales)[:, None]
    return from_float(np.clip(values, -LARGEST[dtype], LARGEST[dtype]), dtype)


def scales_of(largest: F32, codec: str) -> U16:
    """bfloat16 scales of rows, rounded up; at least the smallest number if anything in the row is not zero."""
    with np.errstate(under="ignore", invalid="ignore"):
        bits = (largest / np.float32(CODE_LARGEST[codec])).view(np.uint32)
    up = (bits.astype(np.uint64) + 0xFFFF) >> 16
    scales = np.where(largest > 0, np.maximum(up, 1), 0)
    return np.where(np.isfinite(largest), scales, BFLOAT16_NAN).astype(np.uint16)
