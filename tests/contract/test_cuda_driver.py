"""The CUDA driver keeps the contracts of drivers and streams, on a libcuda that enforces the device's rules."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.streams_cuda import IN_ANY_ORDER, CopyAttributes
from kvtier.errors import ConfigError, CudaError, DeviceLost, DriverError, OutOfMemory
from kvtier.testing.drivers import GRANULES, DriverContract, mapped, peek, pieces, poke
from kvtier.testing.fork import in_child, refusals
from kvtier.testing.streams import StreamContract
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda

__all__ = ["fake_cuda"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["plain", "strict", "copy by copy", "large granules"])
def driver(request: pytest.FixtureRequest, fake_cuda: FakeCuda) -> Iterator[CudaDriver]:
    granule_bytes = 4 * GRANULE_BYTES if request.param == "large granules" else GRANULE_BYTES
    fake_cuda.configure(2 * GRANULES * granule_bytes, GRANULE_BYTES, strict=request.param == "strict")
    if request.param == "copy by copy":
        fake_cuda.hide("cuMemcpyBatchAsync")
    driver = CudaDriver(granule_bytes=granule_bytes)
    yield driver
    driver.close()
    assert fake_cuda.context_owners == 0


class TestCudaDriver(DriverContract, StreamContract):
    pass


@pytest.fixture
def shared(fake_cuda: FakeCuda) -> Iterator[CudaDriver]:
    driver = CudaDriver(share=True)
    yield driver
    driver.close()


def test_batches_are_used_where_they_exist(fake_cuda: FakeCuda) -> None:
    """A thousand small copies cost a thousand calls, or a driver of before CUDA 12.8 cannot copy at all."""
    for hidden, calls in ((False, {"cuMemcpyBatchAsync": 1, "cuMemcpyAsync": 0}), (True, {"cuMemcpyAsync": 3})):
        fake_cuda.reset()
        if hidden:
            fake_cuda.hide("cuMemcpyBatchAsync")
        driver = CudaDriver()
        addresses = driver.reserve(GRANULE_BYTES)
        mapped(driver, addresses, 0)
        stream, start = driver.streams.make_stream(), addresses.address
        driver.streams.copy(
            pieces(start, start + 8, start + 16), pieces(start + 64, start + 72, start + 80), pieces(8, 8, 8), stream
        )
        assert driver.streams.has_batches != hidden
        assert {function: fake_cuda.calls(function) for function in calls} == calls
        driver.close()


def test_device_memory_is_out_of_the_cpus_reach(fake_cuda: FakeCuda) -> None:
    """Strict mode proves nothing: the CPU could touch what lies on a device."""
    fake_cuda.configure(8 * GRANULE_BYTES, GRANULE_BYTES, strict=True)
    driver = CudaDriver()
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    poke(driver, addresses.address, 3)
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="Bad address"):
            os.write(writer, memory_at(addresses.address))
    finally:
        os.close(reader)
        os.close(writer)
    assert peek(driver, addresses.address) == [3]
    driver.close()


def test_read_only_memory_is_kept_from_writers(shared: CudaDriver, fake_cuda: FakeCuda) -> None:
    """A shared prefix can be overwritten by one of its readers."""
    assert shared.has_read_only
    addresses = shared.reserve(GRANULE_BYTES)
    mapped(shared, addresses, 0)
    shared.set_access(addresses, 0, GRANULE_BYTES, write=False)
    peek(shared, addresses.address)
    with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        poke(shared, addresses.address, 1)


@pytest.mark.parametrize("asked", [True, False])
def test_a_device_without_read_only_grants_both(fake_cuda: FakeCuda, asked: bool) -> None:
    """Where a device knows no read-only mappings, mapping a shared prefix fails, or is said to be protected."""
    fake_cuda.configure(4 * GRANULE_BYTES, GRANULE_BYTES, read_only=False)
    driver = CudaDriver()
    if asked:
        assert not driver.has_read_only
        assert driver.used_bytes == fake_cuda.used_bytes == 0
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    driver.set_access(addresses, 0, GRANULE_BYTES, write=False)
    poke(driver, addresses.address, 1)
    assert not driver.has_read_only
    driver.close()


def test_a_handle_is_shared_by_its_descriptor(shared: CudaDriver, fake_cuda: FakeCuda) -> None:
    """Another process sees other bytes, or memory is counted twice."""
    addresses, elsewhere = shared.reserve(GRANULE_BYTES), shared.reserve(GRANULE_BYTES)
    handle = mapped(shared, addresses, 0)
    poke(shared, addresses.address, 6)
    fd = shared.export_handle(handle)
    imported = shared.import_handle(fd, GRANULE_BYTES)
    os.close(fd)
    shared.map(elsewhere, 0, imported)
    shared.set_access(elsewhere, 0, GRANULE_BYTES, write=True)
    assert peek(shared, elsewhere.address) == [6]
    assert shared.used_bytes == fake_cuda.used_bytes == GRANULE_BYTES
    shared.release(imported)
    shared.unmap(elsewhere, 0, GRANULE_BYTES)
    assert shared.used_bytes == GRANULE_BYTES


def test_another_process_maps_an_exported_handle(shared: CudaDriver, fake_cuda: FakeCuda) -> None:
    """Handles are shared within one process only."""
    addresses = shared.reserve(GRANULE_BYTES)
    poke_at = addresses.address + 100
    fd = shared.export_handle(mapped(shared, addresses, 0))
    code = f"""
