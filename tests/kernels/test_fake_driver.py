"""The kernels through the real bindings and the fake driver: modules, packed records, tables of device addresses.

Plainly, and strictly: then device memory faults when the CPU reads it, and a kernel reaches it as a device would.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.kernels.checksum import seeds_of
from kvtier.kernels.fragments import Fragments
from kvtier.kernels.launch import Launch
from kvtier.kernels.reference import ReferenceKernels
from kvtier.types import block_key
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda  # noqa: F401
from tests.kernels.attention_world import world
from tests.kernels.emulated import EmulatedKernels, Emulator

GRANULES = 64


class FakeDevice:
    """Keeps a copy of each array's memory on the fake device; after a launch all of it is copied back."""

    def __init__(self, emulator: Emulator) -> None:
        from kvtier.allocator.cuda_calls import CudaCalls
        from kvtier.allocator.driver_cuda import CudaDriver

        self._emulator = emulator
        self._driver = CudaDriver()
        self._calls = CudaCalls()
        self._stream = self._driver.streams.make_stream()
        self._range = self._driver.reserve(GRANULES * GRANULE_BYTES)
        self._handle = self._driver.create(GRANULES * GRANULE_BYTES)
        self._driver.map(self._range, 0, self._handle)
        self._driver.set_access(self._range, 0, GRANULES * GRANULE_BYTES, write=True)
        self._copies: dict[int, tuple[int, NDArray]] = {}  # by host address: device address, array
        self._next = self._range.address

    def address(self, array: NDArray) -> int:
        whole = _whole(array)
        if whole.ctypes.data not in self._copies:
            self._calls("cuMemcpyHtoD", self._next, whole.ctypes.data, whole.nbytes)
            self._copies[whole.ctypes.data] = (self._next, whole)
            self._next += -(-whole.nbytes // 256) * 256
            assert self._next <= self._range.address + self._range.length_bytes
        return self._copies[whole.ctypes.data][0] + array.ctypes.data - whole.ctypes.data

    def run(self, launch: Launch) -> None:
        module = self._calls("cuModuleLoad", str(self._emulator.path(launch.variant)).encode())
        function = self._calls("cuModuleGetFunction", module, launch.entry.encode())
        pointers = launch.pointers()
        self._calls(
            "cuLaunchKernel", function, *launch.grid, *launch.block, 0, self._stream.key, ctypes.addressof(pointers), 0
        )
        self._driver.streams.finish(self._stream)
        for place, array in self._copies.values():
            self._calls("cuMemcpyDtoH", array.ctypes.data, place, array.nbytes)

    def close(self) -> None:
        self._driver.streams.drop_stream(self._stream)
        self._driver.unmap(self._range, 0, self._range.length_bytes)
        self._driver.release(self._handle)
        self._driver.free_range(self._range)
        self._driver.close()


def _whole(array: NDArray) -> NDArray:
    """The array whose memory this one is a view of, however it was made."""
    node, whole = array, array
    while (node := getattr(node, "base", None)) is not None:
        whole = node if isinstance(node, np.ndarray) else whole
    assert whole.flags.c_contiguous
    return whole


@pytest.fixture(params=["plain", "strict"])
def device(request: pytest.FixtureRequest, emulator: Emulator, fake_cuda: FakeCuda) -> Iterator[EmulatedKernels]:  # noqa: F811
    fake_cuda.configure(GRANULES * GRANULE_BYTES, GRANULE_BYTES, strict=request.param == "strict")
    fake = FakeDevice(emulator)
    yield EmulatedKernels(fake)
    fake.close()


def test_attention(device: EmulatedKernels) -> None:
    """The record of strides, or an address inside it, does not survive a real launch."""
    case = world(4, "bfloat16", 64, kv_heads=2, host_blocks=True)
    out, log_sums = device.attend(case.queries, case.kv, case.batch, split_tokens=64)
    wanted, wanted_log_sums = ReferenceKernels().attend(case.queries, case.kv, case.batch)
    assert np.allclose(out, wanted, rtol=1e-4, atol=2e-6)
    assert np.allclose(log_sums, wanted_log_sums, rtol=1e-5, atol=1e-5)


def test_blocks(device: EmulatedKernels) -> None:
    """A foreign cache is found by a table of addresses on the device: gathered, coded and summed there."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 8, 64)).astype(np.float16) for _ in range(3)]
    fragments = Fragments.in_order([array.reshape(5, -1).view(np.uint8) for array in arrays])
    blocks, slots = np.array([4, 0, 2], np.int32), np.array([1, 3, 0], np.int32)
    seeds = seeds_of([block_key(bytes([n]) * 32, 0) for n in range(3)])
    results = []
    for kernels in (device, ReferenceKernels()):
        pool, coded, packed = (
            np.zeros((4, 3072), np.uint8),
            np.zeros((4, 1648), np.uint8),
            np.zeros((4, 3088), np.uint8),
        )
        kernels.gather(fragments, blocks, pool, slots)
        sums = kernels.checksums(pool, slots, seeds, 3072)
        kernels.quantize(arrays, blocks, coded, slots, "fp8")
        kernels.pack(pool, slots, packed, slots, "float16", 1536)
        results.append((pool, sums, coded, packed))
    for ours, wanted in zip(*results, strict=True):
        assert np.array_equal(ours, wanted)
