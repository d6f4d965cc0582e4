"""Card: the device as the parts use it: memory, pinned memory, a stream, kernels, and times by the device's clock.

Owns: a hold on the device, a stream, two events that tell times, and the kernels' modules. What `memory` and `pinned`
lend ends with their `with`. Always: `put`, `get` and `fill` are over when they return.
Units:  bytes, milliseconds; addresses as integers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.cuda_calls import CudaCalls
from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.lending import lent_memory, lent_pinned
from kvtier.allocator.streams import Stream
from kvtier.kernels.launch_device import DeviceLauncher, Images, images_for
from kvtier.testing.gpu_check.record import Skip
from kvtier.testing.gpu_check.scale import Scale

Bytes = NDArray[np.uint8]
ALIGNMENT_BYTES = 256
SPARE = 0.9  # of the free memory: the rest is for modules and for others


class Card:
    """Device number `device`. images: the kernels' machine code, compiled for the device unless given."""

    def __init__(self, device: int, scale: Scale, images: Images | None = None) -> None:
        """Raises ConfigError if there is no such device, or no driver."""
        with ExitStack() as undo:
            self.number = device
            self.scale = scale
            self.driver = CudaDriver(device)
            undo.callback(self.driver.close)
            self.calls = CudaCalls()
            self._device = self.calls("cuDeviceGet", device)
            self.streams = self.driver.streams
            self.stream = self.streams.make_stream()
            self.images = images or images_for(self.architecture)
            self.launcher = DeviceLauncher(self.calls, self.images)
            self._marks = [self.timed_event() for _ in range(2)]
            undo.pop_all()

    @property
    def architecture(self) -> str:
        return self.driver.architecture

    @property
    def multiprocessors(self) -> int:
        return self.attribute("MULTIPROCESSOR_COUNT")

    def attribute(self, name: str) -> int:
        """A device attribute, by the end of its name in cuda.h."""
        kind = getattr(self.calls.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.calls("cuDeviceGetAttribute", kind, self._device))

    def facts(self) -> dict[str, Any]:
        """What belongs under every figure."""
        name = self.calls("cuDeviceGetName", 96, self._device)
        info = self.driver.memory_info()
        return {
            "name": bytes(name).split(b"\0")[0].decode(),
            "architecture": self.architecture,
            "multiprocessors": self.multiprocessors,
            "memory_bytes": info.total_bytes,
            "memory_free_bytes": info.free_bytes,
            "granule_bytes": self.driver.granule_bytes,
            "driver_version": int(self.calls("cuDriverGetVersion")),
            "copies_in_batches": self.streams.has_batches,
        }

    def free_bytes(self) -> int:
        """What the device has left, asked now, whoever took the rest."""
        return self.driver.memory_info().free_bytes

    def expect_room(self, length_bytes: int) -> None:
        """Raises Skip if the device has no such memory left."""
        free_bytes = self.free_bytes()
        if length_bytes > free_bytes * SPARE:
            raise Skip(f"needs {length_bytes} bytes, and the device has {free_bytes} left")

    # ------------------------------------------------------------ memory

    @contextmanager
    def memory(self, length_bytes: int) -> Iterator[int]:
        """Device memory, writable, in one piece: its address. Raises Skip if the device has no such memory left."""
        self.expect_room(length_bytes)
        with lent_memory(self.driver, length_bytes) as address:
            try:
                yield address
            finally:
                self.streams.finish(self.stream)

    @contextmanager
    def pinned(self, length_bytes: int) -> Iterator[Bytes]:
        """Host memory that the device reads and writes directly: uint8 [length_bytes], page aligned."""
        with lent_pinned(self.driver, length_bytes) as array:
            try:
                yield array
            finally:
                self.streams.finish(self.stream)

    def put(self, address: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the device."""
        assert array.flags.c_contiguous
        self.calls("cuMemcpyAsync", address, array.ctypes.data, array.nbytes, self.stream.key)
        self.streams.finish(self.stream)

    def get(self, address: int, array: NDArray[Any]) -> None:
        """Copy from the device into a contiguous array."""
        assert array.flags.c_contiguous
        self.calls("cuMemcpyAsync", array.ctypes.data, address, array.nbytes, self.stream.key)
        self.streams.finish(self.stream)

    def fill(self, address: int, value: int, length_bytes: int) -> None:
        self.calls("cuMemsetD8Async", address, value, length_bytes, self.stream.key)
        self.streams.finish(self.stream)

    # ------------------------------------------------------------ times

    def timed_event(self) -> int:
        """An event that tells times, as a CUevent's integer. The caller destroys it."""
        return int(self.calls("cuEventCreate", 0))

    def milliseconds(self, work: Callable[[], object], stream: Stream | None = None) -> float:
        """How long a stream, idle before, takes for the work that is given to it, and for being given it."""
        stream = stream or self.stream
        before, after = self._marks
        self.calls("cuEventRecord", before, stream.key)
        work()
        self.calls("cuEventRecord", after, stream.key)
        self.streams.finish(stream)
        return self.between_ms(before, after)

    def between_ms(self, before: int, after: int) -> float:
        """Device time between two timed events that are over."""
        return float(self.calls("cuEventElapsedTime", before, after))

    def close(self) -> None:
        """Give everything up, also on a lost device. Raises the first thing that went wrong."""
        with ExitStack() as undo:
            undo.callback(self.driver.close)
            for mark in self._marks:
                undo.callback(self.calls, "cuEventDestroy", mark)
            undo.callback(self.launcher.close)


class Desk:
    """Small arrays on the device, side by side in memory that somebody lends."""

    def __init__(self, card: Card, address: int, length_bytes: int) -> None:
        self._card = card
        self._next, self._end = address, address + length_bytes

    def room(self, length_bytes: int) -> int:
        """The address of so many bytes; what lies there is undefined."""
        address = self._next
        self._next += -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert self._next <= self._end, "the desk is full"
        return address

    def put(self, array: NDArray[Any]) -> int:
        """The address of a copy of the array."""
        address = self.room(array.nbytes)
        self._card.put(address, np.ascontiguousarray(array))
        return address
