"""What a launch is: kernel, grid, threads and packed arguments. Plain data; nothing is launched here.

The device's caller hands it to a driver: `pointers()` is what cuLaunchKernel and `cupy.cuda.driver.launchKernel` take.
Always: a grid is within the device's limits, and not empty; addresses and strides that kernels need aligned are.
Units:  bytes; device addresses as integers; counts of blocks. Index arrays on the device are int32.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import UsageError
from kvtier.kernels.source import Variant

ALIGNMENT_BYTES = 16  # kernels move 16 bytes per load
GRID_MAX = (2**31 - 1, 65535, 65535)

Arguments = Sequence[ctypes.c_uint64 | ctypes.c_uint32 | ctypes.c_int32 | ctypes.Structure]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `entry`, a kernel of `variant`. No dynamic shared memory."""

    variant: Variant
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Arguments

    def __post_init__(self) -> None:
        for count, count_max, axis in zip(self.grid, GRID_MAX, "xyz", strict=True):
            if not 0 < count <= count_max:
                raise UsageError(f"{self.entry}: {count} thread blocks along {axis}; launch 1 to {count_max}")

    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        """The addresses of the arguments. Keep it, and the launch, until the driver has returned: it copies them."""
        return (ctypes.c_void_p * len(self.arguments))(*map(ctypes.addressof, self.arguments))


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Slots on a device: slot s lies at address + s * stride_bytes."""

    address: int
    stride_bytes: int

    def expect_room(self, length_bytes: int) -> None:
        """Raises UsageError if blocks of that length do not fit, or are not aligned for kernels."""
        if length_bytes > self.stride_bytes:
            raise UsageError(f"blocks of {length_bytes} bytes in slots of {self.stride_bytes}")
        expect_aligned(address=self.address, stride_bytes=self.stride_bytes)


@dataclass(frozen=True, slots=True)
class DeviceFragments:
    """Fragments of a foreign cache on a device: `records_address` is where `fragment_records` was copied to."""

    records_address: int
    count: int
    fragment_bytes: int
    slot_bytes: int  # from a slot's start to the end of its last fragment


def fragment_records(
    addresses: Sequence[int], strides_bytes: Sequence[int], offsets_bytes: Sequence[int]
) -> NDArray[np.uint64]:
    """The table that kernels read, [fragments, 3], to be copied to the device once per cache.

    By fragment: the address of the foreign array, the bytes between its blocks, and its place in a slot. Raises
    UsageError if one is not a multiple of 16.
    """
    for address, stride, offset in zip(addresses, strides_bytes, offsets_bytes, strict=True):
        expect_aligned(address=address, stride_bytes=stride, offset_bytes=offset)
    return np.array([addresses, strides_bytes, offsets_bytes], np.uint64).T.copy()


def expect_aligned(**numbers: int) -> None:
    """Raises UsageError naming the first that is no multiple of 16."""
    for name, number in numbers.items():
        if number % ALIGNMENT_BYTES:
            raise UsageError(f"{name} {number}: kernels need a multiple of {ALIGNMENT_BYTES} bytes")


def address_of(address: int) -> ctypes.c_uint64:
    """A pointer argument, or any other number of 64 bits."""
    return ctypes.c_uint64(address)
