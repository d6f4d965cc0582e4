"""Arrays over device memory that somebody else owns.

Owns nothing but the right to say when the last view has died. CuPy makes the arrays, with the device's number given:
asking the driver whose memory it is would fail for memory that is not mapped yet.
"""

import importlib
from typing import Any

from kvtier.allocator.cuda_calls import DEVICE
from kvtier.errors import ConfigError


class DevicePages:
    """What the views of one range have in common; it dies with the last of them."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.address = address
        self.length_bytes = length_bytes


def array_over(pages: DevicePages, device: int) -> Any:
    """CuPy uint8 array [length_bytes], zero-copy. Raises ConfigError without CuPy."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            DEVICE, f"views of device memory need the package CuPy ({error})", "Install kvtier[gpu]"
        ) from None
    memory = cupy.cuda.UnownedMemory(pages.address, pages.length_bytes, pages, device)
    return cupy.ndarray((pages.length_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
