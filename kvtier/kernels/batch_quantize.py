"""int8 and fp8 over many rows at once, on the CPU: the same bits as `quantize`, in pieces that stay in the cache.

Owns: work memory of a piece; so one caller at a time. Always: all arithmetic is that of `quantize`, one IEEE operation
at a time, into memory that is there already; rows that are not finite go through `quantize` itself.
Units:  values, rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.kernels import quantize
from kvtier.kernels.arrays import Bytes
from kvtier.kernels.floats import E4M3_NORMAL_LEAST, F32, LARGEST, U16, bfloat16_to_float, e4m3_to_float

PIECE_VALUES = 1 << 15  # 128 KiB of float32: with what else is touched it fits into a core's own cache

_U32 = np.uint32
_E4M3 = e4m3_to_float(np.arange(256, dtype=np.uint8))
_NORMAL_BITS = np.float32(E4M3_NORMAL_LEAST).view(_U32)
_FLOAT16_NORMAL_BITS = np.float32(2.0**-14).view(_U32)


class BatchQuantizer:
    """Codes rows of `row_values` values of a dtype with one of the codecs int8 and fp8."""

    def __init__(self, codec: str, dtype: str, row_values: int) -> None:
        self.rows_max = max(1, PIECE_VALUES // row_values)
        self._codec, self._dtype = codec, dtype
        self._values = np.empty((self.rows_max, row_values), np.float32)
        self._bits = np.empty((self.rows_max, row_values), _U32)
        self._halves = np.empty((self.rows_max, row_values), np.uint16)
        self._starts = np.arange(0, self.rows_max * row_values, row_values)
        self._mask = np.empty((self.rows_max, row_values), np.bool_)

    def encode(self, rows: NDArray[Any], codes: Bytes, scales: U16) -> None:
        """rows [n, row_values] of the dtype (bfloat16 as uint16) into codes [n, row_values] and bfloat16 scales [n]."""
        for start in range(0, len(rows), self.rows_max):
            piece = slice(start, start + self.rows_max)
            self._encode(rows[piece], codes[piece], scales[piece])

    def decode(self, codes: Bytes, scales: U16, rows: NDArray[Any]) -> None:
        """The way back."""
        for start in range(0, len(rows), self.rows_max):
            piece = slice(start, start + self.rows_max)
            self._decode(codes[piece], scales[piece], rows[piece])

    # ------------------------------------------------------------ encode

    def _encode(self, rows: NDArray[Any], codes: Bytes, scales: U16) -> None:
        values = self._values[: len(rows)]
        largest = self._widen(rows, values)
        scales[:] = quantize.scales_of(largest, self._codec)
        usable = (largest > 0) & np.isfinite(largest)
        divisors = np.where(usable, bfloat16_to_float(scales.astype(np.uint16)), 1).astype(np.float32)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            np.divide(values, divisors[:, None], out=values)
        if not usable.all():
            values[~usable] = 0
        if self._codec == "int8":
            np.rint(values, out=values)
            np.copyto(codes.view(np.int8), values, casting="unsafe")
        else:
            self._to_e4m3(values, codes)

    def _widen(self, rows: NDArray[Any], values: F32) -> F32:
        """Rows as float32 into `values`; returns each row's largest magnitude, NaN if there is one in it."""
        if self._dtype == "bfloat16":
            bits, halves = values.view(_U32), self._halves[: len(rows)]
            np.copyto(bits, rows)
            np.left_shift(bits, 16, out=bits)
            np.bitwise_and(rows, 0x7FFF, out=halves)  # as integers magnitudes have the order of their values, NaNs last
            # `reduceat` is twice as fast as `max` by rows
            return bfloat16_to_float(np.maximum.reduceat(halves.reshape(-1), self._starts[: len(rows)]))
        if self._dtype == "float16":
            return self._widen_float16(rows.view(np.uint16), values)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            np.copyto(values, rows)
            magnitudes = np.abs(values, out=self._bits[: len(rows)].view(np.float32))
        largest: F32 = np.maximum.reduceat(magnitudes.reshape(-1), self._starts[: len(rows)])
        return largest

    def _widen_float16(self, rows: U16, values: F32) -> F32:
        """numpy's own conversion is ten times slower. An infinity or NaN becomes some number: its row is not used."""
        bits, signs, halves = values.view(_U32), self._bits[: len(rows)], self._halves[: len(rows)]
        np.bitwise_and(rows, 0x7FFF, out=halves)
        np.copyto(bits, halves)
        np.left_shift(bits, 13, out=bits)
        np.multiply(values, np.float32(2.0**112), out=values)  # the two formats' exponents begin so far apart
        np.copyto(signs, rows)
        np.bitwise_and(signs, 0x8000, out=signs)
        np.left_shift(signs, 16, out=signs)
        np.bitwise_or(bits, signs, out=bits)
        largest = np.maximum.reduceat(halves.reshape(-1), self._starts[: len(rows)]).view(np.float16)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return largest.astype(np.float32)

    def _to_e4m3(self, values: F32, codes: Bytes) -> None:
        """As `floats.float_to_e4m3`: rounded in the bits of a normal number, by a sum in those of one that is less."""
        bits, other, small = values.view(_U32), self._bits[: len(values)], self._mask[: len(values)]
        signs = self._halves[: len(values)]
        np.right_shift(bits, 24, out=other)
        np.copyto(signs, other, casting="unsafe")
        np.bitwise_and(signs, 0x80, out=signs)
        np.bitwise_and(bits, 0x7FFFFFFF, out=bits)
        np.less(bits, _NORMAL_BITS, out=small)
        small_rows, small_columns = divmod(np.flatnonzero(small), values.shape[1])
        steps = np.rint(values[small_rows, small_columns] * np.float32(512))
        np.right_shift(bits, 20, out=other)
        np.bitwise_and(other, 1, out=other)
        np.add(other, bits, out=other)
        np.subtract(other, 0x3C000000 - 0x7FFFF, out=other)
        np.right_shift(other, 20, out=other)
        np.copyto(codes, other, casting="unsafe")
        codes[small_rows, small_columns] = steps.astype(np.uint8)
        np.bitwise_or(codes, signs, out=codes, casting="unsafe")

    # ------------------------------------------------------------ decode

    def _decode(self, codes: Bytes, scales: U16, rows: NDArray[Any]) -> None:
        factors = bfloat16_to_float(scales.astype(np.uint16))
        values = rows if self._dtype == "float32" else self._values[: len(rows)]
        if self._codec == "int8":
            np.copyto(values, codes.view(np.int8))
        else:
            np.take(_E4M3, codes, out=values, mode="clip")
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, factors[:, None], out=values)
        largest = LARGEST[self._dtype]
        if not (np.abs(factors) < largest / 512).all():  # else nothing can leave the range
            np.clip(values, -largest, largest, out=values)
        if self._dtype == "bfloat16":
            self._narrow(values, rows)
        elif self._dtype == "float16":
            self._narrow_float16(values, rows.view(np.uint16))
        odd = ~np.isfinite(factors)
        if odd.any():
            rows[odd] = quantize.restored(codes[odd], scales[odd].astype(np.uint16), self._dtype, self._codec)

    def _narrow(self, values: F32, rows: NDArray[Any]) -> None:
        """As `floats.float_to_bfloat16`, of numbers."""
        bits, lowest = values.view(_U32), self._bits[: len(values)]
        np.right_shift(bits, 16, out=lowest)
        np.bitwise_and(lowest, 1, out=lowest)
        np.add(lowest, 0x7FFF, out=lowest)
        np.add(bits, lowest, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(rows, bits, casting="unsafe")

    def _narrow_float16(self, values: F32, rows: U16) -> None:
        """As numpy's own conversion, of numbers within the range: below the least normal number by a sum."""
        bits, other, small = values.view(_U32), self._bits[: len(values)], self._mask[: len(values)]
        signs = self._halves[: len(values)]
        np.right_shift(bits, 16, out=other)
        np.copyto(signs, other, casting="unsafe")
        np.bitwise_and(signs, 0x8000, out=signs)
        np.bitwise_and(bits, 0x7FFFFFFF, out=bits)
        np.less(bits, _FLOAT16_NORMAL_BITS, out=small)
        small_rows, small_columns = divmod(np.flatnonzero(small), values.shape[1])
        sums = values[small_rows, small_columns] + np.float32(0.5)  # whose last bit is float16's least number
        np.right_shift(bits, 13, out=other)
        np.bitwise_and(other, 1, out=other)
        np.add(other, bits, out=other)
        np.subtract(other, (112 << 23) - 0xFFF, out=other)
        np.right_shift(other, 13, out=other)
        np.copyto(rows, other, casting="unsafe")
        rows[small_rows, small_columns] = (sums.view(_U32) - np.float32(0.5).view(_U32)).astype(np.uint16)
        np.bitwise_or(rows, signs, out=rows)
