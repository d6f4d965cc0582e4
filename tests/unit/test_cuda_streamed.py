"""Prefixes that come layer by layer on a device: kernels that wait for them, on the fake libcuda with its clocks."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.allocator.streams import Event, Stream
from kvtier.cache.leases import Lease
from kvtier.errors import DeviceLost, UsageError
from kvtier.tiers.fences import stream_key
from kvtier.types import WriteBatch, WriteItem, store_key
from tests.cache_bench import BLOCK_TOKENS, config_for, prompt
from tests.fakecuda.fake import FakeCuda, fake_cuda

__all__ = ["fake_cuda"]
LAYER_BYTES = 64 << 10  # two layers a block, 6 usable slots on the device, 32 in host memory
BLOCK_BYTES = 2 * LAYER_BYTES
SHAPE = {"kv_heads": 32, "head_dim": 64}
LAUNCH_FAILED = 719
pytestmark = pytest.mark.timeout(60)


class Model:
    """Kernels on a stream of their own, over a cache whose blocks hold what follows from their keys."""

    def __init__(self, fake: FakeCuda, store: Path, layout: str = "layer_token_major") -> None:
        config = config_for(store, gpu="896KiB", host="4MiB", model=SHAPE | {"layout": layout})
        tiers = (config.tiers[0].model_copy(update={"device": "cuda"}), *config.tiers[1:])
        self.config = replace(config, tiers=tiers)
        self.cache = kvtier.open_sync(self.config)
        self.fake = fake
        self.tier: Any = self.cache.top_tier
        self.streams = self.tier._cuda.streams
        self.up: Stream = self.tier._moves._up
        self.stream: Stream = self.streams.make_stream()
        self.events = 0  # that were made here, and are kept

    def address(self, slot: int, layer: int = 0) -> int:
        return int(self.tier._arena.address) + slot * int(self.tier.stride_bytes) + layer * LAYER_BYTES

    def kernel(self, slot: int, layer: int, length_bytes: int = LAYER_BYTES, *, writes: bool = False) -> int:
        """One that reads (or writes) a layer of a block. Returns its CUresult."""
        return self.fake.kernel(self.stream.key, self.address(slot, layer), length_bytes, writes=writes)

    def event(self) -> Event:
        self.events += 1
        event: Event = self.streams.make_event()
        self.streams.record(event, self.stream)
        return event

    def serve(self, number: int) -> None:
        """A whole request of four blocks."""
        keys = prompt(self.config, number, 4)
        lease = self.cache.reserve(self.cache.match(keys, "req"), 4)
        assert isinstance(lease, Lease)
        pairs = list(zip(lease.slots(), keys.groups[0], strict=True))[lease.tokens_ready // BLOCK_TOKENS :]
        for slot, key in pairs:
            ctypes.memmove(self.address(slot), content(key), BLOCK_BYTES)
            assert self.kernel(slot, 0, BLOCK_BYTES, writes=True) == 0
        self.cache.commit(lease, pairs, after=(event := self.event()))
        self.release(lease, event)
        self.settle()

    def below(self, number: int = 1) -> Any:
        """The keys of a prompt that lies in host memory alone."""
        for each in (number, 101, 102):
            self.serve(each)
            self.cache.flush()
        keys = prompt(self.config, number, 4)
        assert self.cache.peek(keys).tiers == {"gpu": 0, "host": 16, "lmdb": 0}
        return keys

    def reserve(self, keys: Any, *, streamed: bool = True) -> Lease:
        lease = self.cache.reserve(self.cache.match(keys, "req"), 4, streamed=streamed)
        assert isinstance(lease, Lease)
        assert lease.tokens_ready == 16
        return lease

    def release(self, lease: Lease, event: Event | None = None) -> None:
        self.cache.release(lease, after=event or self.event())

    def settle(self) -> None:
        """Wait until all fences made so far have passed, and all loads that were begun are told to be over."""
        self.cache._engine._executor._threads[0, "write"].submit(int).result(30)
        passed = kvtier.engine.oneshot.OneShot[None]()
        self.cache._engine.once_passed(None, lambda core, now_s: passed.send(None))
        passed.receive(30)


@pytest.fixture
def model(fake_cuda: FakeCuda, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """Afterwards nothing overlapped, the books agree, and no event is left."""
    model = Model(fake_cuda, tmp_path / "store", getattr(request, "param", "layer_token_major"))
    yield model
    fake_cuda.go_on()
    if not model.cache._engine.closed:
        model.settle()
        assert model.cache.check() == []
        assert model.cache.stats()["leases"] == 0
        model.cache.close()
    assert fake_cuda.report == ""


@pytest.fixture
def doomed(fake_cuda: FakeCuda, tmp_path: Path) -> Iterator[Model]:
    """A model whose device is going to be lost."""
    model = Model(fake_cuda, tmp_path / "store")
    yield model
    fake_cuda.go_on()
    model.cache.close()


def content(key: bytes) -> bytes:
    return (key * BLOCK_BYTES)[:BLOCK_BYTES]


def holding_before(model: Model, layer: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The device makes the next copies up to this layer, and goes on when the result is called."""
    streams, copy, copies = model.streams, model.streams.copy, 0
    gate, after = streams.make_stream(), streams.make_event()
    model.fake.hold(gate.key)
    assert model.fake.kernel(gate.key, model.address(0), 1, writes=False) == 0
    streams.record(after, gate)

    def gated(targets: Any, sources: Any, lengths: Any, stream: Stream, *, settled: bool = False) -> None:
        nonlocal copies
        if stream == model.up:
            if copies == layer:
                streams.wait(stream, after)
            copies += 1
        copy(targets, sources, lengths, stream, settled=settled)

    monkeypatch.setattr(streams, "copy", gated)
    return lambda: model.fake.go_on(gate.key)


