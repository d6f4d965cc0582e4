"""A foreign engine's cache on the fake device, and what numpy says must lie in the slots.

The oracle knows nothing of fragments: it takes a block out of each tensor by its axis and writes it down in the order
of memory.
"""

import atexit
import ctypes
import functools
import math
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.lending import lent_memory
from kvtier.errors import DeviceLost
from kvtier.kernels.launch import Launch
from kvtier.kernels.launch_device import Images
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.tensors import ForeignTensor
from kvtier.tiers.host import HostTier
from tests.fakecuda.fake import FakeCuda
from tests.kernels.emulated import Emulator

BLOCKS = 8


@dataclass(frozen=True)
class Layout:
    """Tensors of one shape; `order` is that of the axes in memory, outermost first; `padding` bytes follow each row."""

    name: str
    shape: tuple[int, ...]
    block_axis: int
    order: tuple[int, ...]
    item_bytes: int = 2
    tensors: int = 2
    padding: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        strides, step = [0] * len(self.shape), self.item_bytes
        for place, axis in enumerate(reversed(self.order)):
            strides[axis] = step
            step = step * self.shape[axis] + (self.padding if place == 0 else 0)
        return tuple(strides)

    @property
    def tensor_bytes(self) -> int:
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return -(-(reach + self.item_bytes) // 16) * 16

    @property
    def block_bytes(self) -> int:
        return self.tensors * math.prod(self.shape) // self.shape[self.block_axis] * self.item_bytes


LAYOUTS = [
    Layout("kv_first", (2, BLOCKS, 4, 2, 16), 1, (0, 1, 2, 3, 4)),
    Layout("blocks_first", (BLOCKS, 2, 4, 2, 16), 0, (0, 1, 2, 3, 4)),
    Layout("kv_first_heads_first", (2, BLOCKS, 4, 2, 16), 1, (0, 1, 3, 2, 4)),
    Layout("blocks_first_heads_first", (BLOCKS, 2, 4, 2, 16), 0, (0, 3, 1, 2, 4), item_bytes=4),
    Layout("k_and_v_apart", (BLOCKS, 4, 3, 16), 0, (0, 1, 2, 3), tensors=4),
    Layout("latent", (BLOCKS, 16, 72), 0, (0, 1, 2), item_bytes=1, tensors=3),
    Layout("padded_rows", (2, BLOCKS, 3, 1, 24), 1, (0, 1, 2, 3, 4), padding=16),
    Layout("one_run_each", (2, BLOCKS, 8), 1, (0, 1, 2), item_bytes=2, tensors=3),
]


def drawn(seed: int) -> Layout:
    """Some tensors, in some order of axes, whether or not an engine has such ones."""
    rng = np.random.default_rng(seed)
    shape = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 4)))] + [16]
    order = [*rng.permutation(len(shape)).tolist(), len(shape)]
    axis = int(rng.integers(0, len(shape)))
    shape.insert(axis, BLOCKS)
    return Layout(
        f"drawn {seed}",
        tuple(shape),
        axis,
        tuple(order),
        item_bytes=int(rng.choice([1, 2, 4])),
        tensors=int(rng.integers(1, 4)),
        padding=int(rng.choice([0, 16])),
    )


