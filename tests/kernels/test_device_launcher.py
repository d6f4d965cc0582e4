"""The launcher through a driver's calls: once with a driver that only listens, once with the fake device."""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.allocator.cuda_calls import CudaCalls
from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.errors import ConfigError, CudaError
from kvtier.kernels import launch_blocks
from kvtier.kernels.checksum import checksums
from kvtier.kernels.launch import DeviceFragments, DevicePool, Launch
from kvtier.kernels.launch_device import DeviceLauncher, images_for
from kvtier.kernels.source import Variant, variant_of
from kvtier.testing.drivers import mapped
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.kernels.emulated import Emulator

__all__ = ["fake_cuda"]
STREAM = 0x5EED
LENGTH_BYTES = 1024
BLOCKS = 3


class Listener:
    """A driver's calls: notes each one, and gives out a new number each time."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __call__(self, function: str, *arguments: Any) -> int:
        self.heard.append((function, *arguments))
        return len(self.heard)

    def functions(self) -> list[str]:
        return [call[0] for call in self.heard]


def image(variant: Variant) -> bytes:
    return variant.name.encode()


def checksum_launch(sums: int = 16, pool: int = 4096, slots: int = 32, seeds: int = 48) -> Launch:
    return launch_blocks.checksum(sums, DevicePool(pool, LENGTH_BYTES), slots, seeds, BLOCKS, LENGTH_BYTES)


def test_a_variant_is_loaded_once() -> None:
    """Every launch loads its module again, which waits for the whole device."""
    listener = Listener()
    launcher = DeviceLauncher(listener, image)
    launcher.launch(checksum_launch(), STREAM)
    launcher.launch(checksum_launch(), STREAM)
    launcher.prepare(variant_of("checksum"))
    assert listener.functions() == ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuLaunchKernel"]
    assert listener.heard[0][1] == b"checksum"
    assert listener.heard[1][1:] == (1, b"kv_checksum")


def test_what_was_prepared_is_only_launched_later() -> None:
    """Preparing ahead leaves work for the hot path: some kernel of the variant is looked up at its first launch."""
    listener = Listener()
    launcher = DeviceLauncher(listener, image)
    launcher.prepare(variant_of("fragments"))
    assert [call[2] for call in listener.heard[1:]] == [b"kv_gather", b"kv_scatter"]
    del listener.heard[:]
    fragments = DeviceFragments(64, 1, 16, 16)
    launcher.launch(launch_blocks.scatter(DevicePool(4096, 16), 32, fragments, 48, 2), STREAM)
    assert listener.functions() == ["cuLaunchKernel"]
    assert listener.heard[0][1] == 3  # what the look-up of kv_scatter gave out


def test_grid_stream_and_arguments_reach_the_driver() -> None:
    """A kernel runs with another grid, on another stream, or with arguments that are gone."""
    seen = []

    class Reading(Listener):
        def __call__(self, function: str, *arguments: Any) -> int:
            if function == "cuLaunchKernel":
                count = len(checksum_launch().arguments)
                pointers = (ctypes.c_void_p * count).from_address(arguments[9])
                seen.extend(ctypes.c_uint64.from_address(pointers[i]).value for i in range(count))
            return super().__call__(function, *arguments)

    listener = Reading()
    launch = checksum_launch()
    DeviceLauncher(listener, image).launch(launch, STREAM)
    assert listener.heard[-1][2:9] == (*launch.grid, *launch.block, 0)
    assert listener.heard[-1][9] == STREAM
    assert listener.heard[-1][11] == 0
    assert seen == [argument.value for argument in launch.arguments]


def test_close_unloads_each_module_once() -> None:
    """Modules pile up in the device's memory, or are unloaded twice."""
    listener = Listener()
    launcher = DeviceLauncher(listener, image)
    for source in ("checksum", "fragments"):
        launcher.prepare(variant_of(source))
    loaded = [number for number, call in enumerate(listener.heard, start=1) if call[0] == "cuModuleLoadData"]
    launcher.close()
    launcher.close()
    unloaded = [call[1] for call in listener.heard if call[0] == "cuModuleUnload"]
    assert sorted(unloaded) == loaded
    launcher.launch(checksum_launch(), STREAM)
    assert listener.functions()[-3:] == ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"]


