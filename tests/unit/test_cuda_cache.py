"""The whole cache with its top tier on a device: the fake libcuda tells when something overlaps that must not."""

import asyncio
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import kvtier
from kvtier.allocator.streams import Event, Stream
from kvtier.cache.leases import Lease
from kvtier.errors import Asleep, ConfigError, DeviceLost, UsageError
from kvtier.tiers.host import HostTier
from tests.cache_bench import BLOCK_TOKENS, config_for, prompt
from tests.fakecuda.fake import CAPACITY_GRANULES, GRANULE_BYTES, FakeCuda, fake_cuda

__all__ = ["fake_cuda"]
BLOCK_BYTES = 2048
pytestmark = pytest.mark.timeout(60)


def device_config(path: Any = None, gpu: str = "64KiB", **changes: Any) -> Any:
    """Blocks of 2 KiB: 31 usable slots on the device, 32 in host memory, unless told otherwise."""
    config = config_for(path, gpu=gpu, **changes)
    tiers = (config.tiers[0].model_copy(update={"device": "cuda"}), *config.tiers[1:])
    return replace(config, tiers=tiers)


class Model:
    """Somebody's kernels: they write and read slots on a stream of their own, when the fake carries them out."""

    def __init__(self, cache: Any, fake: FakeCuda) -> None:
        self.cache, self.fake = cache, fake
        self.tier = cache.top_tier
        self.streams = self.tier._cuda.streams
        self.stream: Stream = self.streams.make_stream()

    def address(self, slot: int) -> int:
        return int(self.tier._arena.address) + slot * int(self.tier.stride_bytes)

    def event(self) -> Event:
        event: Event = self.streams.make_event()
        self.streams.record(event, self.stream)
        return event

    def compute(self, lease: Lease, keys: Any) -> list[tuple[int, Any]]:
        """Read what is restored, write the rest; the pairs to commit."""
        first = lease.tokens_ready // BLOCK_TOKENS
        pairs = list(zip(lease.slots(0), keys.groups[0], strict=False))
        for index, (slot, key) in enumerate(pairs):
            writes = index >= first
            if not writes:
                assert self.bytes(slot) == content(key)
            else:
                self.fill(slot, content(key))
            assert self.fake.kernel(self.stream.key, self.address(slot), BLOCK_BYTES, writes=writes) == 0
        return pairs[first:]

    def fill(self, slot: int, payload: bytes) -> None:
        self.tier._cuda._calls("cuMemcpyHtoD", self.address(slot), payload, len(payload))

    def bytes(self, slot: int) -> bytes:
        found = ctypes.create_string_buffer(BLOCK_BYTES)
        self.tier._cuda._calls("cuMemcpyDtoH", ctypes.addressof(found), self.address(slot), BLOCK_BYTES)
        return found.raw

    def reserve(self, keys: Any, owner: str = "req") -> Lease:
        lease = self.cache.reserve(self.cache.match(keys, owner), len(keys.groups[0]))
        assert isinstance(lease, Lease)
        return lease

    def serve(self, keys: Any) -> int:
        """A whole request; how many tokens were restored."""
        lease = self.reserve(keys)
        ready = lease.tokens_ready
        pairs = self.compute(lease, keys)
        event = self.event()
        self.cache.commit(lease, pairs, after=event)
        self.cache.release(lease, after=event)
        return ready

    def settle(self) -> None:
        """Wait until all fences made so far have passed."""
        passed = kvtier.engine.oneshot.OneShot[None]()
        self.cache._engine.once_passed(None, lambda core, now_s: passed.send(None))
        passed.receive(30)


def content(key: bytes) -> bytes:
    return (key * BLOCK_BYTES)[:BLOCK_BYTES]


@pytest.fixture(params=["plain", "strict"])
def memory(request: pytest.FixtureRequest, fake_cuda: FakeCuda) -> None:
    """Device memory that the CPU reaches, too, and such that faults when it tries, as on a card."""
    fake_cuda.configure(CAPACITY_GRANULES * GRANULE_BYTES, GRANULE_BYTES, strict=request.param == "strict")


@pytest.fixture
def opened(fake_cuda: FakeCuda) -> Iterator[Any]:
    """Opens caches with a model each; afterwards nothing overlapped, and the books agree."""
    made = []

    def model(config: Any) -> Model:
        cache = kvtier.open_sync(config)
        made.append(Model(cache, fake_cuda))
        return made[-1]

    yield model
    for each in made:
        if not each.cache._engine.closed:
            fake_cuda.go_on()
            each.settle()
            assert each.cache.check() == []
            assert each.cache.stats()["leases"] == 0
            each.cache.close()
    assert fake_cuda.report == ""