# ---------------------------------------------------------------- waiting


def test_attention_of_layer_0_runs_while_layer_1_is_held_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has to wait until the last one has come."""
    keys = model.below()
    go_on = holding_before(model, 1, monkeypatch)
    lease = model.reserve(keys)
    lease.wait(model.stream, layer=0)
    for slot in lease.slots():
        assert model.kernel(slot, 0) == 0
    model.streams.finish(model.stream)  # it is over: were it waiting for layer 1, this would hang
    lease.wait(model.stream, layer=1)
    for slot in lease.slots():
        assert model.kernel(slot, 1) == 0
    behind = model.event()
    assert not model.streams.is_done(behind)
    go_on()
    model.streams.synchronize(behind)
    for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
        assert ctypes.string_at(model.address(slot), BLOCK_BYTES) == content(key)
    model.release(lease)


def test_all_of_it_can_be_waited_for_at_once(model: Model) -> None:
    """`wait` without a layer covers the first layer, or the last batch, alone."""
    keys = model.below()
    model.fake.hold(model.up.key)
    lease = model.reserve(keys)
    lease.wait(model.stream)
    for slot in lease.slots():
        assert model.kernel(slot, 0, BLOCK_BYTES) == 0
    model.fake.go_on(model.up.key)
    model.release(lease)


def test_a_model_goes_through_its_layers_while_they_come(model: Model) -> None:
    """Over a slow link a request computes with what lay in its slots before."""
    keys = model.below()
    model.fake.slow_copies(0.1, latency_us=500)  # 3 ms a layer
    lease = model.reserve(keys)
    for layer in range(2):
        lease.wait(model.stream, layer=layer)
        assert [model.kernel(slot, layer) for slot in lease.slots()] == [0] * 4
    model.streams.finish(model.stream)
    for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
        assert ctypes.string_at(model.address(slot), BLOCK_BYTES) == content(key)
    model.release(lease)


@pytest.mark.parametrize(("waited", "read"), [(None, 0), (0, 1)], ids=["no wait", "another layer"])
def test_a_kernel_that_does_not_wait_for_its_layer_is_caught(doomed: Model, waited: int | None, read: int) -> None:
    """The fake device would let a missing wait pass: nothing here would be shown."""
    keys = doomed.below()
    doomed.fake.hold(doomed.up.key)
    lease = doomed.reserve(keys)
    if waited is not None:
        lease.wait(doomed.stream, layer=waited)
    assert doomed.kernel(lease.slots()[-1], read) == LAUNCH_FAILED
    assert doomed.fake.report.startswith("unordered overlap: a kernel meets a batch of copies")


@pytest.mark.parametrize("model", ["token_major"], indirect=True)
def test_a_layout_that_mixes_layers_waits_for_all_of_them(model: Model) -> None:
    """Of token-major blocks a kernel reads the tokens that have not come."""
    keys = model.below()
    model.fake.hold(model.up.key)
    lease = model.reserve(keys)
    lease.wait(model.stream, layer=0)
    assert [model.kernel(slot, 0, BLOCK_BYTES) for slot in lease.slots()] == [0] * 4
    model.fake.go_on(model.up.key)
    model.release(lease)


def test_a_second_request_waits_for_the_same_copies(model: Model) -> None:
    """A request that joins a prefix on its way copies it again, or reads it too early."""
    keys = model.below()
    model.fake.hold(model.up.key)
    first, second = model.reserve(keys), model.reserve(keys)
    assert first.slots() == second.slots()
    second.wait(model.stream, layer=1)
    assert model.kernel(second.slots()[3], 1) == 0
    model.fake.go_on(model.up.key)
    model.release(first)
    model.release(second)


def test_without_streamed_all_has_come_and_nothing_is_waited_for(model: Model) -> None:
    """A caller that knows nothing of streams reads too early."""
    keys = model.below()
    lease = model.reserve(keys, streamed=False)
    waits = model.fake.calls("cuStreamWaitEvent")
    lease.wait(model.stream, layer=0)
    lease.wait()
    assert model.fake.calls("cuStreamWaitEvent") == waits
    assert model.kernel(lease.slots()[0], 0, BLOCK_BYTES) == 0
    model.release(lease)


def test_waiting_for_what_is_over_is_free(model: Model) -> None:
    """A lease keeps events that have been given to others since."""
    keys = model.below()
    lease = model.reserve(keys)
    model.settle()
    waits = model.fake.calls("cuStreamWaitEvent")
    lease.wait(model.stream)
    assert model.fake.calls("cuStreamWaitEvent") == waits
    assert model.kernel(lease.slots()[0], 0, BLOCK_BYTES) == 0
    model.release(lease)


async def test_the_asyncio_face_streams_too(model: Model) -> None:
    """`await reserve(streamed=True)` waits for the copies."""
    keys = model.below()
    model.cache.close()
    async with kvtier.open(model.config) as cache:
        later = Model.__new__(Model)
        later.__dict__ |= model.__dict__
        later.cache, later.tier = cache, cache.top_tier  # type: ignore[assignment]
        later.streams, later.up = later.tier._cuda.streams, later.tier._moves._up
        later.stream = later.streams.make_stream()
        lease = await cache.reserve(cache.match(keys, "req"), 4, streamed=True)
        assert isinstance(lease, Lease)
        lease.wait(later.stream, layer=1)
        cache.release(lease, after=later.event())


# ---------------------------------------------------------------- copies and events


def test_blocks_come_layer_by_layer_with_an_event_behind_each(model: Model) -> None:
    """A layer comes behind another block's last one, or every block has events of its own."""
    keys, counted = model.below(), ("cuMemcpyBatchAsync", "copy_descriptors", "cuEventRecord")
    before = [model.fake.calls(name) for name in counted]
    lease = model.reserve(keys)
    model.cache._engine._executor._threads[0, "write"].submit(int).result(30)
    assert [model.fake.calls(name) - n for name, n in zip(counted, before, strict=True)] == [2, 8, 2]
    for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
        assert ctypes.string_at(model.address(slot), BLOCK_BYTES) == content(key)
    model.release(lease)


