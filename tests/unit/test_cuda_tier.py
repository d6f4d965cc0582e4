"""The tier on a device: copies, fences, pinning and size, on the fake libcuda, which knows what may overlap."""

import mmap
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.allocator.streams import Event
from kvtier.errors import ConfigError, DeviceLost, InvariantError, UsageError
from kvtier.testing.tiers import payload_of
from kvtier.tiers.cuda import ALIGNMENT_BYTES, CudaTier
from kvtier.tiers.fences import event_key
from kvtier.types import PAGE_BYTES, EvictItem, Outcome, ReadItem, Remap, Status, WriteBatch, WriteItem, store_key
from tests.fakecuda.fake import CAPACITY_GRANULES, GRANULE_BYTES, FakeCuda, fake_cuda

__all__ = ["fake_cuda"]
LENGTH = 10_000
STRIDE = 10_240
KEY = store_key(0, bytes(16) + bytes(4))


@pytest.fixture
def tier(fake_cuda: FakeCuda) -> Iterator[CudaTier]:
    tier = CudaTier.create(
        name="gpu",
        device=0,
        capacity_bytes=4 * GRANULE_BYTES,
        capacity_max_bytes=8 * GRANULE_BYTES,
        length_bytes_max=LENGTH,
    )
    yield tier
    tier.close()


def host_slot(payload: bytes = b"") -> memoryview:
    view = memoryview(mmap.mmap(-1, 3 * PAGE_BYTES))
    view[: len(payload)] = payload
    return view


def write(tier: CudaTier, place: int, payload: bytes) -> None:
    [outcome] = tier.write(WriteBatch([WriteItem(KEY, len(payload), host_slot(payload), place)]))
    assert (outcome.status, outcome.place) == (Status.DONE, place)


def read(tier: CudaTier, place: int, length_bytes: int) -> bytes:
    into = host_slot(b"\xff" * 3 * PAGE_BYTES)
    [outcome] = tier.read([ReadItem(KEY, place, 0, length_bytes, into)])
    assert outcome.status is Status.DONE
    assert not any(into[length_bytes:]), "what lies behind the block is another's"
    return bytes(into[:length_bytes])


# ---------------------------------------------------------------- bytes


