"""The transformers helper over slots on a device: the cache is on the fake libcuda, torch's CUDA is a stand-in.

There, torch's tensors over device memory are the memory that it is, and each copy of a session says to the fake, as a
kernel on torch's current stream, which bytes it uses. Order is judged exactly; torch's own CUDA has run nowhere.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import DeviceLost, UsageError  # noqa: E402
from kvtier.integrations.transformers import PrefixSession, session, slots  # noqa: E402
from tests.fakecuda.fake import FakeCuda, fake_cuda  # noqa: E402
from tests.tiny_llama import BLOCK_TOKENS, config_of, prompt_of, tiny_llama  # noqa: E402

__all__ = ["fake_cuda"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(100)]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


class Streams:
    """torch.cuda, as far as a session uses it, on streams of the fake. Each thread has one of its own by default."""

    def __init__(self, tier: Any) -> None:
        self.streams = tier._cuda.streams
        self._here = threading.local()
        self.Event = self._event

    def current_stream(self, device: Any = None) -> Any:
        if not hasattr(self._here, "stream"):
            self.streams.bind_thread()
            self._here.stream = self.streams.make_stream()
        return self._here.stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before

    def _event(self) -> Any:
        event = self.streams.make_event()
        return SimpleNamespace(cuda_event=event.key, record=lambda stream: self.streams.record(event, stream))


class Torch:
    """torch, with that in place of its CUDA."""

    def __init__(self, cuda: Streams) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def from_dlpack(view: Any) -> Any:
    """A tensor over an array of CuPy's, as the memory that it is."""
    length_bytes = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
    memory = (ctypes.c_ubyte * (length_bytes + view.itemsize)).from_address(view.data.ptr)
    return torch.from_numpy(np.ndarray(view.shape, view.dtype.name, memory, 0, view.strides))


