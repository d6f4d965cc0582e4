"""A device over a coded host tier: the fake libcuda tells when something overlaps that must not."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.allocator.streams import Event
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError
from kvtier.tiers import device_coding
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.kernels.conftest import emulator
from tests.kernels.emulated import Emulator

__all__ = ["emulator", "fake_cuda"]
BLOCK_TOKENS, ROWS, BLOCK_BYTES = 4, 2 * 2 * 2 * 4, 4096
pytestmark = pytest.mark.timeout(60)


def config_of(path: Path, host: str, lmdb: str) -> Config:
    """31 blocks of 4 KiB on the device, more in host memory."""
    model = {"name": "m", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}
    tiers = [{"type": "gpu", "device": "cuda", "capacity": "128KiB"}]
    tiers += [{"type": "host", "capacity": "512KiB", "hugepages": "off", "codec": host}]
    tiers += [{"type": "lmdb", "capacity": "16MiB", "path": str(path), "codec": lmdb, "durability": "none"}]
    limits = {"load_deadline": "60s", "governor": False}
    return kvtier.load_config({"model": model | {"block_tokens": BLOCK_TOKENS}, "tiers": tiers, "limits": limits})


class Engine:
    """Somebody's kernels, on a stream of their own. Their values are such that no codec loses anything of them."""

    def __init__(self, config: Config, fake: FakeCuda) -> None:
        self.cache: Any = kvtier.open_sync(config)
        self.fake, self.config = fake, config
        self.largest = {"int8": 127, "fp8": 448}.get(config.model.codec, 127)
        self.tier = self.cache.top_tier
        self.streams = self.tier._cuda.streams
        self.stream = self.streams.make_stream()

    def content(self, number: int) -> bytes:
        values = np.random.default_rng(number).integers(-8, 8, (ROWS, 32)).astype(np.float32)
        values[:, 0] = self.largest  # so that the scale of each row is 1
        return values.tobytes()

    def address(self, slot: int) -> int:
        return int(self.tier._arena.address) + slot * int(self.tier.stride_bytes)

    def event(self) -> Event:
        event: Event = self.streams.make_event()
        self.streams.record(event, self.stream)
        return event

    def serve(self, number: int) -> bool:
        """One prompt of one block; whether it was restored, after looking at its bytes."""
        keys = Keys.opaque([[number.to_bytes(32, "little")]], self.config.model)
        lease = self.cache.reserve(self.cache.match(keys, "r"), 1)
        assert isinstance(lease, Lease)
        (slot,), restored = lease.slots(0), bool(lease.tokens_ready)
        if restored:
            assert ctypes.string_at(self.address(slot), BLOCK_BYTES) == self.content(number), number
        else:
            ctypes.memmove(self.address(slot), self.content(number), BLOCK_BYTES)
        assert self.fake.kernel(self.stream.key, self.address(slot), BLOCK_BYTES, writes=not restored) == 0
        event = self.event()
        if not restored:
            self.cache.commit(lease, [(slot, keys.groups[0][0])], after=event)
        self.cache.release(lease, after=event)
        return restored


@pytest.fixture(params=["on the device", "on the CPU"])
def opened(
    request: pytest.FixtureRequest, emulator: Emulator, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Opens engines; afterwards nothing overlapped on the device."""

    def images_for(architecture: str) -> Any:
        if request.param == "on the CPU":
            raise ConfigError("device", "no compiler", "Install one")
        return lambda variant: emulator.path(variant).read_bytes()

    monkeypatch.setattr(device_coding, "images_for", images_for)
    monkeypatch.setattr(device_coding, "SCRATCH_BYTES", 5000)  # four blocks at once
    made: list[Engine] = []

    def engine(config: Config) -> Engine:
        made.append(Engine(config, fake_cuda))
        return made[-1]

    yield engine
    for each in made:
        each.cache.close()
    assert fake_cuda.report == ""


@pytest.mark.parametrize(("host", "lmdb"), [("int8", "int8"), ("fp8", "fp8"), ("none", "int8"), ("none", "exp4")])
def test_a_device_over_coded_tiers(opened: Any, tmp_path: Path, host: str, lmdb: str) -> None:
    """Codes reach the device, or a slot is coded while a kernel still writes it."""
    config = config_of(tmp_path / "s", host, lmdb)
    engine = opened(config)
    for number in range(60):
        assert not engine.serve(number)
        if number % 8 == 7:
            assert engine.cache.flush().failed == 0
    assert [engine.serve(number) for number in range(60)] == [True] * 60
    assert engine.cache.close() == 0
    kernels = engine.fake.calls("cuLaunchKernel")
    assert (kernels > 0) == (host != "none" and engine.tier._coding is not None)
    later = opened(config)
    assert [later.serve(number) for number in range(60)] == [True] * 60


def test_scratch_memory_is_registered_with_the_device(opened: Any, tmp_path: Path) -> None:
    """Every coded block passes through the driver's own buffers, at a fraction of the speed; or twice over the link."""
    plain = opened(replace(config_of(tmp_path / "a", "none", "none")))
    pinned = len(plain.tier._pinned)
    plain.cache.close()
    coded = opened(config_of(tmp_path / "b", "int8", "int8"))
    assert len(coded.tier._pinned) - pinned == (4 if coded.tier._coding is None else 0)


@pytest.mark.parametrize("opened", ["on the device"], indirect=True)
@pytest.mark.parametrize(
    ("call", "nth"), [("cuLaunchKernel", 1), ("cuMemcpyBatchAsync", 2), ("cuStreamSynchronize", 1)]
)
@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_call_that_fails_half_way_leaves_nothing_running(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, direction: str
) -> None:
    """A late kernel writes into a slot, or a late copy into host memory, that is somebody else's by then."""
    engine = opened(config_of(tmp_path / "s", "int8", "int8"))
    for number in range(60):
        assert not engine.serve(number)
        if number % 8 == 7:
            engine.cache.flush()
    lane = engine.tier._coding._lanes[direction == "up"]
    finish, finished = engine.streams.finish, []

    def go_on_and_finish(stream: Any) -> None:
        finished.append(stream)
        engine.fake.go_on(stream.key)
        finish(stream)

    monkeypatch.setattr(engine.streams, "finish", go_on_and_finish)
    coding, verb = engine.tier._coding, "write" if direction == "up" else "read"
    carry_out, at_failure = getattr(coding, verb), []

    def watched(items: Any) -> Any:
        try:
            return carry_out(items)
        except KvtierError:
            at_failure.append(finished.count(lane.stream))
            raise

    monkeypatch.setattr(coding, verb, watched)
    engine.fake.hold(lane.stream.key)
    engine.fake.fault(call, 1, nth=nth)
    if direction == "up":
        assert not engine.serve(0)
    else:
        assert not engine.serve(60)
        engine.cache.flush()
    assert at_failure == [1 + (call == "cuStreamSynchronize")]
    engine.fake.go_on(lane.stream.key)
    assert [engine.serve(number) for number in range(30, 60)] == [True] * 30
