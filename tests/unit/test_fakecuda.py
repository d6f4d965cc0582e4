"""The fake libcuda tells order from chance exactly, launches kernels, and is as slow as it is told to be."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.testing.drivers import mapped, peek, pieces, poke
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda, load

__all__ = ["fake_cuda"]

STREAMS, EVENTS = 3, 2
KERNEL = """
#include <stddef.h>
void emu_add(const unsigned *grid, const unsigned *block, unsigned shared, void **arguments) {
  unsigned char *to = *(unsigned char **)arguments[0];
  for (unsigned i = 0; i < grid[0] * block[0]; i++) to[i] += *(int *)arguments[1];
}
static unsigned long (*reach)(unsigned long);
void emu_set_reach(unsigned long (*function)(unsigned long)) { reach = function; }
void emu_add_at(const unsigned *grid, const unsigned *block, unsigned shared, void **arguments) {
  unsigned long *table = *(unsigned long **)arguments[0];
  for (unsigned i = 0; i < grid[0]; i++) *(unsigned char *)reach(table[i]) += 1;
}
int emu_add_at_nargs = 1;
int emu_add_nargs = 2;
static const int sizes[] = {8, 4};
const int *emu_add_sizes_p = sizes;
const int *emu_add_at_sizes_p = sizes;
"""


@pytest.fixture
def driver(fake_cuda: FakeCuda) -> Iterator[CudaDriver]:
    driver = CudaDriver()
    yield driver
    driver.close()


class Knowledge:
    """What happens before what, as sets of operations: the definition, without clocks."""

    def __init__(self) -> None:
        self.by_stream: list[set[int]] = [set() for _ in range(STREAMS)]
        self.by_event: list[set[int]] = [set() for _ in range(EVENTS)]
        self.by_host: set[int] = set()
        self.touches: list[tuple[range, bool]] = []

    def touch(self, stream: int, where: range, writes: bool) -> bool:
        """Whether it is ordered after all that it conflicts with."""
        self.by_stream[stream] |= self.by_host
        ordered = all(
            self.is_before(number, where, writes, self.by_stream[stream]) for number in range(len(self.touches))
        )
        self.by_stream[stream].add(len(self.touches))
        self.touches.append((where, writes))
        return ordered

    def is_before(self, number: int, where: range, writes: bool, known: set[int]) -> bool:
        former, wrote = self.touches[number]
        overlap = former.start < where.stop and where.start < former.stop
        return number in known or not overlap or not (writes or wrote)


places = st.builds(lambda start, length: range(start, start + length), st.integers(0, 6), st.integers(1, 3))
stream_numbers, event_numbers = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1)
steps = st.one_of(
    st.tuples(st.just("touch"), stream_numbers, places, st.booleans()),
    st.tuples(st.just("record"), event_numbers, stream_numbers),
    st.tuples(st.just("wait"), stream_numbers, event_numbers),
    st.tuples(st.just("synchronize"), event_numbers),
    st.tuples(st.just("finish"), stream_numbers),
)


def run_on_fake(fake: FakeCuda, driver: CudaDriver, program: list[Any], known: Knowledge) -> None:
    """Carry a program out up to the first race, and compare each verdict."""
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    streams = [driver.streams.make_stream() for _ in range(STREAMS)]
    events = [driver.streams.make_event() for _ in range(EVENTS)]
    for step in program:
        match step:
            case ("touch", stream, where, writes):
                code = fake.kernel(streams[stream].key, addresses.address + where.start, len(where), writes=writes)
                ordered = known.touch(stream, where, writes)
                assert (code == 0) == (fake.report == "") == ordered
                if not ordered:
                    return
            case ("record", event, stream):
                driver.streams.record(events[event], streams[stream])
                known.by_stream[stream] |= known.by_host
                known.by_event[event] = set(known.by_stream[stream])
            case ("wait", stream, event):
                driver.streams.wait(streams[stream], events[event])
                known.by_stream[stream] |= known.by_event[event]
            case ("synchronize", event):
                driver.streams.synchronize(events[event])
                known.by_host |= known.by_event[event]
            case ("finish", stream):
                driver.streams.finish(streams[stream])
                known.by_host |= known.by_stream[stream]


@settings(max_examples=300)
@given(st.lists(steps, max_size=14))
def test_clocks_know_what_happens_before_what(program: list[Any]) -> None:
    """A race is missed, or order that exists is not seen."""
    fake = load()
    if isinstance(fake, str):
        pytest.skip(fake)
    fake.reset()
    fake.configure(GRANULE_BYTES, GRANULE_BYTES)
    driver = CudaDriver()
    try:
        run_on_fake(fake, driver, program, Knowledge())
    finally:
        driver.close()
        fake.reset()


def test_a_query_teaches_the_host_only_if_it_says_done(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    """Asking in vain counts as waiting: a slot that is polled too rarely seems free."""
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    stream, event = driver.streams.make_stream(), driver.streams.make_event()
    fake_cuda.hold(stream.key)
    fake_cuda.kernel(stream.key, addresses.address, 8, writes=True)
    driver.streams.record(event, stream)
    assert not driver.streams.is_done(event)
    fake_cuda.go_on(stream.key)
    while not driver.streams.is_done(event):
        pass
    assert fake_cuda.host_access(addresses.address, 8, writes=True) == 0


def test_held_work_does_not_happen(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    """A test that holds a stream proves nothing: the work is done all the same, or other streams are held too."""
    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    driver.zero(addresses, 0, GRANULE_BYTES)
    host = np.full(16, 9, np.uint8)
    driver.register(host.ctypes.data, host.nbytes)
    held, free = driver.streams.make_stream(), driver.streams.make_stream()
    fake_cuda.hold(held.key)
    driver.streams.copy(pieces(addresses.address), pieces(host.ctypes.data), pieces(16), held)
    driver.streams.finish(free)
    assert peek(driver, addresses.address + 64, 1) == [0]
    fake_cuda.go_on(held.key)
    driver.streams.finish(held)
    assert peek(driver, addresses.address, 16).tolist() == [9] * 16


def test_copies_take_the_time_they_are_told_to(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    """Slow copies are as fast as others: nothing that waits for them is tested."""
    from cuda.bindings import driver as cuda

    addresses = driver.reserve(GRANULE_BYTES)
    mapped(driver, addresses, 0)
    stream = driver.streams.make_stream()
    before, after = (cuda.cuEventCreate(0)[1] for _ in range(2))
    fake_cuda.slow_copies(0.01, latency_us=1000)
    cuda.cuEventRecord(before, stream.key)
    half = GRANULE_BYTES // 2
    driver.streams.copy(pieces(addresses.address), pieces(addresses.address + half), pieces(half), stream)
    cuda.cuEventRecord(after, stream.key)
    driver.streams.finish(stream)
    assert cuda.cuEventElapsedTime(before, after)[1] >= half / 0.01e9 * 1e3 + 1  # ms: at 10 MB/s, and the latency


@pytest.mark.parametrize("strict", [False, True])
def test_kernels_run_on_device_memory(fake_cuda: FakeCuda, tmp_path: Path, strict: bool) -> None:
    """Kernels cannot be launched, or in strict mode die of the pointers that they are given."""
    from cuda.bindings import driver as cuda

    fake_cuda.configure(2 * GRANULE_BYTES, GRANULE_BYTES, strict=strict)
    driver = CudaDriver()
    source, library = tmp_path / "add.c", tmp_path / "add.so"
    source.write_text(KERNEL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    addresses = driver.reserve(2 * GRANULE_BYTES)
    mapped(driver, addresses, 0)
    mapped(driver, addresses, 1)
    start = addresses.address + GRANULE_BYTES - 4
    poke(driver, start, 1, 8)
    stream = driver.streams.make_stream()
    loads: list[Callable[[], Any]] = [
        lambda: cuda.cuModuleLoad(str(library).encode()),
        lambda: cuda.cuModuleLoadData(library.read_bytes()),
    ]
    for load_module in loads:
        code, module = load_module()
        assert int(code) == 0
        kernel = cuda.cuModuleGetFunction(module, b"add")[1]
        fake_cuda.launch_touches(start, 8, writes=True)
        arguments = ((start, 3), (ctypes.c_void_p, ctypes.c_int))
        assert int(cuda.cuLaunchKernel(kernel, 4, 1, 1, 2, 1, 1, 0, stream.key, arguments, 0)[0]) == 0
    driver.streams.finish(stream)
    assert peek(driver, start, 8).tolist() == [7] * 8
    table = np.array([start, start + 1], np.uint64)
    driver.streams.copy(pieces(addresses.address), pieces(table.ctypes.data), pieces(16), stream)
    at_kernel = cuda.cuModuleGetFunction(module, b"add_at")[1]
    launched = cuda.cuLaunchKernel(
        at_kernel, 2, 1, 1, 1, 1, 1, 0, stream.key, ((addresses.address,), (ctypes.c_void_p,)), 0
    )
    assert int(launched[0]) == 0
    driver.streams.finish(stream)
    assert peek(driver, start, 4).tolist() == [8, 8, 7, 7]
    other = driver.streams.make_stream()
    fake_cuda.launch_touches(start, 8, writes=True)
    cuda.cuLaunchKernel(kernel, 4, 1, 1, 2, 1, 1, 0, stream.key, ((start, 3), (ctypes.c_void_p, ctypes.c_int)), 0)
    assert fake_cuda.kernel(other.key, start, 1, writes=False) != 0
    assert "a kernel meets a kernel" in fake_cuda.report
    assert int(cuda.cuModuleGetFunction(module, b"none")[0]) != 0
    driver.close()


def test_modules_from_memory_are_not_taken_for_each_other(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    """A second image is answered with the first one's kernels: what it was to show is shown of another."""
    from cuda.bindings import driver as cuda

    driver = CudaDriver()
    source, library = tmp_path / "add.c", tmp_path / "add.so"
    found = []
    for name in ("add", "sub"):
        source.write_text(KERNEL.replace("add", name))
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        code, module = cuda.cuModuleLoadData(library.read_bytes())
        assert int(code) == 0
        found.append([int(cuda.cuModuleGetFunction(module, kernel)[0]) == 0 for kernel in (b"add", b"sub")])
        assert int(cuda.cuModuleUnload(module)[0]) == 0
    assert found == [[True, False], [False, True]]
    driver.close()
