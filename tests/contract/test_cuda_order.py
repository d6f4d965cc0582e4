"""A breach of order on the device fails by name, every time, whether or not the work happens to be over already.

The walk of one block (computed, demoted, promoted, read, unmapped) is done right once, and then wrong in each way that
matters: every wrong way has to be caught, for a real device would only sometimes give wrong bytes.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.streams import Event, Stream
from kvtier.allocator.vmm import Arena
from kvtier.errors import DeviceLost
from kvtier.testing.drivers import pieces
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda

__all__ = ["fake_cuda"]

SLOT_BYTES = GRANULE_BYTES // 2
LAUNCH_FAILED = 719


class Walk:
    """An arena of four granules, a pinned slab, and the streams of an engine: compute, down, up."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.driver = CudaDriver()
        self.streams = self.driver.streams
        self.arena = Arena(self.driver, stride_bytes=SLOT_BYTES, slots_reserved=8)
        self.arena.grow(4 * GRANULE_BYTES)
        self.slab = np.zeros(4 * SLOT_BYTES, np.uint8)
        self.driver.register(self.slab.ctypes.data, self.slab.nbytes)
        self.compute, self.down, self.up = (self.streams.make_stream() for _ in range(3))

    def slot(self, index: int) -> int:
        return self.arena.address + index * SLOT_BYTES

    def host(self, index: int) -> int:
        return int(self.slab.ctypes.data) + index * SLOT_BYTES

    def kernel(self, stream: Stream, slot: int, *, writes: bool = False) -> int:
        return self.fake.kernel(stream.key, self.slot(slot), SLOT_BYTES, writes=writes)

    def after(self, stream: Stream) -> Event:
        event = self.streams.make_event()
        self.streams.record(event, stream)
        return event

    def demote(self, slot: int, place: int) -> None:
        self.streams.copy(pieces(self.host(place)), pieces(self.slot(slot)), pieces(SLOT_BYTES), self.down)

    def promote(self, place: int, slot: int) -> None:
        self.streams.copy(pieces(self.slot(slot)), pieces(self.host(place)), pieces(SLOT_BYTES), self.up, settled=True)


@pytest.fixture(params=["over", "held"])
def walk(request: pytest.FixtureRequest, fake_cuda: FakeCuda) -> Iterator[Walk]:
    walk = Walk(fake_cuda)
    if request.param == "held":
        fake_cuda.hold()
    yield walk
    fake_cuda.go_on()
    walk.driver.close()


def settle(walk: Walk, *events: Event) -> None:
    """Let the device come so far, and the host know of it."""
    walk.fake.go_on()
    for event in events:
        walk.streams.synchronize(event)


def test_the_right_order_is_accepted(walk: Walk) -> None:
    """Order is demanded where none is needed: every engine would fail here."""
    assert walk.kernel(walk.compute, 1, writes=True) == 0
    walk.streams.wait(walk.down, walk.after(walk.compute))
    walk.demote(1, 0)
    assert walk.kernel(walk.compute, 1) == 0  # readers do not disturb each other
    demoted = walk.after(walk.down)
    settle(walk, demoted)
    assert walk.fake.host_access(walk.host(0), SLOT_BYTES, writes=False) == 0
    walk.promote(0, 5)
    walk.streams.wait(walk.compute, walk.after(walk.up))
    assert walk.kernel(walk.compute, 5) == 0
    assert walk.kernel(walk.up, 6, writes=True) == 0  # another slot of the same granule pair
    events = [walk.after(stream) for stream in (walk.compute, walk.down, walk.up)]
    assert walk.arena.retire([1, 2], lambda slot: True, events) == [2, 3, 4, 5]
    settle(walk, *events)
    assert walk.arena.collect(walk.streams.is_done) == 2
    assert walk.fake.report == ""


def test_a_missing_wait_is_caught(walk: Walk) -> None:
    """A demotion that does not wait for the kernel's `after` event stores a block that is half computed."""
    walk.kernel(walk.compute, 1, writes=True)
    walk.after(walk.compute)  # recorded, and waited for by nobody
    with pytest.raises(DeviceLost, match="CUDA_ERROR_LAUNCH_FAILED"):
        walk.demote(1, 0)
    assert walk.fake.report.startswith("unordered overlap: a batch of copies meets a kernel")


def test_an_after_event_recorded_too_early_is_caught(walk: Walk) -> None:
    """An `after` that was recorded before the kernel covers nothing of it."""
    after = walk.after(walk.compute)
    walk.kernel(walk.compute, 1, writes=True)
    walk.streams.wait(walk.down, after)
    with pytest.raises(DeviceLost):
        walk.demote(1, 0)
    assert "unordered overlap" in walk.fake.report