def test_blocks_come_back_as_they_were(tier: CudaTier) -> None:
    """A block is copied to another slot, too far, or not as a whole."""
    payloads = {
        place: payload_of(place, LENGTH - place) for place in range(1, tier.traits.capacity_bytes // STRIDE + 1)
    }
    places = list(payloads)
    random.Random(1).shuffle(places)
    items = [WriteItem(KEY, len(payloads[p]), host_slot(payloads[p]), p) for p in places]
    evicted = EvictItem(KEY, 1, 0)
    outcomes = tier.write(WriteBatch(items, [evicted], {b"a": b"b"}))
    assert [o.place for o in outcomes[: len(items)]] == places
    assert [o.status for o in outcomes] == [Status.DONE] * (len(items) + 2)
    for place in reversed(places):
        assert read(tier, place, len(payloads[place])) == payloads[place]


def test_slots_are_as_wide_as_a_warps_loads_want_and_straddle_pages(tier: CudaTier) -> None:
    """A slot begins where no kernel reads it at full speed, or memory is wasted at every page's end."""
    assert tier.stride_bytes == STRIDE
    assert STRIDE % ALIGNMENT_BYTES == 0
    assert tier.traits.capacity_bytes == (4 * GRANULE_BYTES // STRIDE - 1) * STRIDE
    assert GRANULE_BYTES % STRIDE
    assert tier.check() == []


def test_a_place_that_holds_no_block_is_a_bug_and_copies_nothing(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """A stray place overwrites the null block, or memory that was given back."""
    write(tier, 1, b"x" * LENGTH)
    for place in (0, 4 * GRANULE_BYTES // STRIDE, 10**6):
        with pytest.raises(InvariantError, match="holds blocks"):
            tier.write(WriteBatch([WriteItem(KEY, 5, host_slot(), 1), WriteItem(KEY, 5, host_slot(), place)]))
        with pytest.raises(InvariantError, match="holds blocks"):
            tier.read([ReadItem(KEY, place, 0, 5, host_slot())])
    with pytest.raises(InvariantError, match="in a slot of"):
        tier.write(WriteBatch([WriteItem(KEY, STRIDE + 1, host_slot(), 1)]))
    assert read(tier, 1, LENGTH) == b"x" * LENGTH


def test_a_batch_is_one_call_of_the_driver(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """Small blocks are copied at the speed of calls."""
    items = [WriteItem(KEY, 512, host_slot(b"y" * 512), place) for place in range(1, 9)]
    tier.write(WriteBatch(items))
    tier.read([ReadItem(KEY, place, 0, 512, host_slot()) for place in range(1, 9)])
    assert fake_cuda.calls("cuMemcpyBatchAsync") == 2
    assert fake_cuda.calls("cuMemcpyAsync") == 0


def test_views_are_of_the_memory_that_is_copied(tier: CudaTier) -> None:
    """A model reads other memory than the cache fills."""
    pytest.importorskip("cupy")
    array = tier.array()
    assert (array.shape, array.data.ptr % ALIGNMENT_BYTES) == ((8 * GRANULE_BYTES // STRIDE, STRIDE), 0)
    assert array[3].data.ptr == tier._arena.address + 3 * STRIDE


# ---------------------------------------------------------------- fences


def test_a_fence_passes_when_the_work_of_that_moment_is_over(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """A slot is copied down while a kernel still writes it."""
    streams = tier._cuda.streams
    stream, event = streams.make_stream(), streams.make_event()
    fake_cuda.hold(stream.key)
    assert fake_cuda.kernel(stream.key, tier._arena.address + STRIDE, LENGTH, writes=True) == 0
    streams.record(event, stream)
    fence = tier.fence(event)
    assert not streams.is_done(fence)
    fake_cuda.go_on(stream.key)
    tier.passed(fence)
    assert read(tier, 1, LENGTH) == bytes(LENGTH)
    assert fake_cuda.report == ""
    streams.drop_stream(stream)


def test_without_the_fence_the_overlap_is_found(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """The fake, on which the other tests rest, lets everything pass."""
    streams = tier._cuda.streams
    stream = streams.make_stream()
    fake_cuda.hold(stream.key)
    assert fake_cuda.kernel(stream.key, tier._arena.address + STRIDE, LENGTH, writes=True) == 0
    with pytest.raises(DeviceLost):
        read(tier, 1, LENGTH)
    assert fake_cuda.report
    fake_cuda.go_on(stream.key)


def test_an_event_may_be_recorded_again_once_it_was_given(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """Engines use one event again and again: a fence that waited for its later use would never pass."""
    streams = tier._cuda.streams
    stream, event = streams.make_stream(), streams.make_event()
    streams.record(event, stream)
    fence = tier.fence(event)
    streams.finish(stream)
    fake_cuda.hold(stream.key)
    assert fake_cuda.kernel(stream.key, tier._arena.address + STRIDE, LENGTH, writes=True) == 0
    streams.record(event, stream)
    tier.passed(fence)
    fake_cuda.go_on(stream.key)
    streams.finish(stream)
    streams.drop_stream(stream)


class TorchEvent:
    cuda_event = 1234


class CupyEvent:
    ptr = 1234


class BindingsEvent:
    def __int__(self) -> int:
        return 1234


def test_events_of_others_are_known() -> None:
    """A user has to unpack an event by hand."""
    for event in (TorchEvent(), CupyEvent(), BindingsEvent(), Event(1234), np.int64(1234)):
        assert event_key(event) == 1234


class Unrecorded:
    cuda_event = 0  # torch makes the event when it is recorded first


@pytest.mark.parametrize(
    "after", [None, "event", True, 1.5, object(), b"1", Unrecorded(), 0], ids=lambda after: type(after).__name__
)
def test_what_is_no_event_is_refused(tier: CudaTier, after: object) -> None:
    """A slot is taken away under a running kernel for want of an argument, or any number is followed as a pointer."""
    with pytest.raises(UsageError, match="pass the event that you have recorded"):
        tier.fence(after)


# ---------------------------------------------------------------- size


def test_where_the_device_has_too_little_the_tier_is_smaller_and_says_so(fake_cuda: FakeCuda) -> None:
    """An engine does not start because somebody else took a page of the device."""
    tier = CudaTier.create(
        name="gpu", device=0, capacity_bytes=2 * CAPACITY_GRANULES * GRANULE_BYTES, length_bytes_max=LENGTH
    )
    assert tier.traits.capacity_bytes == (CAPACITY_GRANULES * GRANULE_BYTES // STRIDE - 1) * STRIDE
    assert "1048576 bytes left for it, of" in tier.notes[0]
    tier.close()


@pytest.mark.parametrize(
    ("capacity_bytes", "text"),
    [(GRANULE_BYTES - 1, r"gpu\.capacity: 65535 bytes hold 0 slots"), (1, "hold 0 slots")],
)
def test_a_capacity_without_room_for_a_block_is_refused(fake_cuda: FakeCuda, capacity_bytes: int, text: str) -> None:
    """A tier without a slot starts."""
    with pytest.raises(ConfigError, match=text):
        CudaTier.create(name="gpu", device=0, capacity_bytes=capacity_bytes, length_bytes_max=LENGTH)


def test_a_device_without_memory_is_refused(fake_cuda: FakeCuda) -> None:
    """The error speaks of slots where somebody else holds the device."""
    fake_cuda.fault("cuMemCreate", 2, nth=0)
    with pytest.raises(ConfigError, match="the 0 bytes left hold 0 slots") as caught:
        CudaTier.create(name="gpu", device=0, capacity_bytes=4 * GRANULE_BYTES, length_bytes_max=LENGTH)
    assert "End what else uses the device" in caught.value.remedy


def test_a_device_that_is_not_there_is_refused_by_its_place(fake_cuda: FakeCuda) -> None:
    """`cuda:7` on a machine with one device ends in a traceback."""
    with pytest.raises(ConfigError, match=r"gpu\.device: device 7"):
        CudaTier.create(name="gpu", device=7, capacity_bytes=4 * GRANULE_BYTES, length_bytes_max=LENGTH)


def test_it_grows_and_shrinks_without_moving(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """A kernel's pointer is wrong after a resize, or memory is kept that was to be given back."""
    address = tier._arena.address
    write(tier, 3, b"z" * LENGTH)
    assert tier.remap(Remap((4, 5), (), frozenset())).status is Status.DONE
    assert fake_cuda.used_bytes == 6 * GRANULE_BYTES
    last = 6 * GRANULE_BYTES // STRIDE - 1
    write(tier, last, b"w" * LENGTH)
    assert read(tier, last, LENGTH) == b"w" * LENGTH
    unused = frozenset(range(3 * GRANULE_BYTES // STRIDE, 64))
    assert tier.remap(Remap((), (3, 4, 5), unused)).status is Status.DONE
    assert fake_cuda.used_bytes == 3 * GRANULE_BYTES
    assert (tier._arena.address, read(tier, 3, LENGTH)) == (address, b"z" * LENGTH)


def test_growing_beyond_the_device_is_no_room(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """An engine that asks for more than there is loses what it has."""
    fake_cuda.fault("cuMemCreate", 2, nth=2)
    assert tier.remap(Remap((4, 5), (), frozenset())).status is Status.NO_ROOM
    assert len(tier.granules_mapped) == 4
    assert tier.check() == []


def test_memory_is_made_before_it_is_mapped(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """Mapping has to wait for memory to be made after all, or what was made for nothing is kept."""
    assert tier.remap(Remap(ready=3)) == Outcome(Status.DONE, 3)
    assert (fake_cuda.used_bytes, len(tier.granules_mapped)) == (7 * GRANULE_BYTES, 4)
    made = fake_cuda.calls("cuMemCreate")
    assert tier.remap(Remap((4, 5))) == Outcome(Status.DONE, 0)
    assert fake_cuda.calls("cuMemCreate") == made
    assert fake_cuda.used_bytes == 6 * GRANULE_BYTES
    fake_cuda.fault("cuMemCreate", 2, nth=2)
    assert tier.remap(Remap(ready=2)) == Outcome(Status.DONE, 1)
    assert tier.remap(Remap()) == Outcome(Status.DONE, 0)
    assert fake_cuda.used_bytes == 6 * GRANULE_BYTES


def test_all_of_it_goes_and_comes_back_without_moving(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """A sleeping tier keeps memory on the device, or wakes with the content of somebody else."""
    address = tier._arena.address
    write(tier, 1, b"z" * LENGTH)
    assert tier.remap(Remap(sleep=True)).status is Status.DONE
    assert (fake_cuda.used_bytes, tier.traits.capacity_bytes) == (0, 0)
    assert tier.remap(Remap((0, 1))).status is Status.DONE
    assert tier.remap(Remap((2, 3, 4))).status is Status.DONE
    assert (fake_cuda.used_bytes, tier._arena.address) == (5 * GRANULE_BYTES, address)
    assert read(tier, 1, LENGTH) == bytes(LENGTH)
    assert tier.check() == []


def test_at_the_start_mapping_may_run_out_of_memory_too(fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """There is memory, but not for its mapping, and the engine does not start."""
    fake_cuda.fault("cuMemMap", 2, nth=4)
    tier = CudaTier.create(name="gpu7", device=0, capacity_bytes=8 * GRANULE_BYTES, length_bytes_max=LENGTH)
    assert len(tier.granules_mapped) == 4
    assert fake_cuda.used_bytes == 4 * GRANULE_BYTES
    assert tier.notes == (f"capacity: there are {4 * GRANULE_BYTES} bytes left for it, of {8 * GRANULE_BYTES}",)
    assert tier.notes[0] in caplog.text
    tier.close()


# ---------------------------------------------------------------- host memory, and the end


def test_host_memory_is_registered_until_it_is_let_go(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """Copies run at a fraction of the link's speed, or memory is unmapped under the device."""
    memory = np.zeros(4 * PAGE_BYTES, np.uint8)
    address = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    tier.pin(address, 2 * PAGE_BYTES)
    assert fake_cuda.calls("cuMemHostRegister_v2") + fake_cuda.calls("cuMemHostRegister") == 1
    tier.unpin()
    tier.unpin()
    assert fake_cuda.calls("cuMemHostUnregister") == 1


def test_a_lost_device_says_so_and_can_be_closed(tier: CudaTier, fake_cuda: FakeCuda) -> None:
    """After a kernel that went astray the tier's copies fail as if a disk had, or closing it raises."""
    fake_cuda.lose()
    with pytest.raises(DeviceLost):
        write(tier, 1, b"x")
    with pytest.raises(DeviceLost):
        read(tier, 1, 1)
    tier.close()
