"""Views of a top tier's slots as attention reads them: one for each segment of a block. Own nothing; zero-copy."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.blocks.spec import DTYPES, Segment

if TYPE_CHECKING:
    import numpy as np


def segment_views(memory: Any, segments: Sequence[Segment]) -> "dict[str, np.ndarray[Any, Any]]":
    """Views [slots, tokens, heads, dim] over memory of shape [slots, stride bytes], by segment name.

    They are of the same kind as `memory`: numpy's arrays, or CuPy's.
    """
    slots, stride_bytes = memory.shape
    view = _numpy_view if type(memory).__module__ == "numpy" else _cupy_view
    return {
        s.name: view(memory, (slots, *s.shape), DTYPES[s.dtype][1], s.offset_bytes, (stride_bytes, *s.strides_bytes))
        for s in segments
    }


def sequence_arrays(memory: Any, segments: Sequence[Segment], blocks: int) -> "dict[str, np.ndarray[Any, Any]]":
    """Views [tokens, heads, dim] over blocks one behind the other in memory [bytes], by segment name.

    The segments are token-major and fill their blocks, so that a token follows the one before it, across blocks too.
    """
    view = _numpy_view if type(memory).__module__ == "numpy" else _cupy_view
    return {
        s.name: view(memory, (blocks * s.shape[0], *s.shape[1:]), DTYPES[s.dtype][1], s.offset_bytes, s.strides_bytes)
        for s in segments
    }


def _numpy_view(
    memory: Any, shape: tuple[int, ...], dtype: str, offset_bytes: int, strides: tuple[int, ...]
) -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.ndarray(shape, dtype, memory.data, offset_bytes, strides)


def _cupy_view(memory: Any, shape: tuple[int, ...], dtype: str, offset_bytes: int, strides: tuple[int, ...]) -> Any:
    cupy: Any = importlib.import_module("cupy")
    return cupy.ndarray(shape, dtype, memory.data + offset_bytes, strides)