def test_a_missing_after_event_is_caught(walk: Walk) -> None:
    """Attention that does not wait for a promotion reads what was in the slot before."""
    walk.promote(0, 5)
    assert walk.kernel(walk.compute, 5) == LAUNCH_FAILED
    assert walk.fake.report.startswith("unordered overlap: a kernel meets a batch of copies")


def test_a_slot_reused_under_its_reader_is_caught(walk: Walk) -> None:
    """A slot is filled with another block while a demotion still reads it."""
    walk.demote(1, 0)
    with pytest.raises(DeviceLost):
        walk.promote(1, 1)
    assert "unordered overlap" in walk.fake.report


def test_a_host_slot_read_too_early_is_caught(walk: Walk) -> None:
    """The lower tier stores a host slot that the device has not filled yet."""
    walk.demote(1, 0)
    assert walk.fake.host_access(walk.host(1), SLOT_BYTES, writes=False) == 0
    assert walk.fake.host_access(walk.host(0), SLOT_BYTES, writes=False) == LAUNCH_FAILED
    assert "a read by the host" in walk.fake.report


def test_an_early_unmap_is_caught(walk: Walk) -> None:
    """Memory goes while a kernel reads it: the device, and with it every user of the process, is lost."""
    walk.kernel(walk.compute, 3)
    with pytest.raises(DeviceLost, match=r"cuMemUnmap.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        walk.arena.shrink([1], lambda slot: True)
    assert walk.fake.report.startswith("pending work: unmap meets a kernel")
    assert walk.arena.is_mapped(3)


def test_a_forgotten_reader_is_caught(walk: Walk) -> None:
    """A granule is unmapped after the event of one reader stream, while another one still reads."""
    walk.kernel(walk.compute, 3)
    walk.demote(3, 0)
    of_compute = walk.after(walk.compute)
    walk.arena.retire([1], lambda slot: True, [of_compute])
    settle(walk, of_compute)
    with pytest.raises(DeviceLost):
        walk.arena.collect(walk.streams.is_done)
    assert "unmap meets a batch of copies" in walk.fake.report


def test_memory_that_is_read_does_not_go_to_sleep(walk: Walk) -> None:
    """Sleeping gives memory back under a reader."""
    walk.kernel(walk.compute, 7)
    with pytest.raises(DeviceLost):
        walk.arena.sleep()
    assert "pending work" in walk.fake.report


def test_unpinning_under_a_copy_is_caught(walk: Walk) -> None:
    """The host slab goes while the device writes to it."""
    walk.demote(1, 0)
    with pytest.raises(DeviceLost, match="cuMemHostUnregister"):
        walk.driver.unregister(int(walk.slab.ctypes.data))
    assert "unpinning" in walk.fake.report


def test_pieces_of_a_batch_must_not_overlap(walk: Walk) -> None:
    """Two blocks of a batch share a slot: which one stays is left to chance."""
    with pytest.raises(DeviceLost):
        walk.streams.copy(
            pieces(walk.slot(1), walk.slot(1) + 8), pieces(walk.host(0), walk.host(1)), pieces(16, 16), walk.up
        )
    assert "unordered overlap" in walk.fake.report


@pytest.mark.parametrize("settled", [False, True])
def test_sources_that_are_not_settled_are_caught(walk: Walk, settled: bool) -> None:
    """A source that an earlier copy of the same stream still writes is read ahead of it."""
    up, start = walk.up, walk.slot(1)
    walk.streams.copy(pieces(walk.host(0)), pieces(start), pieces(SLOT_BYTES), up)
    try:
        walk.streams.copy(pieces(walk.slot(4)), pieces(walk.host(0)), pieces(SLOT_BYTES), up, settled=settled)
    except DeviceLost:
        assert settled
    else:
        assert not settled
    assert ("unordered overlap" in walk.fake.report) == settled


def test_our_streams_are_independent_of_the_default_stream(walk: Walk) -> None:
    """Every copy waits for whatever the engine does on the default stream, and the engine for it."""
    assert walk.kernel(Stream(0), 1, writes=True) == 0
    assert walk.kernel(walk.down, 1) == LAUNCH_FAILED


def test_aliases_are_the_same_memory(walk: Walk) -> None:
    """A shared prefix is overwritten through one sequence's range while another one is read."""
    handle = walk.driver.create(GRANULE_BYTES)
    ranges = [walk.driver.reserve(GRANULE_BYTES) for _ in range(2)]
    for addresses in ranges:
        walk.driver.map(addresses, 0, handle)
        walk.driver.set_access(addresses, 0, GRANULE_BYTES, write=True)
    first, second = (addresses.address for addresses in ranges)
    assert walk.fake.kernel(walk.compute.key, first, 64, writes=False) == 0
    assert walk.fake.kernel(walk.up.key, second + 64, 64, writes=True) == 0
    assert walk.fake.kernel(walk.up.key, second + 63, 1, writes=True) == LAUNCH_FAILED