class World:
    """One cache with random bytes on the device, and a host tier of `slots` slots."""

    def __init__(self, fake: FakeCuda, layout: Layout, slots: int = 8, seed: int = 0) -> None:
        self.fake, self.layout = fake, layout
        self._undo = ExitStack()
        self.driver = CudaDriver()
        self._undo.callback(self.driver.close)
        self.length_bytes = layout.tensors * layout.tensor_bytes
        self.address = self._undo.enter_context(lent_memory(self.driver, self.length_bytes))
        self.tensors = [
            ForeignTensor(self.address + n * layout.tensor_bytes, layout.shape, layout.strides, layout.item_bytes, True)
            for n in range(layout.tensors)
        ]
        self.cache = ForeignCache.of(self.tensors, blocks=BLOCKS, block_axis=layout.block_axis)
        self.host = HostTier.create(
            name="host", capacity_bytes=slots * 4096, length_bytes_max=layout.block_bytes, hugepages="off"
        )
        self.memory = np.random.default_rng(seed).integers(0, 256, self.length_bytes, np.uint8)
        self.put(self.memory)

    def put(self, memory: np.ndarray) -> None:
        """The cache's bytes, all of them, with what lies between blocks."""
        self.driver.calls("cuMemcpyHtoD", self.address, memory.ctypes.data, memory.nbytes)

    def get(self) -> np.ndarray:
        memory = np.zeros(self.length_bytes, np.uint8)
        self.driver.calls("cuMemcpyDtoH", memory.ctypes.data, self.address, memory.nbytes)
        return memory

    def views(self, memory: np.ndarray) -> list[np.ndarray]:
        """Block by block, each tensor's bytes in the order of memory; writing to them writes to `memory`."""
        layout, kind = self.layout, {1: np.uint8, 2: np.uint16, 4: np.uint32}[self.layout.item_bytes]
        tensors = [
            np.ndarray(layout.shape, kind, memory, n * layout.tensor_bytes, layout.strides)
            for n in range(layout.tensors)
        ]
        axes = (layout.block_axis, *(axis for axis in layout.order if axis != layout.block_axis))
        return [tensor.transpose(axes) for tensor in tensors]

    def block(self, block: int, memory: np.ndarray | None = None) -> bytes:
        """What a slot must hold of it."""
        return b"".join(view[block].tobytes() for view in self.views(self.memory if memory is None else memory))

    def write(self, memory: np.ndarray, block: int, payload: bytes) -> None:
        """The block in `memory` as it must be after a load."""
        start = 0
        for view in self.views(memory):
            length = view[block].nbytes
            view[block] = np.frombuffer(payload[start : start + length], view.dtype).reshape(view[block].shape)
            start += length

    def slot(self, index: int) -> bytes:
        return bytes(self.host.slot(index))

    def fill(self, index: int, seed: int) -> bytes:
        """Random payload in a slot."""
        payload = np.random.default_rng(seed).integers(0, 256, self.layout.block_bytes, np.uint8).tobytes()
        self.host.slot(index)[: len(payload)] = payload
        return payload

    def touched(self, block: int) -> list[tuple[int, int]]:
        """Address and bytes of each run of the block's items."""
        places, item_bytes, found = np.arange(self.length_bytes, dtype=np.uint32), self.layout.item_bytes, []
        strides = tuple(4 * stride for stride in self.layout.strides)
        for n in range(self.layout.tensors):
            every = np.ndarray(self.layout.shape, np.uint32, places, 4 * n * self.layout.tensor_bytes, strides)
            own = np.sort(np.take(every, block, self.layout.block_axis), axis=None)
            runs = np.split(own, np.flatnonzero(np.diff(own) != item_bytes) + 1)
            found += [(self.address + int(run[0]), len(run) * item_bytes) for run in runs]
        return found

    def close(self) -> None:
        with suppress(DeviceLost):
            self._undo.close()
        self.host.close()


class Favouring:
    """A clock to which each way of copying seems to take as long as said: by what the driver was given in between."""

    def __init__(self, fake: FakeCuda, **seconds: float) -> None:
        self._fake, self._seconds, self._now_s, self._seen = fake, seconds, 0.0, (0, 0)

    def now(self) -> float:
        seen = self._fake.calls("cuLaunchKernel"), self._fake.calls("copy_descriptors")
        launches, pieces = (now - before for now, before in zip(seen, self._seen, strict=True))
        self._seen = seen
        # direct gives the driver one piece for each batch of launches, the numbers of its blocks
        name = "pieces" if not launches else "direct" if pieces == 1 else "staged"
        self._now_s += self._seconds.get(name, 9.0)
        return self._now_s


class Telling:
    """Tells the fake what each launch is going to use, which it cannot see: of moves of these blocks and slots."""

    def __init__(self, world: World, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._world, self._blocks, self._slots = world, blocks, slots

    def tell(self, launch: Launch) -> None:
        loads = launch.entry == "kv_scatter"
        values = [ctypes.c_uint64(argument.value).value for argument in launch.arguments]
        pool, stride, numbers = (values[2], values[3], (values[1], values[4])) if loads else (*values[:2], values[2::2])
        told = [(address, 4 * len(self._blocks), False) for address in numbers[:2]]
        for block in self._blocks:
            told += [(address, length, loads) for address, length in self._world.touched(block)]
        base = np.frombuffer(self._world.host.slot(0), np.uint8).ctypes.data
        rows = self._slots if pool == base else range(len(self._blocks))
        told += [(pool + row * stride, self._world.layout.block_bytes, not loads) for row in rows]
        for address, length, writes in told:
            self._world.fake.launch_touches(address, length, writes=writes)


@functools.cache
def _emulator() -> Emulator:
    """Built once for all modules."""
    folder = tempfile.mkdtemp(prefix="kvtier-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Emulator(pathlib.Path(folder))


@pytest.fixture
def images() -> Images:
    """The kernels for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the device's kernels cannot run on this machine")
    return lambda variant: _emulator().path(variant).read_bytes()