def test_events_are_given_back(model: Model) -> None:
    """Each streamed prefix leaves its events behind, until the driver has no more."""
    for _ in range(3):
        keys = model.below()
        model.release(model.reserve(keys))
        model.settle()
    streams = model.streams
    assert len(streams._events) - len(streams._events_idle) == model.events


def test_a_driver_that_refuses_a_layer_is_a_miss_and_its_slots_are_idle(model: Model) -> None:
    """Slots are given away while the first layer still comes, because the second was refused."""
    keys = model.below()
    model.fake.hide("cuMemcpyBatchAsync")
    model.streams._batch = None
    model.fake.fault("cuMemcpyAsync", 2, nth=6)  # the second block of the second layer
    lease = model.cache.reserve(model.cache.match(keys, "req"), 4, streamed=True)
    assert isinstance(lease, Lease)
    assert lease.tokens_ready == 0
    for slot in lease.slots():
        assert model.kernel(slot, 0, BLOCK_BYTES, writes=True) == 0
    model.release(lease)


def test_blocks_that_the_parts_do_not_cover_come_whole(model: Model) -> None:
    """Blocks of another length than the model's are cut short, or told to have come."""
    block, told = np.arange(1000, dtype=np.uint8), []
    key = store_key(0, bytes(16) + bytes(4))
    parts = model.cache._engine._core.planner.promotions._parts
    [outcome] = model.tier.write_streamed(WriteBatch([WriteItem(key, 1000, memoryview(block), 1)]), parts, told.append)
    assert outcome.done
    assert told == []
    assert ctypes.string_at(model.address(1), 1000) == block.tobytes()


