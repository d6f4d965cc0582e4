"""Memory for a while: one piece on a device, or one of the host's that the device reads and writes directly.

Owns: what it lends, until the `with` ends. Whoever used it has waited for that by then.
Units: bytes; device addresses as integers.
"""

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.driver import MemoryDriver, SupportsPinning


@contextmanager
def lent_memory(driver: MemoryDriver, length_bytes: int) -> Iterator[int]:
    """Writable memory of the driver's in one piece: its address. It takes whole granules.

    Raises OutOfMemory if there is none left.
    """
    granule_bytes = driver.granule_bytes
    length_bytes = -(-length_bytes // granule_bytes) * granule_bytes
    with ExitStack() as undo:
        addresses = driver.reserve(length_bytes)
        undo.callback(driver.free_range, addresses)
        handle = driver.create(length_bytes)
        undo.callback(driver.release, handle)
        driver.map(addresses, 0, handle)
        undo.callback(driver.unmap, addresses, 0, length_bytes)
        driver.set_access(addresses, 0, length_bytes, write=True)
        undo.pop_all()
    try:
        yield addresses.address
    finally:  # one after the other: a lost device ends it with the first, and the driver's end does the rest
        driver.unmap(addresses, 0, length_bytes)
        driver.release(handle)
        driver.free_range(addresses)


@contextmanager
def lent_pinned(driver: SupportsPinning, length_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Host memory that is registered: uint8 [length_bytes], page aligned. Raises DriverError if it is refused."""
    array = np.frombuffer(mmap.mmap(-1, length_bytes), np.uint8)  # unmapped with the last view of it
    driver.register(array.ctypes.data, length_bytes)
    try:
        yield array
    finally:
        driver.unregister(array.ctypes.data)
