"""A block manager's pages on a device: the fake libcuda tells when a move overlaps a kernel that it must not."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.allocator.streams import Event, Stream
from kvtier.engine.managed_cache import open_managed
from kvtier.engine.mover import TierMover
from kvtier.errors import ConfigError, DeviceLost, UsageError
from kvtier.tiers.cuda import CudaTier
from kvtier.tiers.host import HostTier
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.unit.test_cuda_cache import memory

__all__ = ["fake_cuda", "memory"]
MODEL = {"name": "m", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
GPU = {"type": "gpu", "device": "cuda", "capacity": "128KiB"}  # 31 blocks of 16 tokens, and the null block
HOST = {"type": "host", "capacity": "256KiB", "hugepages": "off", "pin": "off"}
LMDB = {"type": "lmdb", "capacity": "16MiB", "path": "store"}
BLOCK_BYTES = 4096
PROMPT = [7 * i % 100 for i in range(100)]  # 6 blocks of 16, and 4 tokens
STEPS_MAX = 2000
pytestmark = pytest.mark.timeout(60)


def config_of(*tiers: Any, **model: Any) -> Any:
    return {"model": MODEL | model, "tiers": list(tiers)}


def content(tokens: list[int], index: int) -> bytes:
    """What block `index` of a prompt holds."""
    return (b"%d," % hash(tuple(tokens[: 16 * (index + 1)])) * BLOCK_BYTES)[:BLOCK_BYTES]


class Model:
    """An engine with a stream of its own: kernels that read and write whole blocks, and steps behind them."""

    def __init__(self, cache: Any, fake: FakeCuda) -> None:
        self.cache, self.fake = cache, fake
        self.streams = cache._pages._cuda.streams
        self.stream: Stream = self.streams.make_stream()

    def event(self) -> Event:
        event: Event = self.streams.make_event()
        self.streams.record(event, self.stream)
        return event

    def step(self, wait_s: float = 0.0) -> Any:
        return self.cache.step(wait_s, after=self.event())

    def flush(self) -> None:
        assert self.cache.flush(after=self.event())

    def hold(self) -> None:
        """The kernels from now on run on, until `go_on`."""
        self.fake.hold(self.stream.key)

    def go_on(self) -> None:
        self.fake.go_on(self.stream.key)

    def address(self, block: int) -> int:
        return int(self.cache._pages._arena.address) + block * int(self.cache._pages.stride_bytes)

    def kernel(self, block: int, *, writes: bool) -> None:
        assert self.fake.kernel(self.stream.key, self.address(block), BLOCK_BYTES, writes=writes) == 0

    def begin(self, name: str, tokens: list[int] = PROMPT) -> Any:
        """A request that has got what there was, and blocks."""
        request = self.cache.request(name, tokens)
        lookup = self.cache.get_computed_blocks(request)
        assert self.cache.allocate_slots(request, len(tokens) - lookup.hit.tokens, lookup) is not None
        if not self.cache.is_loading(request):
            request.computed_tokens = lookup.hit.tokens
        return request

    def end_load(self, request: Any) -> None:
        for _ in range(STEPS_MAX):
            if not self.cache.is_loading(request):
                break
            if self.step(1.0) == [request]:
                new = len(request.tokens) - request.computed_tokens
                assert self.cache.allocate_slots(request, new) is not None
        assert not self.cache.is_loading(request)

    def compute(self, request: Any) -> int:
        """Read what is there, write the rest. Returns how many tokens were there."""
        found: int = request.computed_tokens
        (table,) = self.cache.manager.block_ids(request)
        for index, block in enumerate(table):
            wanted = content(request.tokens, index)
            if index < found // 16:
                assert self.bytes(block) == wanted, (index, block)
            else:
                self.put(block, wanted)
            self.kernel(block, writes=index >= found // 16)
        request.computed_tokens = len(request.tokens)
        return found

    def put(self, block: int, payload: bytes) -> None:
        ctypes.memmove(self.address(block), payload, BLOCK_BYTES)

    def bytes(self, block: int) -> bytes:
        return ctypes.string_at(self.address(block), BLOCK_BYTES)

    def serve(self, name: str, tokens: list[int] = PROMPT) -> int:
        request = self.begin(name, tokens)
        self.end_load(request)
        found = self.compute(request)
        self.cache.free(request)
        assert self.cache.check() == []
        return found

    def fill(self, count: int = 8) -> None:
        """Other prompts, until the pages have nothing of earlier ones."""
        for number in range(count):
            self.serve(f"fill{number}", [number] * 64 + list(range(17)))
            self.flush()

    def steps(self, count: int = 20, event: Event | None = None) -> None:
        """Enough for a move to be asked for, answered and begun."""
        for _ in range(count):
            assert self.cache.step(0.002, after=event or self.event()) == []


class FarModel(Model):
    """One that reaches device memory by copies in its stream only, as on a card."""

    def put(self, block: int, payload: bytes) -> None:
        self.streams._calls("cuMemcpyHtoDAsync", self.address(block), payload, BLOCK_BYTES, self.stream.key)

    def bytes(self, block: int) -> bytes:
        found = ctypes.create_string_buffer(BLOCK_BYTES)
        to = ctypes.addressof(found)
        self.streams._calls("cuMemcpyDtoHAsync", to, self.address(block), BLOCK_BYTES, self.stream.key)
        return found.raw


@pytest.fixture
def opened(fake_cuda: FakeCuda, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens caches with a model each, and closes them; no move has overlapped a kernel."""
    monkeypatch.chdir(tmp_path)
    made: list[Model] = []

    def model(*tiers: Any, of: type[Model] = Model, **changes: Any) -> Model:
        made.append(of(open_managed(config_of(*tiers, **changes), tokens_max=512), fake_cuda))
        return made[-1]

    yield model
    fake_cuda.go_on()
    for each in made:
        each.cache.close()
    assert fake_cuda.report == ""