# ---------------------------------------------------------------- ends


def test_a_lease_that_ends_early_does_not_free_what_still_comes(model: Model) -> None:
    """A slot is written by another request while copies into it are on the stream."""
    keys = model.below()
    model.fake.hold(model.up.key)
    lease = model.reserve(keys)
    slots = lease.slots()
    model.release(lease)
    passed = kvtier.engine.oneshot.OneShot[None]()
    model.cache._engine.once_passed(None, lambda core, now_s: passed.send(None))
    passed.receive(30)
    assert model.cache.stats()["leases"] == 0
    other = model.cache.reserve(model.cache.match(prompt(model.config, 55, 2), "req"), 2)
    assert isinstance(other, Lease)
    assert not set(other.slots()) & set(slots)
    with pytest.raises(UsageError, match="was released"):
        lease.wait(model.stream)
    model.fake.go_on(model.up.key)
    model.release(other)


def test_a_device_lost_under_way_is_told_by_every_verb(doomed: Model) -> None:
    """A request waits for bytes that never come, or takes what lay there for them."""
    keys = doomed.below()
    doomed.fake.hold(doomed.up.key)
    lease = doomed.reserve(keys)
    doomed.fake.lose()
    doomed.fake.go_on(doomed.up.key)
    doomed.cache._engine._executor._threads[0, "write"].submit(int).result(30)
    with pytest.raises(DeviceLost):
        lease.wait(doomed.stream, layer=0)
    with pytest.raises(DeviceLost):
        doomed.cache.commit(lease, [], after=Event(1))
    with pytest.raises(DeviceLost):
        doomed.cache.reserve(doomed.cache.match(keys, "req"), 4, streamed=True)
    assert doomed.cache.peek(keys).tiers["host"] == 16
    assert doomed.cache.check() == []


class TorchStream:
    cuda_stream = 1234


class CupyStream:
    ptr = 1234


class BindingsStream:
    def __int__(self) -> int:
        return 1234


class TorchDefault:
    cuda_stream = 0


def test_streams_of_others_are_known() -> None:
    """A user has to unpack a stream by hand, or cannot name the default one."""
    for stream in (TorchStream(), CupyStream(), BindingsStream(), Stream(1234), 1234, np.int64(1234)):
        assert stream_key(stream) == 1234
    assert stream_key(TorchDefault()) == 0


@pytest.mark.parametrize("stream", [None, "stream", True, 1.5, object(), b"1"], ids=lambda s: type(s).__name__)
def test_what_is_no_stream_is_refused(model: Model, stream: object) -> None:
    """Any value is followed as a pointer, or a forgotten stream is no mistake."""
    keys = model.below()
    lease = model.reserve(keys)
    for _ in range(2):  # also when all has come: a mistake does not depend on luck
        with pytest.raises(UsageError, match="pass a stream"):
            lease.wait(stream, layer=0)
        model.settle()
    model.release(lease)