from pathlib import Path
from tests.fakecuda.fake import FakeCuda
FakeCuda(Path({str(fake_cuda.path)!r})).configure({4 * GRANULE_BYTES}, {GRANULE_BYTES})
from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.streams_cuda import IN_ANY_ORDER, CopyAttributes
from kvtier.testing.drivers import poke
driver = CudaDriver()
addresses = driver.reserve({GRANULE_BYTES})
driver.map(addresses, 0, driver.import_handle({fd}, {GRANULE_BYTES}))
driver.set_access(addresses, 0, {GRANULE_BYTES}, write=True)
poke(driver, addresses.address + 100, 42)
driver.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[fd], timeout=60, cwd=ROOT)
    os.close(fd)
    assert peek(shared, poke_at) == [42]


def test_what_is_not_made_for_sharing_cannot_be(fake_cuda: FakeCuda) -> None:
    """Exporting fails somewhere deep in another process instead of here."""
    driver = CudaDriver()
    with pytest.raises(CudaError, match="NOT_PERMITTED"):
        driver.export_handle(driver.create(GRANULE_BYTES))
    driver.close()


def test_host_memory_is_pinned_once(shared: CudaDriver, fake_cuda: FakeCuda) -> None:
    """Copies from a registered slab are staged all the same, or closing leaves it registered."""
    slab = np.full(8192, 5, np.uint8)
    shared.register(slab.ctypes.data, slab.nbytes)
    with pytest.raises(CudaError, match="ALREADY_REGISTERED") as caught:
        shared.register(slab.ctypes.data, slab.nbytes)
    assert (caught.value.call, caught.value.code) == ("cuMemHostRegister", 712)
    addresses = shared.reserve(GRANULE_BYTES)
    mapped(shared, addresses, 0)
    stream = shared.streams.make_stream()
    shared.streams.copy(pieces(addresses.address), pieces(slab.ctypes.data), pieces(slab.nbytes), stream)
    shared.streams.finish(stream)
    assert fake_cuda.calls("pageable_copies") == 0
    shared.unregister(slab.ctypes.data)
    with pytest.raises(CudaError, match="NOT_REGISTERED"):
        shared.unregister(slab.ctypes.data)
    shared.register(slab.ctypes.data, slab.nbytes)
    shared.close()
    other = CudaDriver()
    other.register(slab.ctypes.data, slab.nbytes)
    other.close()