# ---------------------------------------------------------------- what it is for


def test_what_the_pages_lost_comes_back(memory: None, opened: Any) -> None:
    """A prompt is computed again although host memory has it, comes back as other bytes, or the CPU reads a device."""
    model = opened(GPU, HOST, of=FarModel)
    assert model.cache.manager.pool.blocks_total == 32
    assert model.serve("a") == 0
    assert model.serve("again") == 96
    model.flush()
    model.fill()
    request = model.cache.request("look", PROMPT)
    assert model.cache.get_computed_blocks(request).external_tokens == 96
    assert model.serve("b") == 96
    assert model.cache.top.counters.loaded == 6
    assert model.cache.manager.pool.dropped_dirty == 0


@pytest.mark.parametrize("layout", ["layer_token_major", "token_major"])
def test_a_second_process_finds_what_the_first_one_kept(opened: Any, layout: str) -> None:
    """A restart computes everything again, or reads other bytes; or `close` does not save what kernels have written."""
    first = opened(GPU, HOST, LMDB, layout=layout)
    assert first.serve("a") == 0  # no step since: only `close` can know that its kernels are over
    first.cache.close()
    second = opened(GPU, HOST, LMDB, layout=layout)
    assert second.serve("a") == 96
    assert second.cache.top.counters.loaded == 6


def test_pages_alone_are_a_manager_with_device_memory(opened: Any) -> None:
    """An engine without tiers below cannot have pages on a device, or its steps wait for something."""
    model = opened(GPU)
    assert [model.serve(name) for name in "ab"] == [0, 96]
    assert model.step(1000.0) == []
    model.flush()


def test_views_are_of_the_device(opened: Any) -> None:
    """Kernels get addresses of host memory, or of another block."""
    model = opened(GPU, HOST)
    views = model.cache.kv(0, 1)
    assert {name: view.shape for name, view in views.items()} == {"k": (32, 16, 2, 8), "v": (32, 16, 2, 8)}
    assert views["k"].data.ptr == model.address(0) + BLOCK_BYTES // 2
    assert type(views["k"]).__module__.startswith("cupy")


# ---------------------------------------------------------------- order with the engine's kernels


def test_a_block_is_stored_only_when_its_kernel_is_over(opened: Any, fake_cuda: FakeCuda) -> None:
    """What the tiers keep of a block is what lay there before it was computed."""
    model = opened(GPU, HOST)
    model.hold()
    model.serve("a")
    model.cache._flush(0.0)  # all is due from now on
    model.steps()
    assert model.cache._mover._done.empty()
    assert fake_cuda.calls("bytes_copied") == 0
    model.go_on()
    model.flush()
    assert model.cache.top.counters.stored == 6
    assert fake_cuda.calls("bytes_copied") == 6 * BLOCK_BYTES


def load_under_a_kernel(model: Model) -> Any:
    """The pages' last blocks are read by a kernel that runs on when they are given to a request that loads."""
    model.serve("a")
    model.flush()
    model.fill()
    reader = model.begin("reader", [9] * (31 * 16))
    model.compute(reader)
    model.hold()
    for block in model.cache.manager.block_ids(reader)[0]:
        model.kernel(block, writes=False)
    model.cache.free(reader)
    request = model.begin("b")
    assert model.cache.is_loading(request)
    return request


def test_pages_are_not_loaded_into_while_a_kernel_reads_them(opened: Any, fake_cuda: FakeCuda) -> None:
    """The last attention kernel of a request that has ended reads another one's blocks."""
    model = opened(GPU, HOST)
    request = load_under_a_kernel(model)
    before = fake_cuda.calls("bytes_copied")
    model.steps()
    assert fake_cuda.calls("bytes_copied") == before
    assert model.cache.is_loading(request)
    model.go_on()
    model.end_load(request)
    assert model.compute(request) == 96