def test_blocks_go_down_and_come_back_also_in_a_new_process(memory: None, opened: Any, tmp_path: Any) -> None:
    """A prefix on a device is lost, comes back as other bytes, or the CPU reaches for device memory and crashes."""
    config = device_config(tmp_path / "store")
    model = opened(config)
    keys = [prompt(config, number, 6) for number in range(20)]  # 120 blocks through 31 slots
    for each in keys:
        assert model.serve(each) == 0
        assert model.cache.flush().failed == 0
    found = [model.serve(each) for each in keys]
    assert found == [6 * BLOCK_TOKENS] * 20
    assert model.cache.close() == 0
    later = opened(config)
    assert [later.serve(each) for each in keys] == [6 * BLOCK_TOKENS] * 20


def test_a_commit_is_found_only_when_its_kernel_is_over(memory: None, opened: Any, fake_cuda: FakeCuda) -> None:
    """A second request reads blocks that are still being computed."""
    config = device_config()
    model, keys = opened(config), prompt(config, 1, 4)
    lease = model.reserve(keys)
    fake_cuda.hold(model.stream.key)
    pairs = model.compute(lease, keys)
    event = model.event()
    model.cache.commit(lease, pairs, after=event)
    model.cache.release(lease, after=event)
    assert model.cache.peek(keys).tokens == 0
    assert model.cache.stats()["leases"] == 1
    fake_cuda.go_on(model.stream.key)
    model.settle()
    assert model.cache.peek(keys).tokens == 16
    assert model.cache.stats()["leases"] == 0


def test_slots_are_not_given_away_while_a_kernel_reads_them(opened: Any, fake_cuda: FakeCuda) -> None:
    """A released slot is written by a load while the last attention kernel still reads it."""
    config = device_config()
    model = opened(config)
    old, new = prompt(config, 1, 20), prompt(config, 2, 20)
    model.serve(old)
    model.settle()
    lease = model.reserve(old)
    fake_cuda.hold(model.stream.key)
    model.compute(lease, old)
    model.cache.release(lease, after=model.event())
    assert not isinstance(model.cache.reserve(model.cache.match(new, "req"), 20), Lease)
    fake_cuda.go_on(model.stream.key)
    model.settle()
    assert model.serve(new) == 0


def test_flush_covers_what_was_committed_behind_work_that_is_not_over(
    opened: Any, fake_cuda: FakeCuda, tmp_path: Any
) -> None:
    """`flush` returns, and blocks that were committed before it are on no disk."""
    config = device_config(tmp_path / "store")
    model, keys = opened(config), prompt(config, 1, 4)
    for _ in range(3):
        fake_cuda.hold(model.stream.key)
        model.serve(keys)
        with pytest.raises(TimeoutError):
            model.cache.flush(timeout_s=0.01)
        fake_cuda.go_on(model.stream.key)
        assert model.cache.flush().failed == 0
        assert model.cache.peek(keys).tokens == 16
        model.cache.reset()
        assert model.cache.peek(keys).tokens == 0


def test_what_was_committed_before_a_reset_stays_forgotten(opened: Any, fake_cuda: FakeCuda) -> None:
    """A block of the old weights appears after the reset, when its kernel has ended."""
    config = device_config()
    model, keys = opened(config), prompt(config, 1, 4)
    fake_cuda.hold(model.stream.key)
    model.serve(keys)
    model.cache.reset()
    fake_cuda.go_on(model.stream.key)
    model.settle()
    assert model.cache.peek(keys).tokens == 0
    assert model.cache.stats()["stale_commits"] == 4


def test_a_commit_whose_owner_died_publishes_nothing(opened: Any, fake_cuda: FakeCuda) -> None:
    """The slots of a dead owner, which have another block by now, get its block's name."""
    config = device_config()
    model, keys = opened(config), prompt(config, 1, 4)
    lease = model.reserve(keys, "dead")
    fake_cuda.hold(model.stream.key)
    pairs = model.compute(lease, keys)
    model.cache.commit(lease, pairs, after=model.event())
    fake_cuda.go_on(model.stream.key)  # its death is proven by its stream's end, say
    model.streams.finish(model.stream)
    model.cache.release_owner("dead")
    model.settle()
    assert model.cache.peek(keys).tokens in (0, 16)
    assert model.cache.stats()["leases"] == 0


