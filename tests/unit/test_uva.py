"""`access: uva`: attention reads host memory in place, and gives what it gives over copies, to the bit."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.errors import ConfigError, UsageError
from kvtier.kernels import launch_attention
from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.launch_attention import BatchOnDevice, shape_over
from kvtier.kernels.reference import ReferenceKernels
from tests.cache_bench import BLOCK_TOKENS, LAYERS, config_for, prompt
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.kernels.emulated import Emulator

__all__ = ["fake_cuda"]
HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 64
SHAPE = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "float16"}  # 6 KiB a block; in host memory slots of 8
BLOCKS = 6
pytestmark = pytest.mark.timeout(100)


def uva_config(path: Path, access: str, device: str = "host", **changes: Any) -> Any:
    config = config_for(path, gpu="256KiB", host="512KiB", model=SHAPE | changes)
    gpu = config.tiers[0].model_copy(update={"access": access, "device": device})
    return replace(config, tiers=(gpu, *config.tiers[1:]))


def values_of(key: bytes, layer: int, part: int) -> Any:
    rng = np.random.default_rng([*key[:8], layer, part])
    return rng.standard_normal((BLOCK_TOKENS, KV_HEADS, HEAD_DIM), np.float32).astype(np.float16)


def write(cache: Any, lease: Lease, keys: Keys) -> list[tuple[int, Any]]:
    """Compute what is not restored; the pairs to commit."""
    pairs = list(zip(lease.table(), keys.groups[0], strict=True))[lease.tokens_ready // BLOCK_TOKENS :]
    for layer in range(LAYERS):
        kv = on_cpu(cache.paged_kv(0, layer))
        for slot, key in pairs:
            kv.keys[slot], kv.values[slot] = values_of(key, layer, 0), values_of(key, layer, 1)
    return pairs


def on_cpu(kv: PagedKv) -> PagedKv:
    """The same memory as numpy's arrays: that of the fake device can be reached."""
    return PagedKv(*(None if array is None else _on_cpu(array) for array in _arrays(kv)))


def _arrays(kv: PagedKv) -> tuple[Any, ...]:
    return kv.keys, kv.values, kv.host_keys, kv.host_values