def test_a_request_is_back_only_when_its_bytes_are_there(opened: Any, fake_cuda: FakeCuda) -> None:
    """A step reads blocks whose copy has been started, no more."""
    model = opened(GPU, HOST)
    model.serve("a")
    model.flush()
    model.fill()
    fake_cuda.hold(model.cache._pages._moves._up.key)
    request = model.begin("b")
    model.steps()
    assert model.cache.is_loading(request)
    fake_cuda.go_on()
    model.end_load(request)
    assert model.compute(request) == 96


def no_fence(tier: Any, fence: Any) -> None:
    """A planted bug: nobody waits for what the caller's kernels do."""


@pytest.mark.parametrize("kind", ["store", "load"])
def test_without_the_fence_the_overlap_is_found(
    kind: str, fake_cuda: FakeCuda, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks on which the tests above rest let everything pass."""
    monkeypatch.chdir(tmp_path)
    with open_managed(config_of(GPU, HOST), tokens_max=512) as cache:
        model = Model(cache, fake_cuda)
        if kind == "store":
            model.hold()
            model.serve("a")
            cache._flush(0.0)
        else:
            load_under_a_kernel(model)
        monkeypatch.setattr(CudaTier, "passed", no_fence)
        with pytest.raises(DeviceLost):
            model.steps(STEPS_MAX)
        assert "a batch of copies meets a kernel" in fake_cuda.report
        fake_cuda.go_on()


def test_without_the_event_of_the_step_the_overlap_is_found(
    fake_cuda: FakeCuda, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover that forgets the step's event copies blocks that are still being written, and nobody notices."""
    monkeypatch.chdir(tmp_path)
    with open_managed(config_of(GPU, HOST), tokens_max=512) as cache:
        model = Model(cache, fake_cuda)
        monkeypatch.setattr(TierMover, "follow", lambda mover, after: None)
        model.hold()
        model.serve("a")
        cache._flush(0.0)
        with pytest.raises(DeviceLost):
            model.steps(STEPS_MAX)
        assert fake_cuda.report
        fake_cuda.go_on()


def test_an_event_may_be_dropped_after_its_step(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` asks an event that the engine has destroyed, and crashes or saves nothing."""
    model = opened(GPU, HOST, LMDB)
    model.serve("a")
    model.step()
    with monkeypatch.context() as dropped:
        dropped.setattr(CudaTier, "fence", lambda tier, after: pytest.fail("asks the event of an earlier step"))
        model.cache.close()
    assert opened(GPU, HOST, LMDB).serve("a") == 96


def test_close_waits_for_the_kernels_before_the_pages_go(
    opened: Any, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are unmapped under the last kernel, which costs the process its device."""
    model, order = opened(GPU, HOST), []
    settle, unpin = CudaTier.settle, CudaTier.unpin
    monkeypatch.setattr(CudaTier, "settle", lambda tier: (model.go_on(), settle(tier), order.append("settled"))[0])
    monkeypatch.setattr(CudaTier, "unpin", lambda tier: (unpin(tier), order.append("unpinned"))[0])
    close = HostTier.close
    monkeypatch.setattr(HostTier, "close", lambda tier: (order.append("host"), close(tier))[1])
    model.hold()
    model.serve("a")
    model.cache.close(flush_s=0)
    assert order[:3] == ["settled", "unpinned", "host"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("tiers", [(GPU,), (GPU, HOST)])
@pytest.mark.parametrize("verb", ["step", "flush"])
def test_a_step_without_its_event_is_told_at_once(opened: Any, verb: str, tiers: Any) -> None:
    """An engine that gives none works for weeks, until a block is copied before it is written."""
    cache = opened(*tiers).cache
    with pytest.raises(UsageError, match="`after` is needed: pass the event"):
        getattr(cache, verb)()
    for wrong in (True, "event", 0, 1.5, object()):
        with pytest.raises(UsageError, match="pass the event"):
            getattr(cache, verb)(after=wrong)


def test_host_memory_ignores_the_event(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine cannot serve both kinds of memory."""
    monkeypatch.chdir(tmp_path)
    with open_managed(config_of(GPU | {"device": "host"}, HOST), tokens_max=512) as cache:
        assert cache.step(after="whatever") == []
        assert cache.flush(after=7)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_disk_directly_below_is_refused_and_leaves_nothing(fake_cuda: FakeCuda, tmp_path: Any, device: str) -> None:
    """A disk gets a device's address, or a refused open keeps the device's memory."""
    with pytest.raises(ConfigError, match="Put a host tier between") as caught:
        open_managed(config_of(GPU | {"device": device}, LMDB | {"path": str(tmp_path / "s")}), tokens_max=512)
    assert caught.value.path == "tiers[1].type"
    assert fake_cuda.used_bytes == 0


def test_host_memory_is_registered_with_the_device(opened: Any, fake_cuda: FakeCuda) -> None:
    """Blocks are copied at a fraction of the link's speed."""
    model = opened(GPU, HOST)
    assert fake_cuda.calls("cuMemHostRegister_v2") == 1
    model.serve("a")
    model.flush()
    assert fake_cuda.calls("pageable_copies") == 0
    model.cache.close()
    assert fake_cuda.calls("cuMemHostUnregister") == 1


# ---------------------------------------------------------------- a device that fails


def expect_lost(model: Model) -> None:
    """It is said by name, requests can still go, and nothing of the pages is found any more."""
    cache = model.cache
    with pytest.raises(DeviceLost, match="the device of the pages"):
        cache.step(after=None)
    request = cache.request("later", PROMPT)
    lookup = cache.get_computed_blocks(request)
    assert lookup.hit.tokens == 0
    with pytest.raises(DeviceLost, match="the device of the pages"):
        cache.allocate_slots(request, 4, lookup)
    assert cache.check() == []


def saved(opened: Any) -> Model:
    """A prompt lies in host memory, not yet on disk; others have its pages."""
    model: Model = opened(GPU, HOST, LMDB)
    model.serve("a")
    model.cache.top.flush()
    for _ in range(STEPS_MAX):
        model.step()
        if model.cache.top.is_idle:
            break
    assert model.cache.top.counters.stored == 6
    return model


def found_later(opened: Any, fake_cuda: FakeCuda) -> tuple[int, int]:
    """What a new process finds of the prompt in host memory, and of one that lay in the pages only."""
    fake_cuda.reset()
    model = opened(GPU, HOST, LMDB)
    return model.serve("a"), model.serve("gone", [5] * 50)


@pytest.mark.parametrize("when", ["told", "in a copy", "behind the event", "in close"])
def test_a_lost_device_is_told_and_what_lies_below_is_kept(opened: Any, fake_cuda: FakeCuda, when: str) -> None:
    """A kernel that went astray hangs the engine, serves what a dead device held, or takes host memory with it."""
    model = saved(opened)
    if when == "behind the event":
        model.hold()
    running = model.begin("running", [6] * 20)
    model.serve("gone", [5] * 50)
    event = model.event()
    if when == "told":
        model.cache.lose_device()
    elif when == "in a copy":
        fake_cuda.fault("cuMemcpyBatchAsync", 700, nth=1)
        model.cache._flush(5.0)
    elif when == "behind the event":
        model.cache._follow(event)
        model.cache._flush(0.05)
        fake_cuda.lose()
        model.go_on()
        model.cache._flush(5.0)
    if when != "in close":
        expect_lost(model)
        model.cache.free(running)
        assert model.cache.check() == []
        assert model.cache.flush() is True  # host memory reaches the disk
    else:
        fake_cuda.lose()
    model.cache.close()
    assert found_later(opened, fake_cuda) == (96, 0)


def test_a_load_whose_device_is_lost_ends(opened: Any, fake_cuda: FakeCuda) -> None:
    """An engine waits for ever for a request, or is given it back to read from a dead device."""
    model = saved(opened)
    model.fill()
    request = model.begin("b")
    assert model.cache.is_loading(request)
    event = model.event()
    fake_cuda.lose()
    with pytest.raises(DeviceLost):
        model.steps(STEPS_MAX, event)
    expect_lost(model)
    assert not model.cache.is_loading(request)
    model.cache.free(request)
    model.cache.close()
    assert found_later(opened, fake_cuda)[0] == 96


def test_nothing_is_copied_to_a_device_that_was_given_up(opened: Any, fake_cuda: FakeCuda) -> None:
    """A copy is given to a context that is dead: what the driver does then is anybody's guess."""
    model = saved(opened)
    model.fill()
    request = model.begin("b")
    before = fake_cuda.calls("bytes_copied")
    model.cache.lose_device()
    for _ in range(STEPS_MAX):
        with pytest.raises(DeviceLost):
            model.cache.step(0.002)
        if not model.cache.is_loading(request):
            break
    assert not model.cache.is_loading(request)
    assert fake_cuda.calls("bytes_copied") == before


def test_a_load_that_ends_after_the_loss_names_nothing(opened: Any, fake_cuda: FakeCuda) -> None:
    """Blocks of a device that was given up are found by the next request."""
    model = saved(opened)
    model.fill()
    model.begin("b")
    model.hold()
    model.steps(3)
    model.cache.lose_device()
    model.go_on()
    for _ in range(20):
        with pytest.raises(DeviceLost):
            model.cache.step(0.002)
    expect_lost(model)