def test_a_thread_that_is_not_bound_is_told(shared: CudaDriver) -> None:
    """A worker thread without a context works by luck: on whatever context it finds."""
    caught: list[CudaError] = []

    def work() -> None:
        try:
            shared.streams.make_stream()
        except CudaError as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert [error.name for error in caught] == ["CUDA_ERROR_INVALID_CONTEXT"]


@pytest.mark.parametrize(
    "call",
    [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
    ],
)
def test_a_failed_call_leaves_the_books_as_they_were(shared: CudaDriver, fake_cuda: FakeCuda, call: str) -> None:
    """What a device refused counts as done: memory leaks, or a mapping is used that is not there."""

    def all_of_it() -> None:
        addresses = shared.reserve(GRANULE_BYTES)
        handle = shared.create(GRANULE_BYTES)
        shared.map(addresses, 0, handle)
        shared.set_access(addresses, 0, GRANULE_BYTES, write=True)
        shared.unmap(addresses, 0, GRANULE_BYTES)
        shared.release(handle)
        shared.free_range(addresses)

    fake_cuda.fault(call, 999)
    with pytest.raises(CudaError) as caught:
        all_of_it()
    assert (caught.value.call, caught.value.code) == (call, 999)
    assert shared.used_bytes == fake_cuda.used_bytes
    all_of_it()
    assert shared.used_bytes == fake_cuda.used_bytes
    shared.close()
    assert fake_cuda.used_bytes == 0


@pytest.mark.parametrize(
    "call",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity",
        "cuMemGetInfo_v2",
        "cuStreamCreate",
    ],
)
def test_a_driver_that_cannot_be_made_leaves_nothing(fake_cuda: FakeCuda, call: str) -> None:
    """The primary context is held for ever by a driver that never was."""
    fake_cuda.fault(call, 999 if call.startswith("cuMem") or call == "cuStreamCreate" else 1)
    with pytest.raises((ConfigError, DriverError)):
        CudaDriver()
    assert fake_cuda.context_owners == 0