def _on_cpu(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    span = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    raw = (ctypes.c_char * span).from_address(array.data.ptr)
    return np.ndarray(array.shape, str(array.dtype), raw, 0, array.strides)


def question(lease: Lease) -> tuple[Any, Batch]:
    """A decode step and some tokens of a prefill, over the whole prompt: queries and their batch."""
    tokens = BLOCKS * BLOCK_TOKENS
    table = np.array([lease.table()] * 2, np.int32)
    starts, positions = np.array([0, 1, 4], np.int32), np.array([tokens - 1, tokens - 3], np.int32)
    queries = np.random.default_rng(7).standard_normal((4, HEADS, HEAD_DIM), np.float32).astype(np.float16)
    return queries, Batch(starts, positions, np.array([tokens] * 2, np.int32), table)


def asked(cache: Any, lease: Lease) -> list[Any]:
    """Results and log-sum-exps of every layer."""
    queries, batch = question(lease)
    layers = [on_cpu(cache.paged_kv(0, layer)) for layer in range(LAYERS)]
    return [part for kv in layers for part in ReferenceKernels().attend(queries, kv, batch)]


def prepared(config: Any, fake: FakeCuda | None = None) -> tuple[Any, Keys, Any]:
    """A cache whose prompt lies, but for its last blocks, in host memory alone; its keys, and what makes events."""
    cache = kvtier.open_sync(config)
    streams = cache.top_tier._cuda.streams if fake else None  # type: ignore[union-attr]
    stream = streams.make_stream() if streams else None

    def event() -> Any:
        made = streams.make_event() if streams else None
        if streams:
            streams.record(made, stream)
        return made

    keys = prompt(config, 1, BLOCKS)
    for each in (keys.prefix(4 * BLOCK_TOKENS), *(prompt(config, number, 4) for number in range(60, 72))):
        serve(cache, each, event)
    assert cache.peek(keys).tiers == {"gpu": 0, "host": 4 * BLOCK_TOKENS, "lmdb": 0}
    return cache, keys, event


def serve(cache: Any, keys: Keys, event: Any) -> None:
    lease = cache.reserve(cache.match(keys, "req"), len(keys.groups[0]))
    cache.commit(lease, write(cache, lease, keys), after=event())
    cache.release(lease, after=event())
    cache.flush()


def leased(cache: Any, keys: Keys, event: Any) -> Lease:
    """The whole prompt: what is restored, and two blocks more."""
    lease: Lease = cache.reserve(cache.match(keys, "req"), BLOCKS)
    assert lease.tokens_ready == 4 * BLOCK_TOKENS
    cache.commit(lease, write(cache, lease, keys), after=event())
    return lease


@pytest.fixture
def on_device(fake_cuda: FakeCuda) -> Iterator[FakeCuda]:
    pytest.importorskip("cupy")
    fake_cuda.set_attribute(HOST_POINTERS, 1)
    yield fake_cuda
    assert fake_cuda.report == ""


def answers(config: Any, fake: FakeCuda | None = None) -> tuple[list[Any], list[bool]]:
    """What attention over the prompt gives, and which of its blocks were read in host memory."""
    cache, keys, event = prepared(config, fake)
    with cache:
        lease = leased(cache, keys, event)
        found = asked(cache, lease), [entry < 0 for entry in lease.table()]
        cache.release(lease, after=event())
        cache.flush()
        assert cache.check() == []
        assert cache.stats()["leases"] == 0
    return found


IN_PLACE = [True] * 4 + [False] * 2


@pytest.mark.parametrize("layout", ["layer_token_major", "layer_head_major", "token_major"])
def test_attention_in_place_is_attention_over_copies(tmp_path: Path, layout: str) -> None:
    """A block is found in a wrong slot of host memory, or with other strides."""
    copied, of_copies = answers(uva_config(tmp_path / "a", "copy", layout=layout))
    in_place, of_uva = answers(uva_config(tmp_path / "b", "uva", layout=layout))
    assert (of_copies, of_uva) == ([False] * BLOCKS, IN_PLACE)
    assert all(np.isfinite(part).all() for part in copied)
    assert [a.tobytes() for a in copied] == [b.tobytes() for b in in_place]


def test_on_a_device_too(tmp_path: Path, on_device: FakeCuda) -> None:
    """The device's and the host's pools are taken for each other, or are not where the kernels look."""
    copied, _ = answers(uva_config(tmp_path / "a", "copy", "cuda"), on_device)
    in_place, table = answers(uva_config(tmp_path / "b", "uva", "cuda"), on_device)
    assert table == IN_PLACE
    assert [a.tobytes() for a in copied] == [b.tobytes() for b in in_place]


def test_the_kernel_reads_both_pools(tmp_path: Path, on_device: FakeCuda, tmp_path_factory: Any) -> None:
    """The record of addresses that `shape_over` makes leads the device's kernel elsewhere."""
    cache, keys, event = prepared(uva_config(tmp_path / "a", "uva", "cuda"), on_device)
    emulator = Emulator(tmp_path_factory.mktemp("kernels"))
    with cache:
        lease = leased(cache, keys, event)
        queries, batch = question(lease)
        kv = cache.paged_kv(0, 1)
        shape = shape_over(kv, HEADS, BLOCKS)
        assert shape.device_stride != shape.host_stride
        shape.split_tokens = 1 << 20
        out, sums = np.zeros((1, 4, HEADS, HEAD_DIM), np.float32), np.zeros((1, 4, HEADS), np.float32)
        at = [array.ctypes.data for array in (batch.query_starts, batch.positions, batch.kv_tokens, batch.tables)]
        here = BatchOnDevice(*at, 2, 4, 3, BLOCKS * BLOCK_TOKENS)
        places = [array.ctypes.data for array in (out, sums, queries)]
        emulator.run(launch_attention.attend(*places, here, shape, dtype="float16", head_dim=HEAD_DIM))
        wanted, wanted_sums = ReferenceKernels().attend(queries, on_cpu(kv), batch)
        assert np.allclose(out[0], wanted, rtol=1e-4, atol=2e-6)
        assert np.allclose(sums[0], wanted_sums, rtol=1e-5, atol=1e-5)
        cache.release(lease, after=event())
        cache.flush()


def test_host_slots_are_held_until_the_kernels_that_read_them_are_over(tmp_path: Path, on_device: FakeCuda) -> None:
    """A host slot is filled with another block while a kernel reads it over the link."""
    cache, keys, event = prepared(uva_config(tmp_path / "a", "uva", "cuda"), on_device)
    with cache:
        lease = leased(cache, keys, event)
        streams = cache.top_tier._cuda.streams
        reader = streams.make_stream()
        on_device.hold(reader.key)
        kv = cache.paged_kv()
        for entry in lease.table()[:4]:
            address = kv.host_keys[~entry].ctypes.data
            assert on_device.kernel(reader.key, address, 64, writes=False) == 0
        behind = streams.make_event()
        streams.record(behind, reader)
        cache.release(lease, after=behind)
        assert cache.stats()["leases"] == 1
        held = cache.stats()["tiers"]["host"]
        assert held["blocks"] - held["blocks_idle"] == 4
        on_device.go_on(reader.key)
        cache.flush()
        assert cache.stats()["leases"] == 0


# ---------------------------------------------------------------- refused


def test_views_for_other_kernels_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Somebody's attention reads slots by negative numbers, from the end of the pool."""
    with kvtier.open_sync(uva_config(tmp_path / "a", "uva")) as cache:
        with pytest.raises(UsageError, match=r"lies in host memory.*paged_kv"):
            cache.kv()
        with pytest.raises(UsageError, match="no layer 7"):
            cache.paged_kv(0, 7)
        assert cache.paged_kv().host_keys.shape == (64, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    with kvtier.open_sync(uva_config(tmp_path / "b", "copy")) as cache:
        kv = cache.paged_kv()
        assert kv.host_keys is None
        assert np.shares_memory(kv.keys, cache.kv()["k"])


@pytest.mark.parametrize(
    ("group", "tiers", "text"),
    [
        ({}, ["gpu"], "no host tier lies below"),
        ({"kind": "mla", "kv_heads": 1}, ["gpu", "host"], "none reads mla groups"),
        ({"dtype": "float8_e4m3"}, ["gpu", "host"], "none reads full groups of float8_e4m3"),
    ],
)
def test_what_no_kernel_can_read_in_place_is_refused(group: Any, tiers: list[str], text: str) -> None:
    """A model starts in a mode in which nothing can read its blocks."""
    shape = {"kind": "full", "layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32"} | group
    model = {"name": "m", "weights_epoch": "v1", "groups": [shape]}
    rows: list[dict[str, Any]] = [{"type": kind, "capacity": "8MiB"} for kind in tiers]
    rows[0]["access"] = "uva"
    with pytest.raises(ConfigError, match=text) as caught:
        kvtier.load_config({"model": model, "tiers": rows})
    assert caught.value.path == "tiers[0].access"


def test_a_device_that_cannot_read_host_memory_is_refused(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """Kernels follow addresses that mean nothing to the device."""
    fake_cuda.set_attribute(HOST_POINTERS, 0)
    with pytest.raises(ConfigError, match="by its own addresses") as caught:
        kvtier.open_sync(uva_config(tmp_path / "a", "uva", "cuda"))
    assert caught.value.path == "tiers[0].access"


def test_memory_that_cannot_be_registered_is_refused(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """Copies are slower without it; reading in place is an error of the device."""
    fake_cuda.set_attribute(HOST_POINTERS, 1)
    fake_cuda.fault("cuMemHostRegister_v2", 801)
    with pytest.raises(ConfigError, match="cannot read tier host in place"):
        kvtier.open_sync(uva_config(tmp_path / "a", "uva", "cuda"))


def test_pools_that_do_not_lie_alike_are_refused() -> None:
    """One of the two pools is read with the other's strides."""
    pool, other = np.zeros((3, 2, 4, 2, 64), np.float32), np.zeros((3, 2, 4, 3, 64), np.float32)[:, :, :, :2]
    alike = PagedKv(pool[:, 0], pool[:, 1], pool[:, 0], pool[:, 1])
    assert shape_over(alike, 4, 2).keys_to_values == pool[0, 0].nbytes
    assert shape_over(PagedKv(pool[:, 0], pool[:, 1]), 4, 2).host_keys == 0
    for wrong in (PagedKv(pool[:, 0], pool[:, 1], other[:, 0], other[:, 1]), replace(alike, host_values=pool[:, 0])):
        with pytest.raises(UsageError, match="must lie alike"):
            shape_over(wrong, 4, 2)


def test_views_of_slots_are_refused_where_blocks_have_none() -> None:
    """A sequence view is promised of blocks that stay in host memory, and fails on the first hit."""
    model = {"name": "m", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    gpu = {"type": "gpu", "capacity": "8MiB", "access": "uva", "sequence_views": True}
    with pytest.raises(ConfigError, match="sequence_views show slots") as caught:
        kvtier.load_config(
            {"model": model | {"layout": "token_major"}, "tiers": [gpu, {"type": "host", "capacity": "8MiB"}]}
        )
    assert caught.value.path == "tiers[0].access"