def test_a_module_that_cannot_be_loaded_is_no_half_loaded_one() -> None:
    """After a refused module the next launch finds it in the books, and fails by a KeyError."""

    class Refusing(Listener):
        def __call__(self, function: str, *arguments: Any) -> int:
            if function == "cuModuleGetFunction" and "cuModuleUnload" not in self.functions():
                super().__call__(function, *arguments)
                raise CudaError(function, 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found")
            return super().__call__(function, *arguments)

    listener = Refusing()
    launcher = DeviceLauncher(listener, image)
    with pytest.raises(CudaError):
        launcher.launch(checksum_launch(), STREAM)
    assert listener.functions() == ["cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload"]
    launcher.launch(checksum_launch(), STREAM)
    assert listener.functions()[3:] == ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"]


def test_cubins_are_compiled_for_the_architecture() -> None:
    """A device gets machine code of another one."""
    try:
        images = images_for("sm_90")
        cubin = images(variant_of("checksum"))
    except ConfigError as problem:
        pytest.skip(str(problem))
    assert cubin.startswith(b"\x7fELF")
    assert images_for("sm_80")(variant_of("checksum")) != cubin


def test_nothing_is_imported_before_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only might launch kernels needs NVRTC, or pays for loading it."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    launcher = DeviceLauncher(Listener(), images_for("sm_75"))
    with pytest.raises(ConfigError, match="NVRTC cannot be loaded"):
        launcher.prepare(variant_of("checksum"))


# ---------------------------------------------------------------- on the fake device


@pytest.fixture(params=["plain", "strict"])
def driver(request: pytest.FixtureRequest, fake_cuda: FakeCuda) -> Iterator[CudaDriver]:
    fake_cuda.configure(4 * GRANULE_BYTES, GRANULE_BYTES, strict=request.param == "strict")
    driver = CudaDriver()
    yield driver
    driver.close()


def test_a_kernel_runs_from_an_image_in_memory(driver: CudaDriver, emulator: Emulator, fake_cuda: FakeCuda) -> None:
    """The image, the function or the packed arguments do not survive the real bindings."""
    calls = CudaCalls()
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    stream = driver.streams.make_stream()
    blocks = np.random.default_rng(0).integers(0, 256, (BLOCKS, LENGTH_BYTES), np.uint8)
    numbers, seeds = np.array([2, 0, 1], np.int32), np.array([5, 6, 7], np.uint64)
    at = addresses.address
    places = {"pool": at, "slots": at + 8192, "seeds": at + 12288, "sums": at + 16384}
    for name, array in (("pool", blocks), ("slots", numbers), ("seeds", seeds)):
        calls("cuMemcpyHtoD", places[name], array.ctypes.data, array.nbytes)
    launcher = DeviceLauncher(calls, lambda variant: emulator.path(variant).read_bytes())
    for _ in range(2):
        launcher.launch(checksum_launch(**places), stream.key)
        driver.streams.finish(stream)
    found = np.zeros(BLOCKS, np.uint64)
    calls("cuMemcpyDtoH", found.ctypes.data, places["sums"], found.nbytes)
    assert found.tolist() == checksums(blocks, numbers, seeds, LENGTH_BYTES).tolist()
    assert fake_cuda.calls("cuModuleLoadData") == 1
    launcher.close()
    assert fake_cuda.calls("cuModuleUnload") == 1


def test_machine_code_for_another_machine_is_refused_by_name(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    """A module that does not fit the device ends in a crash, or is launched all the same."""
    launcher = DeviceLauncher(CudaCalls(), lambda variant: b"not an image" + bytes(64))
    with pytest.raises(CudaError, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        launcher.launch(checksum_launch(), driver.streams.make_stream().key)
    assert fake_cuda.calls("cuLaunchKernel") == 0
    launcher.close()