def test_mistakes_are_told_at_once(opened: Any, fake_cuda: FakeCuda) -> None:
    """A wrong commit is swallowed later, on a thread that nobody reads the log of."""
    config = device_config()
    model, keys, others = opened(config), prompt(config, 1, 2), prompt(config, 2, 2)
    lease = model.reserve(keys)
    slots = lease.slots(0)
    with pytest.raises(UsageError, match="pass the event"):
        model.cache.commit(lease, [(slots[0], keys.groups[0][0])])
    with pytest.raises(UsageError, match="pass the event"):
        model.cache.release(lease)
    with pytest.raises(UsageError, match="does not belong to lease"):
        model.cache.commit(lease, [(29, keys.groups[0][0])], after=model.event())
    fake_cuda.hold(model.stream.key)
    assert fake_cuda.kernel(model.stream.key, model.address(slots[0]), 8, writes=True) == 0
    model.cache.commit(lease, [(slots[0], keys.groups[0][0])], after=model.event())
    with pytest.raises(UsageError, match="under another key"):
        model.cache.commit(lease, [(slots[0], others.groups[0][0])], after=model.event())
    with pytest.raises(UsageError, match="pass a Lease or a Match"):
        model.cache.release("lease")
    other = opened(device_config())
    with pytest.raises(UsageError, match="another cache"):
        other.cache.release(lease, after=other.event())
    fake_cuda.go_on(model.stream.key)
    model.cache.release(lease, after=model.event())
    model.cache.release(lease, after=model.event())