def test_memory_that_others_have_taken_is_out_of_memory(shared: CudaDriver, fake_cuda: FakeCuda) -> None:
    """An allocation that the device refuses looks like a broken driver; its call, code and name are lost."""
    fake_cuda.fault("cuMemCreate", 2)
    with pytest.raises(OutOfMemory, match=r"cuMemCreate.*CUDA_ERROR_OUT_OF_MEMORY.*\(2\)") as caught:
        shared.create(GRANULE_BYTES)
    cause = caught.value.__cause__
    assert isinstance(cause, CudaError)
    assert (cause.call, cause.code, cause.name) == ("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    shared.create(GRANULE_BYTES)


def test_a_lost_device_says_so_and_can_be_closed(fake_cuda: FakeCuda) -> None:
    """After a sticky error calls fail one way or the other, and closing raises, or leaves the context held."""
    driver = CudaDriver()
    addresses = driver.reserve(2 * GRANULE_BYTES)
    mapped(driver, addresses, 0)
    stream, event = driver.streams.make_stream(), driver.streams.make_event()
    driver.streams.record(event, stream)
    fake_cuda.lose()
    for call in (
        lambda: driver.streams.make_stream(),
        lambda: driver.streams.is_done(event),
        lambda: driver.streams.finish(stream),
        lambda: driver.zero(addresses, 0, 1),
        lambda: driver.memory_info(),
    ):
        with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    driver.close()
    assert fake_cuda.used_bytes == 0
    assert fake_cuda.context_owners == 0


def test_a_wild_copy_loses_the_device(shared: CudaDriver) -> None:
    """Copying to memory that is not mapped goes unnoticed, or kills the process."""
    addresses = shared.reserve(GRANULE_BYTES)
    with pytest.raises(DeviceLost):
        poke(shared, addresses.address, 1)


@pytest.mark.parametrize(("attribute", "share"), [(102, False), (103, True)])
def test_a_device_that_cannot_do_it_is_refused(fake_cuda: FakeCuda, attribute: int, share: bool) -> None:
    """The first call that a device does not have fails in the middle of work."""
    fake_cuda.set_attribute(attribute, 0)
    with pytest.raises(ConfigError, match="device 0 has no"):
        CudaDriver(share=share)
    with pytest.raises(ConfigError, match="device 7"):
        CudaDriver(7)


def test_granules_are_what_the_device_can_align(fake_cuda: FakeCuda) -> None:
    """Granules are taken that no range can be aligned to."""
    for wrong in (GRANULE_BYTES // 2, 3 * GRANULE_BYTES, 0, GRANULE_BYTES + 4096):
        with pytest.raises(DriverError, match="power of two"):
            CudaDriver(granule_bytes=wrong)
    assert fake_cuda.context_owners == 0


def test_capacity_is_kept_below_what_the_device_has(fake_cuda: FakeCuda) -> None:
    """A tier of a few GiB takes the whole device."""
    driver = CudaDriver(capacity_bytes=2 * GRANULE_BYTES)
    driver.create(2 * GRANULE_BYTES)
    assert driver.memory_info() == (0, 2 * GRANULE_BYTES)
    with pytest.raises(OutOfMemory):
        driver.create(GRANULE_BYTES)
    driver.close()


def test_a_forked_child_is_refused_and_harms_nothing(shared: CudaDriver) -> None:
    """A child uses its parent's context, which CUDA forbids."""
    addresses = shared.reserve(GRANULE_BYTES)
    mapped(shared, addresses, 0)

    def child() -> int:
        refused = refusals((lambda: shared.create(GRANULE_BYTES), lambda: shared.streams.make_event()))
        shared.close()
        return refused

    assert in_child(child) == 2
    poke(shared, addresses.address, 1)


def test_a_view_lies_over_the_range(shared: CudaDriver) -> None:
    """Kernels get an array of other memory, or its addresses are given to others while it lives."""
    pytest.importorskip("cupy", reason="views of device memory need CuPy")
    addresses = shared.reserve(2 * GRANULE_BYTES)
    mapped(shared, addresses, 1)
    view = shared.view(addresses)
    assert view.shape == (2 * GRANULE_BYTES,)
    assert view.data.ptr == addresses.address
    assert view[GRANULE_BYTES:].reshape(2, -1)[1].data.ptr == addresses.address + 3 * GRANULE_BYTES // 2
    assert view.data.device_id == 0


def test_without_cupy_a_view_says_what_to_install(shared: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without CuPy reads about a missing module deep inside."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="CuPy"):
        shared.view(shared.reserve(GRANULE_BYTES))


def test_importing_a_driver_loads_no_cuda() -> None:
    """A machine without a GPU pays for CUDA's packages, or cannot import ours without them."""
    code = """
import sys
sys.modules["cuda"] = sys.modules["cupy"] = None
import kvtier.allocator.driver_cuda
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_attributes_of_copies_lie_as_in_the_bindings(fake_cuda: FakeCuda) -> None:
    """The driver reads our own structure: order and flags would be taken from the wrong bytes."""
    from cuda.bindings import driver as cuda

    theirs = cuda.CUmemcpyAttributes()
    theirs.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    theirs.flags = 1
    ours = CopyAttributes(order=IN_ANY_ORDER, flags=1)
    assert ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours)) == bytes(ours)


def test_without_bindings_a_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without a GPU's packages reads about a missing module."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match="cuda-bindings"):
        CudaDriver()


def memory_at(address: int) -> memoryview:
    """One byte there, for the kernel to read: it answers EFAULT where we would die."""
    return memoryview((ctypes.c_ubyte * 1).from_address(address))
