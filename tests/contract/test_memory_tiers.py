"""What gpu and host tiers promise beyond the tier contract: places, padding, sizes, and being refused."""

import errno
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.allocator import host_memory
from kvtier.allocator.driver_memfd import MemfdDriver
from kvtier.errors import ClosedError, ConfigError, DriverError, InvariantError, OutOfMemory
from kvtier.testing.fork import in_child, refusals
from kvtier.testing.tiers import SlotTierContract
from kvtier.tiers.base import SupportsArray, SupportsSlots
from kvtier.tiers.gpu import GpuTier, capacity_min, granule_for
from kvtier.tiers.host import HostTier
from kvtier.tiers.slots import joined
from kvtier.types import EvictItem, Outcome, ReadItem, Remap, Status, StoreKey, WriteBatch, WriteItem

PAGE = 4096
KEY = StoreKey(b"k")
MemoryTier = GpuTier | HostTier
Make = Callable[[int, int], MemoryTier]


def make_gpu(capacity_bytes: int, length_bytes_max: int) -> GpuTier:
    return GpuTier.create(name="t", capacity_bytes=capacity_bytes, length_bytes_max=length_bytes_max)


def make_host(capacity_bytes: int, length_bytes_max: int) -> HostTier:
    return HostTier.create(name="t", capacity_bytes=capacity_bytes, length_bytes_max=length_bytes_max, hugepages="off")


@pytest.fixture(params=[make_gpu, make_host], ids=["gpu", "host"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
def tier(make: Make) -> Iterator[MemoryTier]:
    """Eight slots of two pages, for blocks of up to 5000 bytes."""
    tier = make(8 * 2 * PAGE, 5000)
    yield tier
    tier.close()


class TestGpuTier(SlotTierContract):
    """On host memory, with slots that straddle granules: five pages each, on granules of two."""

    @pytest.fixture
    def tier(self) -> Iterator[GpuTier]:
        tier = make_gpu(140 * PAGE, self.length_bytes_max)
        yield tier
        assert tier.traits.slots == 28
        tier.close()


class TestHostTier(SlotTierContract):
    @pytest.fixture
    def tier(self) -> Iterator[HostTier]:
        tier = make_host(140 * PAGE, self.length_bytes_max)
        yield tier
        tier.close()


def put(tier: MemoryTier, place: int, payload: bytes) -> Outcome:
    source = memoryview(payload + b"\xee" * (tier.stride_bytes - len(payload)))  # not even the padding is clean
    return tier.write(WriteBatch([WriteItem(KEY, len(payload), source, place)]))[0]


def get(tier: MemoryTier, place: int, length_bytes: int) -> bytes:
    into = bytearray(b"\xdd" * tier.stride_bytes)
    assert tier.read([ReadItem(KEY, place, 0, length_bytes, memoryview(into))])[0].done
    return bytes(into)


def test_it_is_what_the_engine_asks_for(tier: MemoryTier) -> None:
    """The engine takes the tier for a disk, or finds no slots in it."""
    assert isinstance(tier, SupportsSlots)
    assert isinstance(tier, SupportsArray) == isinstance(tier, GpuTier)
    assert (tier.traits.slots, tier.stride_bytes) == (8, 2 * PAGE)
    assert tier.traits.capacity_bytes == (7 if isinstance(tier, GpuTier) else 8) * 2 * PAGE
    assert tier.traits.host_addressable
    assert not tier.traits.persistent


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 7), st.binary(max_size=2 * PAGE)), max_size=6, unique_by=lambda item: item[0]))
def test_a_batch_lands_where_it_was_told(tier: MemoryTier, blocks: list[tuple[int, bytes]]) -> None:
    """A block lands in another slot, or what was there before shows behind its payload."""
    before = {slot: bytes(tier.slot(slot)) for slot in range(8)}
    items = [
        WriteItem(KEY, len(payload), memoryview(payload.ljust(2 * PAGE, b"\xee")), place) for place, payload in blocks
    ]
    assert tier.write(WriteBatch(items)) == [Outcome(Status.DONE, place) for place, _ in blocks]
    for place, payload in blocks:
        before[place] = payload.ljust(2 * PAGE, b"\0")
        assert get(tier, place, len(payload)) == before[place]
    assert {slot: bytes(tier.slot(slot)) for slot in range(8)} == before


def test_neighbours_are_moved_together(make: Make) -> None:
    """Joined copies shift or lose a block where a run of slots ends."""
    source, target = make(16 * PAGE, PAGE), make(16 * PAGE, PAGE)
    for slot in range(16):
        source.slot(slot)[:] = bytes([slot]) * PAGE
    pairs = [(3, 1), (4, 2), (5, 3), (6, 8), (7, 9), (2, 10), (1, 11), (15, 15)]
    target.write(WriteBatch([WriteItem(KEY, PAGE, source.slot(a), b) for a, b in pairs]))
    moved = {b: a for a, b in pairs}
    assert [target.slot(slot)[0] for slot in range(16)] == [moved.get(slot, 0) for slot in range(16)]
    back = memoryview(bytearray(16 * PAGE))
    target.read([ReadItem(KEY, b, 0, PAGE, back[a * PAGE : (a + 1) * PAGE]) for a, b in pairs])
    assert [back[slot * PAGE] for slot in range(16)] == [slot if slot in moved.values() else 0 for slot in range(16)]
    source.close()
    target.close()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4)), max_size=8))
def test_joining_changes_no_byte(pieces: list[tuple[int, int, int]]) -> None:
    """A joined move covers other bytes than its pieces, or a pair that abuts is left apart."""
    together = list(joined(pieces))

    def moves(of: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(target + at, source + at) for target, source, length in of for at in range(length)]

    assert moves(together) == moves(pieces)
    for (target, source, length), following in pairwise(together):
        assert following[:2] != (target + length, source + length)


def test_evictions_need_no_work(tier: MemoryTier) -> None:
    """The executor gets fewer outcomes than it gave items, or an eviction wipes a newer occupant."""
    put(tier, 2, b"newer")
    batch = WriteBatch([WriteItem(KEY, 1, memoryview(b"x"), 3)], [EvictItem(KEY, 2, 0), EvictItem(KEY, 9, 0)])
    assert [outcome.status for outcome in tier.write(batch)] == [Status.DONE] * 3
    assert get(tier, 2, 5)[:5] == b"newer"


def test_a_wrong_item_stops_the_batch_before_it_begins(tier: MemoryTier) -> None:
    """Memory outside of the slots is overwritten."""
    put(tier, 1, b"old")
    good = WriteItem(KEY, 3, memoryview(b"new"), 1)
    null_slots = [0] if isinstance(tier, GpuTier) else []
    whole = memoryview(bytes(3 * PAGE))
    wrong_writes = [WriteItem(KEY, 8, whole, place) for place in (-1, 8, *null_slots)]
    wrong_writes += [
        WriteItem(KEY, 2 * PAGE + 1, whole, 2),
        WriteItem(KEY, 4, whole[:3], 2),
        WriteItem(KEY, -1, whole, 2),
    ]
    for wrong in wrong_writes:
        with pytest.raises(InvariantError, match="tier t"):
            tier.write(WriteBatch([good, wrong]))
        into = memoryview(bytearray(wrong.source))
        with pytest.raises(InvariantError, match="tier t"):
            tier.read([ReadItem(KEY, wrong.place, 0, wrong.length_bytes, into)])
    assert get(tier, 1, 3)[:3] == b"old"
    for index in (-1, 8):
        with pytest.raises(IndexError):
            tier.slot(index)