def test_a_lost_device_is_told_and_what_lies_below_is_kept(opened: Any, fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """A kernel that went astray takes the whole cache with it, or wrong bytes are saved."""
    config = device_config(tmp_path / "store")
    model = opened(config)
    saved, lost = prompt(config, 1, 4), prompt(config, 2, 4)
    model.serve(saved)
    assert model.cache.flush().failed == 0
    lease = model.reserve(lost)
    pairs = model.compute(lease, lost)
    event = model.event()
    model.streams.finish(model.stream)
    fake_cuda.lose()
    with pytest.raises(DeviceLost):
        model.cache.commit(lease, pairs, after=event)
    model.cache.lose_device()
    with pytest.raises(DeviceLost):
        model.cache.reserve(model.cache.match(lost, "req"), 4)
    assert model.cache.peek(saved).tiers["host"] == 16
    assert model.cache.peek(lost).tokens == 0
    assert model.cache.close() == 0


def test_a_device_lost_behind_a_fence_is_noticed(opened: Any, fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """Blocks of a kernel that failed are published."""
    config = device_config(tmp_path / "store")
    model, keys = opened(config), prompt(config, 1, 4)
    lease = model.reserve(keys)
    fake_cuda.hold(model.stream.key)
    pairs = model.compute(lease, keys)
    model.cache.commit(lease, pairs, after=model.event())
    fake_cuda.lose()
    fake_cuda.go_on(model.stream.key)
    model.settle()
    assert model.cache.peek(keys).tokens == 0
    with pytest.raises(DeviceLost):
        model.cache.reserve(model.cache.match(keys, "req"), 4)
    assert model.cache.close() == 0


def test_it_shrinks_and_grows_between_requests(memory: None, opened: Any, fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """Memory that an engine asks back stays taken, or a block is lost with its page."""
    config = device_config(tmp_path / "store", gpu="256KiB")
    model = opened(config)
    keys = [prompt(config, number, 10) for number in range(10)]
    for each in keys:
        model.serve(each)
    model.settle()
    assert model.cache.resize("gpu", GRANULE_BYTES) == GRANULE_BYTES
    assert fake_cuda.used_bytes == GRANULE_BYTES
    assert model.cache.flush().failed == 0
    assert model.cache.resize("gpu", 4 * GRANULE_BYTES) == 4 * GRANULE_BYTES
    assert [model.serve(each) for each in keys] == [40] * 10


@pytest.mark.parametrize(
    ("function", "nth", "granules"),
    [("cuMemCreate", 1, 1), ("cuMemCreate", 3, 3), ("cuMemMap", 2, 4), ("cuMemMap", 0, 1), ("cuMemSetAccess", 1, 4)],
)
def test_memory_that_runs_out_half_way_costs_only_what_is_missing(
    opened: Any, fake_cuda: FakeCuda, tmp_path: Any, function: str, nth: int, granules: int
) -> None:
    """A resize fails as a whole, tells more than there is, or cannot be repeated when there is memory again."""
    model = opened(device_config(tmp_path / "store", gpu="256KiB"))
    cache = model.cache
    assert cache.resize("gpu", GRANULE_BYTES) == GRANULE_BYTES
    fake_cuda.fault(function, 2, nth=nth)
    assert cache.resize("gpu", 4 * GRANULE_BYTES) == fake_cuda.used_bytes == granules * GRANULE_BYTES
    stats = cache.stats()["tiers"]["gpu"]
    assert stats["no_memory"] == (granules < 4)
    assert stats["slots"] * 2048 == granules * GRANULE_BYTES
    assert model.tier.check() == []
    fake_cuda.fault(function, 0, nth=0)
    assert cache.resize("gpu", 4 * GRANULE_BYTES) == 4 * GRANULE_BYTES
    model.serve(prompt(cache.config, 1, 10))


def test_it_sleeps_and_wakes_between_requests(opened: Any, fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """A device's memory is not given back, a kernel's pointer is wrong afterwards, or blocks are lost."""
    config = device_config(tmp_path / "store", gpu="256KiB")
    model = opened(config)
    keys = [prompt(config, number, 10) for number in range(10)]
    for each in keys:
        model.serve(each)
    address = model.address(0)
    slept = model.cache.sleep()
    assert (slept.bytes_freed, slept.blocks_dropped) == (4 * GRANULE_BYTES, 0)
    assert fake_cuda.used_bytes == 0
    with pytest.raises(Asleep):
        model.reserve(keys[0])
    assert model.cache.peek(keys[0]).tokens == 40
    fake_cuda.fault("cuMemMap", 2, nth=3)
    woken = model.cache.wake()
    assert (woken.bytes, woken.bytes_missing) == (4 * GRANULE_BYTES, 0)
    assert model.address(0) == address
    model.cache.flush()
    assert [model.serve(each) for each in keys] == [40] * 10
    model.settle()
    fake_cuda.fault("cuMemCreate", 2, nth=2)
    model.cache.sleep()
    woken = model.cache.wake(restore=False)
    assert (woken.bytes, woken.bytes_missing) == (GRANULE_BYTES, 3 * GRANULE_BYTES)
    assert model.cache.wake().bytes_missing == 0


def test_closing_asleep_saves_all(opened: Any, fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """Who closes a sleeping cache loses what lay in it."""
    config = device_config(tmp_path / "store")
    model, keys = opened(config), prompt(config, 1, 10)
    model.serve(keys)
    model.cache.sleep()
    assert model.cache.close() == 0
    assert opened(config).serve(keys) == 40


@pytest.mark.parametrize("verb", ["sleep", "resize"])
def test_a_device_that_dies_while_its_memory_goes_is_told(
    opened: Any, fake_cuda: FakeCuda, tmp_path: Any, verb: str
) -> None:
    """Who asked for memory hears of bytes, and the next one gets slots of a dead device."""
    model = opened(device_config(tmp_path / "store", gpu="256KiB"))
    model.serve(keys := prompt(model.cache.config, 1, 4))
    model.settle()
    model.cache.flush()
    fake_cuda.fault("cuMemUnmap", 700)
    with pytest.raises(DeviceLost):
        model.cache.sleep() if verb == "sleep" else model.cache.resize("gpu", GRANULE_BYTES)
    with pytest.raises(DeviceLost):
        model.reserve(keys)
    assert model.cache.close() == 0


async def test_sleep_waits_for_the_kernels_of_leases_that_were_given_back(fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """Memory goes under a kernel, or who has released everything is refused."""
    config = device_config(tmp_path / "store")
    async with kvtier.open(config) as cache:
        model, keys = Model(cache, fake_cuda), prompt(config, 1, 4)
        lease = await cache.reserve(cache.match(keys, "req"), 4)
        with pytest.raises(UsageError, match="'req'"):
            await cache.sleep()
        fake_cuda.hold(model.stream.key)
        cache.commit(lease, model.compute(lease, keys), after=(event := model.event()))
        cache.release(lease, after=event)
        sleeping = asyncio.create_task(cache.sleep())
        await asyncio.sleep(0)
        assert fake_cuda.used_bytes == GRANULE_BYTES
        fake_cuda.go_on(model.stream.key)
        assert (await sleeping).bytes_freed == GRANULE_BYTES
        assert fake_cuda.used_bytes == 0
        assert (await cache.wake()).bytes == GRANULE_BYTES
    assert fake_cuda.report == ""


async def test_the_asyncio_face_waits_for_fences_too(fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """`await flush()` returns before a commit whose kernel still runs, or blocks the loop until it has."""
    config = device_config(tmp_path / "store")
    async with kvtier.open(config) as cache:
        model, keys = Model(cache, fake_cuda), prompt(config, 1, 4)
        lease = await cache.reserve(cache.match(keys, "req"), 4)
        fake_cuda.hold(model.stream.key)
        pairs = model.compute(lease, keys)
        cache.commit(lease, pairs, after=(event := model.event()))
        cache.release(lease, after=event)
        flushing = asyncio.create_task(cache.flush())
        await asyncio.sleep(0)
        assert cache.peek(keys).tokens == 0
        fake_cuda.go_on(model.stream.key)
        assert (await flushing).blocks == 4
        assert cache.peek(keys).tiers["gpu"] == 16
    assert fake_cuda.report == ""


def test_a_disk_directly_below_a_device_is_refused(fake_cuda: FakeCuda, tmp_path: Any) -> None:
    """Blocks never leave the device, or its address is handed to a disk."""
    with pytest.raises(ConfigError, match="Put a host tier between") as caught:
        kvtier.open_sync(device_config(tmp_path / "store", host=None))
    assert caught.value.path == "tiers[1].type"


def test_without_a_driver_it_says_what_to_do() -> None:
    """`device: cuda` on a machine without one ends in a traceback."""
    code = """
import kvtier
model = {"name": "m", "weights_epoch": "v1", "layers": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32"}
try:
    tiers = [{"type": "gpu", "capacity": "8MiB", "device": "cuda"}]
    kvtier.open_sync({"model": model | {"block_tokens": 16}, "tiers": tiers})
except kvtier.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tiers[0].device: ")
    assert "device: host" in done.stdout


def test_host_memory_is_registered_and_let_go_before_it_is_unmapped(
    opened: Any, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are copied at a fraction of the link's speed, or the device keeps addresses that are gone."""
    model, unregistered = opened(device_config()), []
    assert fake_cuda.calls("cuMemHostRegister_v2") == 1
    close = HostTier.close
    count = lambda tier: (unregistered.append(fake_cuda.calls("cuMemHostUnregister")), close(tier))  # noqa: E731
    monkeypatch.setattr(HostTier, "close", count)
    model.cache.close()
    assert unregistered == [1]


def test_a_refused_verb_gives_its_event_back(fake_cuda: FakeCuda) -> None:
    """Each mistake of an engine costs an event of the driver until the cache is closed."""
    with kvtier.open_sync(device_config()) as cache:
        model = Model(cache, fake_cuda)
        keys = prompt(cache.config, 1, 2)
        lease, event, made = model.reserve(keys), model.event(), []
        for _ in range(5):
            with pytest.raises(UsageError):
                cache.commit(lease, [(29, keys.groups[0][0])], after=event)
            cache.flush()  # behind all fences
            made.append(fake_cuda.calls("cuEventCreate"))
        assert made[0] == made[-1]
        cache.release(lease, after=event)


@pytest.mark.parametrize("kind", ["kvtier's", "CuPy's"])
def test_a_stream_is_no_event(fake_cuda: FakeCuda, kind: str) -> None:
    """A stream's number is taken for an event's: the lease is never given back, and who waits for it hangs."""
    with kvtier.open_sync(device_config()) as cache:
        model = Model(cache, fake_cuda)
        lease = model.reserve(prompt(cache.config, 1, 2))
        theirs = SimpleNamespace(ptr=model.stream.key, wait_event=None)
        with pytest.raises(UsageError, match="pass the event"):
            cache.release(lease, after=model.stream if kind == "kvtier's" else theirs)
        assert cache.stats()["leases"] == 1
        cache.release(lease, after=model.event())


def test_a_lost_device_is_not_waited_for_by_sleep(fake_cuda: FakeCuda) -> None:
    """After `lose_device` a sleep waits for work that never ends, instead of saying what is so."""
    with kvtier.open_sync(device_config()) as cache:
        model = Model(cache, fake_cuda)
        lease = model.reserve(prompt(cache.config, 1, 2))
        fake_cuda.hold(model.stream.key)
        fake_cuda.kernel(model.stream.key, model.address(1), BLOCK_BYTES, writes=False)
        cache.release(lease, after=model.event())
        cache.lose_device()
        with pytest.raises(DeviceLost):
            cache.sleep()
        fake_cuda.go_on(model.stream.key)
