"""Float formats that numpy lacks: bfloat16 as uint16, and e4m3 as uint8. Conversions from and to float32.

Always: widening is exact; narrowing rounds to nearest, ties to even; every NaN that is written is the quiet NaN.
The device's conversions (src/floats.cuh, src/quantize.cu) give the same bits.
Formats: bfloat16 is the upper half of a float32. e4m3 (OCP 8-bit floating point, 2023) has bias 7, no infinity,
         448 as its largest value, and NaN only where all bits but the sign are set.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]

BFLOAT16_NAN = 0x7FC0
E4M3_LARGEST = 448.0
E4M3_NORMAL_LEAST = 2.0**-6
QUIET_NANS = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": BFLOAT16_NAN}
LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": 2.0**127 * (2 - 2.0**-7)}

_U32 = np.uint32


def bfloat16_to_float(bits: U16) -> F32:
    """The values of bfloat16 bits, any shape."""
    return (bits.astype(_U32) << _U32(16)).view(np.float32)


def float_to_bfloat16(values: F32) -> U16:
    """bfloat16 bits of float32 values, any shape."""
    bits = values.astype(np.float32).view(_U32)
    rounded = (bits + _U32(0x7FFF) + (bits >> _U32(16) & _U32(1))) >> _U32(16)
    return np.where(np.isnan(values), _U32(BFLOAT16_NAN), rounded).astype(np.uint16)


def e4m3_to_float(codes: U8) -> F32:
    """The values of e4m3 codes, any shape. 0x7f and 0xff, the NaNs, are never written by `float_to_e4m3`."""
    magnitude = ((codes & 0x7F).astype(_U32) << _U32(20)).view(np.float32) * np.float32(2.0**120)
    values: F32 = np.copysign(magnitude, np.where(codes & 0x80, np.float32(-1), np.float32(1)))
    return values


def float_to_e4m3(values: F32) -> U8:
    """e4m3 codes of float32 values whose magnitude rounds to at most 448, any shape."""
    bits = values.view(_U32)
    sign, magnitude = (bits >> _U32(24)) & _U32(0x80), bits & _U32(0x7FFFFFFF)
    steps = np.rint(np.abs(values) * np.float32(512)).astype(_U32)  # of 2^-9, below the least normal value
    normal = (magnitude + _U32(0x7FFFF) + (magnitude >> _U32(20) & _U32(1)) - _U32(0x3C000000)) >> _U32(20)
    return (sign | np.where(np.abs(values) < np.float32(E4M3_NORMAL_LEAST), steps, normal)).astype(np.uint8)


def to_float(values: NDArray[Any], dtype: str) -> F32:
    """float32 of KV values of a dtype, any shape."""
    if dtype == "bfloat16":
        return bfloat16_to_float(values)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float32)


def from_float(values: F32, dtype: str) -> NDArray[Any]:
    """KV values of a dtype from float32, any shape; bfloat16 as uint16."""
    if dtype == "bfloat16":
        return float_to_bfloat16(values)
    with np.errstate(over="ignore"):  # what rounds to infinity is infinity
        narrow = values.astype(dtype)
    narrow[np.isnan(narrow)] = np.array(QUIET_NANS[dtype], np.uint32 if dtype == "float32" else np.uint16).view(dtype)
    return narrow
