"""Sequence views on a device: the fake libcuda tells when something is unmapped, or given away, that is being read."""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import notices
from kvtier.allocator.streams import Event
from kvtier.cache.leases import Lease
from kvtier.errors import ClosedError, ConfigError, DeviceLost, UsageError
from kvtier.testing.drivers import peek, poke
from tests.fakecuda.fake import CAPACITY_GRANULES, GRANULE_BYTES, FakeCuda, fake_cuda

__all__ = ["fake_cuda"]
pytestmark = pytest.mark.timeout(60)
BLOCK_TOKENS = 128  # of 512 bytes: a block is a granule


def device_config(block_tokens: int = BLOCK_TOKENS) -> Any:
    """7 usable slots on the device."""
    model = {"name": "tiny", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    model |= {"block_tokens": block_tokens, "layout": "token_major"}
    gpu = {"type": "gpu", "device": "cuda", "capacity": 8 * GRANULE_BYTES, "sequence_views": True}
    host = {"type": "host", "capacity": "1MiB", "pin": "off", "hugepages": "off"}
    return kvtier.load_config({"model": model, "tiers": [gpu, host]})


class Reader:
    """Somebody's kernels, which read through views and write in slots, on a stream of their own."""

    def __init__(self, cache: Any, fake: FakeCuda) -> None:
        self.cache, self.fake, self.tier = cache, fake, cache.top_tier
        self.driver = self.tier._driver
        self.streams = self.driver.streams
        self.stream = self.streams.make_stream()

    def lease(self, number: int, blocks: int, shared: int = 0, owner: str = "req") -> Lease:
        self.keys = self.keys_of(number, blocks, shared)
        lease = self.cache.reserve(self.cache.match(self.keys, owner), blocks)
        assert isinstance(lease, Lease)
        return lease

    def keys_of(self, number: int, blocks: int, shared: int = 0) -> Any:
        own = [number * 1000 + i for i in range((blocks - shared) * BLOCK_TOKENS)]
        return kvtier.hash_blocks([*range(shared * BLOCK_TOKENS), *own], self.cache.config.model)

    def address(self, slot: int) -> int:
        return int(self.tier._arena.address) + slot * GRANULE_BYTES

    def fill(self, lease: Lease, first: int = 0) -> None:
        """A kernel for each slot, which fills it with its number."""
        for slot in lease.slots()[first:]:
            poke(self.driver, self.address(slot), slot, GRANULE_BYTES)
            assert self.fake.kernel(self.stream.key, self.address(slot), GRANULE_BYTES, writes=True) == 0

    def read(self, view: Any) -> None:
        """A kernel of attention over all of a view."""
        assert self.fake.kernel(self.stream.key, view.address, view.blocks * GRANULE_BYTES, writes=False) == 0

    def seen(self, view: Any) -> list[int]:
        self.streams.finish(self.stream)
        held = peek(self.driver, view.address, view.blocks * GRANULE_BYTES).reshape(view.blocks, -1)
        assert (held == held[:, :1]).all()
        return [int(number) for number in held[:, 0]]

    def event(self) -> Event:
        event: Event = self.streams.make_event()
        self.streams.record(event, self.stream)
        return event

    def settle(self) -> None:
        """Wait until all fences made so far have passed."""
        passed = kvtier.engine.oneshot.OneShot[None]()
        self.cache._engine.once_passed(None, lambda core, now_s: passed.send(None))
        passed.receive(30)

    @property
    def blocks_shown(self) -> int:
        return int(self.tier.sequences._ranges.blocks_shown)

    @property
    def slots_free(self) -> int:
        return int(self.cache.stats()["tiers"]["gpu"]["slots_free"])


@pytest.fixture(params=["plain", "strict"])
def reader(request: pytest.FixtureRequest, fake_cuda: FakeCuda) -> Iterator[Reader]:
    """Afterwards nothing overlapped, and the books agree."""
    fake_cuda.configure(CAPACITY_GRANULES * GRANULE_BYTES, GRANULE_BYTES, strict=request.param == "strict")
    cache = kvtier.open_sync(device_config())
    reader = Reader(cache, fake_cuda)
    yield reader
    fake_cuda.go_on()
    if not cache._engine.closed:
        reader.settle()
        assert [*cache.check(), *cache.top_tier.check()] == []
        cache.close(flush_s=0)
    assert fake_cuda.report == ""


def test_sequences_on_a_device_share_a_prefix(reader: Reader) -> None:
    """A view shows other blocks than its lease has, or a copy of them."""
    first = reader.lease(1, 3, shared=2)
    reader.fill(first)
    pairs = list(zip(first.slots(), reader.keys.groups[0], strict=True))
    reader.cache.commit(first, pairs, after=reader.event())
    reader.settle()
    second = reader.lease(2, 4, shared=2)
    assert second.slots()[:2] == first.slots()[:2]
    used_bytes = reader.driver.used_bytes
    views = [reader.cache.sequence_view(lease) for lease in (first, second)]
    reader.fill(second, first=2)  # written after the view was made
    for view, lease in zip(views, (first, second), strict=True):
        reader.read(view)
        assert view.tokens == view.blocks * BLOCK_TOKENS
        assert reader.seen(view) == [*lease.slots()]
    assert reader.driver.used_bytes == used_bytes
    for lease in (first, second):
        reader.cache.release(lease, after=reader.event())
    reader.settle()
    assert (reader.blocks_shown, reader.slots_free) == (0, 4)  # three were committed, and are kept


def test_a_release_unmaps_behind_the_kernel_that_reads(reader: Reader) -> None:
    """A kernel reads unmapped memory, which costs everybody the context; or the slots are somebody else's already."""
    lease = reader.lease(1, 3)
    view = reader.cache.sequence_view(lease)
    unmapped = reader.fake.calls("cuMemUnmap")
    reader.fake.hold(reader.stream.key)
    reader.read(view)
    reader.cache.release(lease, after=reader.event())
    assert (reader.fake.calls("cuMemUnmap"), reader.blocks_shown, reader.slots_free) == (unmapped, 3, 4)
    with pytest.raises(UsageError, match="has ended"):
        view.kv(0)
    with pytest.raises(UsageError, match="is being released"):
        reader.cache.sequence_view(lease)
    reader.fake.go_on(reader.stream.key)
    reader.settle()
    assert (reader.fake.calls("cuMemUnmap"), reader.blocks_shown, reader.slots_free) == (unmapped + 1, 0, 7)
    assert reader.cache._sequences._leaving == set()


def test_slots_are_free_only_when_the_view_is_unmapped(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment a view shows what the next request writes."""
    lease = reader.lease(1, 3)
    reader.cache.sequence_view(lease)
    hide, free = reader.tier.sequences.hide, []

    def counted(shown: Any) -> None:
        hide(shown)
        free.append(reader.slots_free)

    monkeypatch.setattr(reader.tier.sequences, "hide", counted)
    reader.cache.release(lease, after=reader.event())
    reader.settle()
    assert (free, reader.slots_free) == ([4], 7)


def test_a_view_can_end_before_its_lease(reader: Reader) -> None:
    """Closing a view pulls memory from under a kernel, needs no event on a device, or ends the lease."""
    lease = reader.lease(1, 3)
    reader.fill(lease)
    view, other = reader.cache.sequence_view(lease), reader.cache.sequence_view(lease)
    with pytest.raises(UsageError, match="`after` is needed"):
        view.close()
    reader.fake.hold(reader.stream.key)
    reader.read(view)
    view.close(after=reader.event())
    view.close()
    assert reader.blocks_shown == 6
    with pytest.raises(UsageError, match="has ended"):
        view.kv(0)
    reader.fake.go_on(reader.stream.key)
    reader.settle()
    assert reader.blocks_shown == 3
    assert reader.seen(other) == [*lease.slots()]
    reader.fake.hold(reader.stream.key)
    reader.read(other)
    other.close(after=reader.event())
    reader.cache.release(lease, after=reader.event())  # both wait for the same kernel
    reader.fake.go_on(reader.stream.key)
    reader.settle()
    assert (reader.blocks_shown, reader.slots_free) == (0, 7)


def test_the_views_of_a_dead_owner_wait_for_all_work(reader: Reader) -> None:
    """Whoever buries a request kills the context of all others, since a kernel of it still reads."""
    view = reader.cache.sequence_view(reader.lease(1, 3, owner="dead"))
    kept = reader.cache.sequence_view(reader.lease(2, 2, owner="alive"))
    reader.fake.hold(reader.stream.key)
    reader.read(view)
    assert reader.cache.release_owner("dead") == 1
    assert (reader.blocks_shown, reader.slots_free) == (5, 5)
    with pytest.raises(UsageError, match="has ended"):
        view.kv(0)
    reader.fake.go_on(reader.stream.key)
    reader.settle()
    assert reader.blocks_shown == 2
    reader.read(kept)
    kept.close(after=reader.event())


def test_a_resize_leaves_what_a_view_shows(reader: Reader) -> None:
    """A shrink takes memory from under a view."""
    idle = reader.lease(9, 4, owner="idle")
    lease = reader.lease(1, 2)
    reader.fill(lease)
    view = reader.cache.sequence_view(lease)
    reader.cache.release(idle, after=reader.event())
    reader.settle()
    assert reader.cache.resize("gpu", 2 * GRANULE_BYTES) == 3 * GRANULE_BYTES
    reader.read(view)
    assert reader.seen(view) == [*lease.slots()]
    reader.cache.release(lease, after=reader.event())
    reader.settle()
    assert reader.cache.resize("gpu", 2 * GRANULE_BYTES) == 2 * GRANULE_BYTES == reader.fake.used_bytes


@pytest.mark.parametrize("planted", ["at once", "not behind the kernel"])
def test_an_early_unmap_is_found(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """These tests prove nothing: unmapping under a kernel goes unnoticed."""
    cache = kvtier.open_sync(device_config())
    reader = Reader(cache, fake_cuda)
    lease = reader.lease(1, 3)
    view = cache.sequence_view(lease)
    if planted == "at once":
        fake_cuda.hold(reader.stream.key)
        reader.read(view)
        with pytest.raises(DeviceLost):
            reader.tier.sequences.hide(view._shown)
    else:
        event = reader.event()
        reader.read(view)
        cache.release(lease, after=event)
        reader.settle()
    assert "unmap meets a kernel" in fake_cuda.report
    fake_cuda.go_on()
    cache.close(flush_s=0)
    fake_cuda.reset()


def test_a_lost_device_takes_its_views_along(reader: Reader) -> None:
    """A lease that was being released when the device was lost stays for ever, or the cache cannot be closed."""
    leases = [reader.lease(number, 2) for number in (1, 2, 3)]
    views = [reader.cache.sequence_view(lease) for lease in leases]
    reader.fake.hold(reader.stream.key)
    reader.read(views[0])
    reader.cache.release(leases[0], after=reader.event())
    views[1].close(after=reader.event())
    reader.fake.lose()
    reader.fake.fault("cuMemUnmap", 700)
    reader.fake.go_on(reader.stream.key)
    reader.settle()
    for view in views[:2]:
        with pytest.raises(UsageError, match="has ended"):
            view.kv(0)
    assert reader.cache.stats()["leases"] == 2
    assert reader.cache.release_owner("req") == 2
    with pytest.raises(DeviceLost):
        reader.cache.reserve(reader.cache.match(reader.keys_of(4, 1), "req"), 1)
    reader.cache.close(flush_s=0)
    with pytest.raises(ClosedError):
        views[2].kv(0)


def test_any_thread_may_show_and_hide(reader: Reader) -> None:
    """A caller's thread that has never used the device calls a driver that knows nothing of its context."""
    slots, sequences = reader.lease(1, 2).slots(), reader.tier.sequences

    def in_thread(verb: Callable[[], Any]) -> Any:
        before = reader.fake.calls("cuCtxSetCurrent")
        with ThreadPoolExecutor(1) as thread:
            returned = thread.submit(verb).result()
        assert reader.fake.calls("cuCtxSetCurrent") > before
        return returned

    shown = in_thread(lambda: sequences.show(slots))
    assert reader.blocks_shown == 2
    in_thread(lambda: sequences.hide(shown))
    assert reader.blocks_shown == 0
    assert reader.cache.release_owner("req") == 1


def test_blocks_that_are_not_whole_granules_are_refused_with_both_numbers(fake_cuda: FakeCuda) -> None:
    """A view maps other bytes than its blocks, or nobody learns what length would do."""
    with pytest.raises(ConfigError, match=r"a block of 4096 bytes is not whole granules of 65536.*16 times") as told:
        kvtier.open_sync(device_config(block_tokens=8))
    assert told.value.path == "tiers[0].sequence_views"
    assert fake_cuda.context_owners == 0


def test_a_device_without_read_only_mappings_says_so_once(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views are refused there, or nobody learns that a prefix can be overwritten."""
    monkeypatch.setattr(notices, "_said", set())
    fake_cuda.configure(CAPACITY_GRANULES * GRANULE_BYTES, GRANULE_BYTES, read_only=False)
    with kvtier.open_sync(device_config()) as cache:
        reader = Reader(cache, fake_cuda)
        lease = reader.lease(1, 3)
        for _ in range(2):
            view = cache.sequence_view(lease)
            poke(reader.driver, view.address, 7)
        assert caplog.text.count("no read-only mappings") == 1
        cache.release(lease, after=reader.event())


def test_a_larger_block_takes_several_granules(fake_cuda: FakeCuda) -> None:
    """The blocks of a view overlap, or lie apart."""
    config = device_config(block_tokens=2 * BLOCK_TOKENS)
    with kvtier.open_sync(replace(config, tiers=config.tiers[:1])) as cache:
        reader = Reader(cache, fake_cuda)
        keys = kvtier.hash_blocks(list(range(6 * BLOCK_TOKENS)), config.model)
        lease = cache.reserve(cache.match(keys, "req"), 3)
        for slot in lease.slots():
            poke(reader.driver, int(reader.tier._arena.address) + slot * 2 * GRANULE_BYTES, slot, 2 * GRANULE_BYTES)
        view = cache.sequence_view(lease)
        held = peek(reader.driver, view.address, 6 * GRANULE_BYTES)
        assert list(held[::GRANULE_BYTES]) == list(np.repeat(lease.slots(), 2))
        cache.release(lease, after=reader.event())


def test_arrays_of_a_view_lie_over_it(fake_cuda: FakeCuda) -> None:
    """Kernels get another place or shape than the blocks have, or an array that is kept sees the next sequence."""
    pytest.importorskip("cupy", reason="views of device memory need CuPy")
    with kvtier.open_sync(device_config()) as cache:
        reader = Reader(cache, fake_cuda)
        lease = reader.lease(1, 3)
        reader.fill(lease)
        view = cache.sequence_view(lease)
        arrays = view.kv(1)
        assert arrays["v"].shape == (3 * BLOCK_TOKENS, 2, 16)
        assert arrays["v"].strides == (512, 64, 4)
        assert arrays["v"].data.ptr == view.address + 3 * 128
        assert ctypes.string_at(arrays["v"].data.ptr, 1) == bytes([lease.slots()[0]])
        cache.release(lease, after=reader.event())
        reader.settle()
        following = cache.sequence_view(lease := reader.lease(2, 3))
        assert following.address != view.address
        del arrays
        cache.release(lease, after=reader.event())
