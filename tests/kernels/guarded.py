"""Arrays that end where accessible memory ends: a kernel that runs past the last byte of one does not go unnoticed."""

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(content: ArrayLike) -> NDArray[Any]:
    """A copy of the array, followed by a page that faults on every access. Its start is aligned if its length is."""
    array = np.ascontiguousarray(content)
    pages_bytes = -(-max(1, array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages_bytes + mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbidden = _LIBC.mprotect(ctypes.c_void_p(first + pages_bytes), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert forbidden == 0
    copy = np.frombuffer(memory, array.dtype, array.size, pages_bytes - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy
