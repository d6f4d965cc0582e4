"""KV values to test codecs with: as bits, from plain to hostile."""

import numpy as np
from numpy.typing import NDArray

from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.floats import float_to_bfloat16

DTYPES = tuple(FORMATS)


def bits_type(dtype: str) -> np.dtype:
    return np.dtype(FORMATS[dtype][1])


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> NDArray:
    """Normally distributed values, as bits: much like KV."""
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        return float_to_bfloat16(values)
    return values.astype(dtype).view(bits_type(dtype))


def specials(dtype: str) -> NDArray:
    """0, -0, infinities, quiet and signalling NaNs with payloads, denormals, the largest and least values; as bits."""
    _, _, exponent_bits, mantissa_bits = FORMATS[dtype]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    ones = (1 << mantissa_bits) - 1
    least_normal, one = 1 << mantissa_bits, ((1 << exponent_bits - 1) - 1) << mantissa_bits
    plain = [0, 1, ones, least_normal, one, infinity - 1, infinity, infinity + 1, infinity + ones]
    sign = 1 << exponent_bits + mantissa_bits
    return np.array([*plain, *(sign | bits for bits in plain)], bits_type(dtype))
