"""Where a foreign tensor lies: address, shape and strides, read from what the array itself says. No copy, no import.

Owns nothing: the array's memory must stay as long as copies use it.
Takes:  torch tensors; what has `__cuda_array_interface__` (version 2 or 3: CuPy, numba, JAX); what speaks DLPack on a
        device or the CPU; numpy arrays.
Units:  bytes; addresses as integers.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

from kvtier.errors import UsageError

DLPACK_CPU, DLPACK_CUDA = 1, 2
NO_SYNCHRONIZATION = -1  # what DLPack's consumer says on CUDA: order is the caller's business, by events


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One array. `on_device`: in a CUDA device's memory; if not, in the host's."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    on_device: bool


def tensor_of(array: Any) -> ForeignTensor:
    """Reads an array's own description. Raises UsageError for what has none, or may not be written."""
    if isinstance(array, ForeignTensor):
        return array
    if callable(getattr(array, "data_ptr", None)):
        return _of_torch(array)
    for attribute, on_device in (("__cuda_array_interface__", True), ("__array_interface__", False)):
        interface = getattr(array, attribute, None)
        if interface is not None:
            return _of_interface(interface, on_device)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array)
    raise UsageError(
        f"{type(array).__name__} says nothing of its memory; pass a torch tensor, an array with "
        "__cuda_array_interface__ or DLPack, or a ForeignTensor"
    )


def _of_torch(tensor: Any) -> ForeignTensor:
    item_bytes = int(tensor.element_size())
    strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
    return ForeignTensor(int(tensor.data_ptr()), tuple(tensor.shape), strides, item_bytes, bool(tensor.is_cuda))


def _of_interface(interface: dict[str, Any], on_device: bool) -> ForeignTensor:
    address, read_only = interface["data"]
    if read_only:
        raise UsageError(f"the array at {address:#x} is read-only; blocks are loaded into it, too")
    shape, item_bytes = tuple(interface["shape"]), int(interface["typestr"][2:])
    strides = interface.get("strides")
    return ForeignTensor(int(address), shape, tuple(strides or _dense(shape, item_bytes)), item_bytes, on_device)


class _DlTensor(ctypes.Structure):
    """DLTensor of dlpack.h: the beginning of what a capsule named "dltensor" points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("item_bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in items; null: dense
        ("offset_bytes", ctypes.c_uint64),
    )


def _of_dlpack(array: Any) -> ForeignTensor:
    kind = int(array.__dlpack_device__()[0])
    if kind not in (DLPACK_CPU, DLPACK_CUDA):
        raise UsageError(
            f"an array on a DLPack device of type {kind}; CUDA devices are {DLPACK_CUDA}, CPUs {DLPACK_CPU}"
        )
    capsule = array.__dlpack__(stream=NO_SYNCHRONIZATION) if kind == DLPACK_CUDA else array.__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    told = _DlTensor.from_address(pointer_of(capsule, b"dltensor"))
    item_bytes, shape = told.item_bits * told.lanes // 8, tuple(told.shape[: told.axes])
    strides = tuple(s * item_bytes for s in told.strides[: told.axes]) if told.strides else _dense(shape, item_bytes)
    return ForeignTensor((told.data or 0) + told.offset_bytes, shape, strides, item_bytes, kind == DLPACK_CUDA)


def _dense(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape)))