class Stated(slots.CudaSlots):
    """Says to the fake what each copy uses, on the stream on which torch would launch it."""

    def __init__(self, cuda: Streams, fake: FakeCuda) -> None:
        super().__init__(torch.device("cpu"))
        self._cuda, self._fake = cuda, fake

    def gather(self, view: Any, slots: Any, row: Any) -> None:
        self._state(view, slots[: -(-row.shape[0] // BLOCK_TOKENS)], writes=False)
        super().gather(view, slots, row)

    def scatter(self, view: Any, slots: Any, row: Any) -> None:
        self._state(view, slots, writes=True)
        super().scatter(view, slots, row)

    def _state(self, view: Any, slots: Any, *, writes: bool) -> None:
        key = self._cuda.current_stream().key
        for slot in slots:
            address = int(view.data.ptr) + slot * view.strides[0]
            assert self._fake.kernel(key, address, view[0].nbytes, writes=writes) == 0, self._fake.report


class World:
    """A cache on the device, and sessions over it."""

    def __init__(self, cache: Any, cuda: Streams) -> None:
        self.cache, self.cuda = cache, cuda

    def settle(self) -> None:
        """Wait until all fences made so far have passed."""
        passed = kvtier.engine.oneshot.OneShot[None]()
        self.cache._engine.once_passed(None, lambda core, now_s: passed.send(None))
        passed.receive(30)


@pytest.fixture
def opened(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens caches on the device for sessions; nothing was out of order, and nothing is left leased."""
    made: list[World] = []

    def world(config: Any) -> World:
        cache = kvtier.open_sync(config)
        cuda = Streams(cache.top_tier)
        monkeypatch.setattr(slots, "torch", Torch(cuda))
        monkeypatch.setattr(slots, "from_dlpack", from_dlpack)
        monkeypatch.setattr(session, "slots_of", lambda cache, model: Stated(cuda, fake_cuda))
        made.append(World(cache, cuda))
        return made[-1]

    yield world
    fake_cuda.go_on()
    for each in made:
        if not each.cache._engine.closed:
            each.settle()
            assert each.cache.stats()["leases"] == 0
            assert each.cache.check() == []
            each.cache.close()
    assert fake_cuda.report == ""


def device_config(model: Any, folder: Path, **options: Any) -> Any:
    config = config_of(model, folder, **options)
    return replace(config, tiers=(config.tiers[0].model_copy(update={"device": "cuda"}), *config.tiers[1:]))


def generate(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def through(world: World, model: Any, prompt: Any) -> tuple[Any, PrefixSession]:
    with PrefixSession(world.cache, model, prompt) as within:
        output = generate(model, prompt, **within.generate_kwargs)
        within.commit(output)
    assert within.problem is None
    return output, within


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float32", "layer_token_major"), ("bfloat16", "layer_head_major"), ("float16", "token_major")],
)
def test_a_restored_prefix_answers_as_stock(opened: Any, tmp_path: Path, dtype: str, layout: str) -> None:
    """KV comes back from a device rounded, transposed, or of other slots, and the model says something else."""
    model = tiny_llama(getattr(torch, dtype))
    config = device_config(model, tmp_path, gpu_blocks=15, layout=layout)  # 21 slots, or 42 of half the size
    prompt = prompt_of(42)
    wanted = generate(model, prompt)
    world = opened(config)
    output, cold = through(world, model, prompt)
    assert torch.equal(output, wanted)
    assert (cold.tokens_restored, cold.tokens_committed) == (0, 44)  # of 47 tokens with KV
    for number in range(5):  # and the first prompt leaves the device
        assert world.cache.flush().failed == 0
        through(world, model, prompt_of(42, seed=number + 1))
    world.settle()
    output, warm = through(world, model, prompt)
    assert torch.equal(output, wanted)
    assert (warm.tokens_restored, warm.tokens_by_tier["gpu"]) == (40, 0)
    world.cache.close()
    output, late = through(opened(config), model, prompt)
    assert torch.equal(output, wanted)
    assert late.tokens_by_tier == {"gpu": 0, "host": 0, "lmdb": 40}


def test_a_batch_is_restored_up_to_a_column_inside_a_block(opened: Any, model: Any, tmp_path: Path) -> None:
    """The rows of a batch, which begin within a block, get their neighbours' tokens."""
    world = opened(device_config(model, tmp_path))
    prompts = torch.cat([prompt_of(40), prompt_of(40, seed=1)])
    prompts[1, :2], mask = 1, torch.ones_like(prompts)
    mask[1, :2] = 0
    wanted = generate(model, prompts, attention_mask=mask)
    for restored in (0, 70):  # 36 tokens of the first row, in columns where the second has 34
        with PrefixSession(world.cache, model, prompts, attention_mask=mask) as within:
            output = generate(model, prompts, **within.generate_kwargs)
        assert within.problem is None
        assert torch.equal(output, wanted)
        assert within.tokens_restored == restored
        world.settle()


def test_blocks_are_found_only_when_their_copies_are_over(
    opened: Any, model: Any, tmp_path: Path, fake_cuda: FakeCuda
) -> None:
    """Another session, or a copy down, reads slots that torch has yet to write."""
    world = opened(device_config(model, tmp_path))
    prompt = prompt_of(42)
    keys = kvtier.hash_blocks(prompt[0].tolist(), world.cache.config.model)
    fake_cuda.hold(world.cuda.current_stream().key)
    _, within = through(world, model, prompt)
    assert within.tokens_committed == 44  # once, although it was committed twice before any of it was found
    assert world.cache.peek(keys).tokens == 0
    assert world.cache.stats()["leases"] == 1
    fake_cuda.go_on()
    world.settle()
    assert world.cache.peek(keys).tokens == 40
    assert world.cache.flush().failed == 0


def test_slots_are_not_given_away_while_they_are_read(
    opened: Any, model: Any, tmp_path: Path, fake_cuda: FakeCuda
) -> None:
    """A restored prefix is overwritten in its slots before torch has copied it out."""
    world = opened(device_config(model, tmp_path))
    prompt = prompt_of(42)
    through(world, model, prompt)
    world.settle()
    fake_cuda.hold(world.cuda.current_stream().key)
    with PrefixSession(world.cache, model, prompt) as within:
        assert within.tokens_restored == 40
        assert world.cache.stats()["leases"] == 1
        fake_cuda.go_on()
        world.settle()
        assert world.cache.stats()["leases"] == 0


def test_any_thread_may_commit(opened: Any, model: Any, tmp_path: Path) -> None:
    """Another thread's stream copies KV that the model is still computing, or nobody waits for what it copies."""
    world = opened(device_config(model, tmp_path))
    prompt = prompt_of(42)
    with PrefixSession(world.cache, model, prompt) as within:
        generate(model, prompt, **within.generate_kwargs)
        thread = threading.Thread(target=within.commit)
        thread.start()
        thread.join()
        assert (within.tokens_committed, within.problem) == (40, None)
    assert world.cache.flush().failed == 0  # the copy down is ordered behind the event, and meets no other stream's


def test_a_model_on_another_stream_is_refused(opened: Any, model: Any, tmp_path: Path) -> None:
    """The model reads a prefix that is still on its way, and says something wrong without an error."""
    world = opened(device_config(model, tmp_path))
    prompt = prompt_of(42)
    through(world, model, prompt)
    with PrefixSession(world.cache, model, prompt) as within:
        options = within.generate_kwargs
        with (
            world.cuda.stream(world.cuda.streams.make_stream()),
            pytest.raises(UsageError, match="another CUDA stream"),
        ):
            generate(model, prompt, **options)


def test_a_lost_device_costs_the_time_to_compute(opened: Any, model: Any, tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """An error of the cache's ends a `generate` that would have worked."""
    world = opened(device_config(model, tmp_path))
    prompt = prompt_of(42)
    world.cache.lose_device()
    with PrefixSession(world.cache, model, prompt) as within:
        output = generate(model, prompt, **within.generate_kwargs)
    assert torch.equal(output, generate(model, prompt))
    assert DeviceLost.__name__ in str(within.problem)


# ---------------------------------------------------------------- model and slots in different places


@pytest.mark.parametrize(("tier", "place"), [("cuda", "cpu"), ("cuda:1", "cuda:0"), ("cuda", "cuda:1")])
def test_slots_on_another_device_than_the_models_are_refused(tier: str, place: str) -> None:
    """KV is copied from or to an address of another device, or each session fails in the log only."""
    cache = SimpleNamespace(config=SimpleNamespace(tiers=[SimpleNamespace(device=tier)]))
    with pytest.raises(UsageError, match=f"the model is on {place}.*`device: host`"):
        slots.slots_of(cache, SimpleNamespace(device=torch.device(place)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tier", "place"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_slots_beside_the_model_are_used_where_they_are(tier: str, place: str) -> None:
    """KV takes the way through host memory although it lies beside the model."""
    cache = SimpleNamespace(config=SimpleNamespace(tiers=[SimpleNamespace(device=tier)]))
    made = slots.slots_of(cache, SimpleNamespace(device=torch.device(place)))  # type: ignore[arg-type]
    assert isinstance(made, slots.CudaSlots)


def test_a_session_refuses_slots_on_a_device_for_a_model_on_the_cpu(model: Any, tmp_path: Path) -> None:
    """The mismatch is found by nobody: every session computes all, and says so in a log."""
    cache = SimpleNamespace(config=device_config(model, tmp_path), reserve=None)
    with pytest.raises(UsageError, match="the model is on cpu"):
        PrefixSession(cache, model, prompt_of(8))  # type: ignore[arg-type]


class Far:
    """A tensor on a device, of which only what a copy through host memory takes is there."""

    def __init__(self, here: Any) -> None:
        self.here = here

    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:
        return self.here


def test_with_slots_in_host_memory_the_model_may_be_anywhere() -> None:
    """A model on a device finds its prefix on the CPU, or its KV is taken for memory of the CPU."""
    cache = SimpleNamespace(config=SimpleNamespace(tiers=[SimpleNamespace(device="auto")]))
    made: Any = slots.slots_of(cache, SimpleNamespace(device=torch.device("meta")))  # type: ignore[arg-type]
    rows = made.empty((2, 8, 2, 4), torch.float32)
    assert rows.device.type == "cpu"
    assert made.to_model(rows).device.type == "meta"
    view = np.zeros((5, 4, 2, 4), np.float32)
    row = torch.arange(64.0).view(2, 8, 4)
    made.scatter(view, (3, 1), Far(row))
    assert np.array_equal(view[3], row[:, :4].transpose(0, 1))
    assert np.array_equal(view[1], row[:, 4:].transpose(0, 1))
    assert made.event() is None