def test_nothing_moves_after_close(tier: MemoryTier) -> None:
    """A late worker kills the process, or writes into memory that is somebody else's by now."""
    view = tier.slot(3)
    tier.close()
    tier.close()
    calls: list[Callable[[], Any]] = [
        lambda: put(tier, 1, b"x"),
        lambda: get(tier, 1, 1),
        lambda: tier.slot(1),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    view[:] = bytes(len(view))  # somebody still looks: no harm


def test_a_forked_child_is_refused(tier: MemoryTier) -> None:
    """A child moves blocks in its parent's memory, or takes the memory away when it ends."""
    put(tier, 1, b"parent")

    def child() -> int:
        refused = refusals([lambda: put(tier, 1, b"child!"), lambda: get(tier, 1, 1), lambda: tier.slot(1)])
        tier.close()
        return refused

    assert in_child(child) == 3
    assert get(tier, 1, 6)[:6] == b"parent"


@pytest.mark.parametrize("length_bytes_max", [1, PAGE, 737_280, 5 << 20])
def test_the_smallest_capacity_is_named_and_works(make: Make, length_bytes_max: int) -> None:
    """The remedy in the message does not remedy."""
    with pytest.raises(ConfigError) as caught:
        make(length_bytes_max // 2, length_bytes_max)
    assert caught.value.path == "t.capacity"
    smallest = int(caught.value.remedy.split()[-1])
    with pytest.raises(ConfigError, match=f"Use at least {smallest}"):
        make(smallest - 1, length_bytes_max)
    tier = make(smallest, length_bytes_max)
    assert tier.traits.slots == 2
    tier.close()


@given(st.integers(1, 1 << 30))
def test_granules_waste_little(capacity_bytes: int) -> None:
    """Rounding to granules takes more than the capacity, or a good part of it."""
    granule_bytes = granule_for(capacity_bytes)
    assert granule_bytes % PAGE == 0
    if capacity_bytes >= 64 * PAGE:
        assert capacity_bytes % granule_bytes <= capacity_bytes / 64
    smallest = capacity_min(capacity_bytes // PAGE * PAGE + PAGE)
    assert smallest % granule_for(smallest) == 0


def test_the_null_block_is_zero_and_the_array_is_the_slots() -> None:
    """Padding tokens attend to garbage, or kernels read other memory than the copies wrote."""
    tier = make_gpu(8 * PAGE, PAGE)
    array = tier.array()
    assert array.shape == (8, PAGE)
    assert not array.any()
    put(tier, 5, b"\7" * PAGE)
    assert (array[5] == 7).all()
    array[6] = 9
    assert get(tier, 6, PAGE) == b"\x09" * PAGE
    assert not array[0].any()
    assert tier.check() == []
    tier.close()


def test_memory_that_is_not_there_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills the process at start."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100 * PAGE)
    with pytest.raises(ConfigError, match=r"t\.capacity: 524288 bytes exceed the 409600 bytes of RAM"):
        make(128 * PAGE, PAGE)


def test_a_system_that_gives_less_makes_the_tier_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine does not start because the limit of its container is a little lower than its configuration."""
    allocate, calls = host_memory.allocate, iter(range(100))

    def limited(fd: int, offset_bytes: int, length_bytes: int) -> None:
        if next(calls) == 5:
            raise DriverError("fallocate", errno.ENOSPC, "no space left")
        allocate(fd, offset_bytes, length_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "allocate", limited)
        tier = GpuTier.create(name="t", capacity_bytes=8 * PAGE, length_bytes_max=PAGE)
    assert tier.traits.capacity_bytes == 4 * PAGE
    assert tier.notes == (f"capacity: there are {5 * PAGE} bytes left for it, of {8 * PAGE}",)
    assert tier.check() == []
    assert tier.remap(Remap(map=(5, 6, 7))).done, "there is memory again"
    assert tier.traits.capacity_bytes == 7 * PAGE
    tier.close()


def test_a_failed_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses ends in a traceback, or its memory stays taken."""
    closed: list[MemfdDriver] = []
    close = MemfdDriver.close

    def create(self: MemfdDriver, length_bytes: int) -> None:
        raise OutOfMemory("create: no more")

    monkeypatch.setattr(MemfdDriver, "create", create)
    monkeypatch.setattr(MemfdDriver, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(ConfigError, match=r"t\.capacity: the 0 bytes left hold 0 slots"):
        make_gpu(8 * PAGE, PAGE)
    assert len(closed) == 1


def test_the_host_tiers_memory_can_be_passed_on() -> None:
    """Another process maps the descriptor and sees other bytes."""
    tier = make_host(4 * PAGE, PAGE)
    put(tier, 2, b"shared")
    assert os.pread(tier.fd, 6, 2 * PAGE) == b"shared"
    assert tier.notes == ["pin: no device that the memory would have to be registered with"]
    tier.close()
