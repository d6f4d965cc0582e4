"""What callers hand in: numpy arrays or torch tensors of KV values, seen as bits of a known dtype.

Always: no copy; the result shares memory with what was handed in. numpy has no bfloat16: uint16 stands for it.
Units:  values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import UsageError

# dtype of a block -> (its number in heads and kernels, numpy dtype of its bits, exponent bits, mantissa bits)
FORMATS: dict[str, tuple[int, str, int, int]] = {
    "float32": (1, "uint32", 8, 23),
    "float16": (2, "uint16", 5, 10),
    "bfloat16": (3, "uint16", 8, 7),
}
NUMBERS = {name: number for name, (number, *_) in FORMATS.items()}
NAMES = {number: name for name, number in NUMBERS.items()}

_NAMES_BY_NUMPY = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16] | NDArray[np.uint32]
Indices = NDArray[np.int32]


def item_bytes(dtype: str) -> int:
    """Bytes per value. Raises UsageError for a dtype that the kernels do not know."""
    if dtype not in FORMATS:
        raise UsageError(f"dtype {dtype!r} has no kernels; they know {', '.join(FORMATS)}")
    return np.dtype(FORMATS[dtype][1]).itemsize


def host_array(array: Any) -> NDArray[Any]:
    """The numpy array behind a numpy array or a CPU tensor of torch (bfloat16 as uint16). No copy.

    Raises UsageError for anything else.
    """
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        if array.device.type == "cpu":
            plain = array.detach()
            bits: NDArray[Any] = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
            return bits
    raise UsageError(f"a numpy array or a CPU tensor is wanted, not {type(array).__name__}; copy it to the CPU first")


def kv_values(array: Any) -> tuple[NDArray[Any], str]:
    """The array as `host_array` gives it, and the name of its dtype: float32, float16 or bfloat16 (uint16)."""
    values = host_array(array)
    name = _NAMES_BY_NUMPY.get(values.dtype.name)
    if name is None:
        raise UsageError(f"KV values of dtype {values.dtype}; use float32, float16, or bfloat16 as uint16")
    return values, name


def bits_of(values: NDArray[Any]) -> Bits:
    """The bits of float32, float16 or bfloat16 (uint16) values. No copy."""
    return values.view(np.uint32) if values.itemsize == 4 else values.view(np.uint16)
