"""Moves between a foreign cache on the fake device and host slots: bytes, order, outcomes, and a device's refusals."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from kvtier import notices
from kvtier.allocator.streams import Stream
from kvtier.engine.foreign_pages import ForeignPages
from kvtier.engine.moves import Move
from kvtier.errors import ClosedError, DeviceLost, UsageError
from kvtier.kernels.launch import Launch
from kvtier.kernels.launch_device import DeviceLauncher, Images
from kvtier.tiers.foreign import calibration, kernel_kit, methods
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.types import BatchDone, Status, block_key
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.foreign_world import BLOCKS, LAYOUTS, Favouring, Layout, Telling, World, drawn, images

__all__ = ["fake_cuda", "images"]
WAYS = ("pieces", "direct", "staged")
LAUNCH_FAILED = 719
SMALL = Layout("small", (2, BLOCKS, 2, 1, 16), 1, (0, 1, 2, 3, 4), tensors=2)
LAYERS = LAYOUTS[0]


class Engine:
    """Pages over a world, and the streams of whoever computes."""

    def __init__(self, world: World, pages: ForeignPages) -> None:
        self.world, self.pages, self.fake = world, pages, world.fake
        self.streams = world.driver.streams
        self.stream = self.streams.make_stream()
        self.event = self.streams.make_event()
        self._moves = 0

    def follow(self) -> None:
        self.streams.record(self.event, self.stream)
        self.pages.follow(self.event)

    def kernel(self, block: int, *, writes: bool) -> int:
        """A kernel of the engine's on one block. Returns its CUresult."""
        results = [
            self.fake.kernel(self.stream.key, address, length, writes=writes)
            for address, length in self.world.touched(block)
        ]
        return max(results)

    def start(self, kind: str, blocks: list[int], slots: list[int]) -> int:
        self._moves += 1
        keys = tuple(block_key(bytes([block]) * 16, 0) for block in blocks)
        self.pages.start(Move(self._moves, kind, keys, tuple(blocks), tuple(slots)))
        return self._moves

    def end(self) -> list[BatchDone]:
        self.pages.join()
        return self.pages.finished()

    def run(self, kind: str, blocks: list[int], slots: list[int]) -> None:
        """A move that goes well."""
        move_id = self.start(kind, blocks, slots)
        (done,) = self.end()
        assert (done.batch_id, [o.status for o in done.outcomes]) == (move_id, [Status.DONE] * len(blocks))


@pytest.fixture(params=["plain", "strict"])
def device(request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    fake_cuda.configure(1024 * GRANULE_BYTES, GRANULE_BYTES, strict=request.param == "strict")
    return fake_cuda


@pytest.fixture
def make(device: FakeCuda, images: Images) -> Iterator[Callable[..., Engine]]:
    """Opens pages that copy by one method. Afterwards nothing is left, and nothing was out of order unless said."""
    made: list[Engine] = []

    def opened(method: str, layout: Layout = LAYERS, host: Callable[[World], HostPlaces] | None = None) -> Engine:
        world = World(device, layout)
        places = host(world) if host else HostPlaces.of_tier(world.host)
        clock = Favouring(device, **{name: 1.0 if name == method else 5.0 for name in WAYS})
        pages = ForeignPages.on_device([world.cache], places, clock=clock, images=images)
        made.append(Engine(world, pages))
        return made[-1]

    yield opened
    device.go_on()
    for engine in made:
        engine.pages.close()
        with suppress(DeviceLost):
            engine.streams.finish(engine.stream)
        engine.world.close()


# ---------------------------------------------------------------- bytes


def round_trip(engine: Engine, seed: int) -> None:
    """Store some blocks, load others, and look at every byte of cache and slots."""
    world, rng = engine.world, np.random.default_rng(seed)
    count = int(rng.integers(1, BLOCKS + 1))
    blocks, slots = (rng.permutation(BLOCKS)[:count].tolist() for _ in range(2))
    for index in range(BLOCKS):
        world.host.slot(index)[:] = b"\xff" * world.host.stride_bytes
    engine.follow()
    engine.run("store", blocks, slots)
    padding = bytes(world.host.stride_bytes - world.layout.block_bytes)
    for block, slot in zip(blocks, slots, strict=True):
        assert world.slot(slot) == world.block(block) + padding
    for slot in {*range(BLOCKS)} - {*slots}:
        assert world.slot(slot) == b"\xff" * world.host.stride_bytes
    assert np.array_equal(world.get(), world.memory)

    count = int(rng.integers(1, BLOCKS + 1))
    blocks, slots = rng.permutation(BLOCKS)[:count].tolist(), rng.integers(0, BLOCKS, count).tolist()
    wanted = world.memory.copy()
    for block, slot in zip(blocks, slots, strict=True):
        world.write(wanted, block, world.fill(slot, slot))
    engine.run("load", blocks, slots)
    assert np.array_equal(world.get(), wanted)
    assert world.fake.report == ""


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_go_down_and_come_up_as_they_were(
    method: str, layout: Layout, make: Callable[..., Engine], device: FakeCuda
) -> None:
    """A layout of some engine is restored with layers, heads or K and V exchanged, or neighbours are overwritten."""
    engine = make(method, layout)
    assert {choice.method for choice in engine.pages.choices.values()} == {method}
    launches = device.calls("cuLaunchKernel")
    round_trip(engine, len(layout.name))
    assert (device.calls("cuLaunchKernel") > launches) == (method != "pieces")


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_axes(seed: int, make: Callable[..., Engine]) -> None:
    """A cache that no one thought of is copied wrongly instead of as it lies, or refused."""
    engine = make(WAYS[seed % 3], drawn(seed))
    for turn in range(3):
        round_trip(engine, 100 * seed + turn)
        engine.world.put(engine.world.memory)


def test_all_methods_give_the_same_bytes(make: Callable[..., Engine], device: FakeCuda) -> None:
    """A block stored by one process cannot be loaded by the next, whose clock chose otherwise."""
    slots = []
    for method in WAYS:
        engine = make(method, LAYOUTS[2])
        engine.follow()
        engine.run("store", [3, 1, 6], [0, 1, 2])
        slots.append([engine.world.slot(index) for index in range(3)])
    assert slots[0] == slots[1] == slots[2]


@pytest.mark.parametrize("method", WAYS)
def test_parts_of_slots(method: str, make: Callable[..., Engine]) -> None:
    """A rank overwrites the part of another one, or a chunk's blocks are exchanged."""
    length = SMALL.block_bytes

    def chunks(world: World) -> HostPlaces:
        whole = HostPlaces.of_tier(world.host)
        return HostPlaces(whole.address, whole.stride_bytes, whole.slots, 3 * length, length, parts=3)

    engine = make(method, SMALL, chunks)
    world = engine.world
    for index in range(8):
        world.host.slot(index)[:] = b"\xee" * 4096
    engine.follow()
    engine.pages.begin(1, "store", [4, 0, 7, 2], [0, 5, 4, 22])
    engine.end()
    wanted = [bytearray(b"\xee" * 4096) for _ in range(8)]
    for block, slot, part in ((4, 0, 0), (0, 1, 2), (7, 1, 1), (2, 7, 1)):
        wanted[slot][(3 + part) * length : (4 + part) * length] = world.block(block)
    assert [world.slot(index) for index in range(8)] == [bytes(slot) for slot in wanted]
    memory = world.memory.copy()
    for block, place in ((1, 22), (6, 5), (3, 4)):
        slot, part = divmod(place, 3)
        world.write(memory, block, bytes(wanted[slot][(3 + part) * length : (4 + part) * length]))
    engine.pages.begin(2, "load", [1, 6, 3], [22, 5, 4])
    engine.end()
    assert np.array_equal(world.get(), memory)


def test_groups_have_caches_of_their_own(make: Callable[..., Engine], device: FakeCuda, images: Images) -> None:
    """A hybrid model's sliding layers are copied into its full ones."""
    full, window = World(device, LAYERS, seed=1), World(device, LAYOUTS[4], seed=2)
    clock = Favouring(device, pieces=1.0, direct=2.0, staged=0.5)
    pages = ForeignPages.on_device(
        [full.cache, window.cache], HostPlaces.of_tier(full.host), clock=clock, images=images
    )
    engine = Engine(full, pages)
    engine.follow()
    keys = tuple(block_key(bytes(16), group) for group in (1, 0, 1))
    pages.start(Move(7, "store", keys, (5, 5, 2), (0, 1, 2)))
    pages.join([7])
    (done,) = pages.finished()
    assert [o.status for o in done.outcomes] == [Status.DONE] * 3
    for slot, (world, block) in enumerate(((window, 5), (full, 5), (window, 2))):
        assert full.slot(slot) == world.block(block) + bytes(4096 - world.layout.block_bytes)
    pages.close()
    window.close()
    full.close()


@pytest.mark.parametrize("method", WAYS)
def test_more_blocks_than_a_call_takes(
    method: str, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks behind the first scratch memory, sheet or batch are left out, or overwrite those before."""
    monkeypatch.setattr(kernel_kit, "SCRATCH_BYTES", 3 * LAYERS.block_bytes)
    monkeypatch.setattr(methods, "BLOCKS_MAX", 3)
    monkeypatch.setattr(methods.Direct, "blocks_max", 3)
    monkeypatch.setattr(methods, "PIECES_MAX", 3 * 4)
    engine = make(method)
    engine.follow()
    engine.run("store", [*range(8)], [*range(7, -1, -1)])
    assert [engine.world.slot(7 - block)[: LAYERS.block_bytes] for block in range(8)] == [
        engine.world.block(block) for block in range(8)
    ]
    engine.run("load", [*range(8)], [*range(8)])
    memory = engine.world.memory.copy()
    for block in range(8):
        engine.world.write(memory, block, engine.world.block(7 - block))
    assert np.array_equal(engine.world.get(), memory)


def test_when_all_sheets_are_under_way_the_rest_goes_in_pieces(make: Callable[..., Engine], device: FakeCuda) -> None:
    """A burst of moves writes the numbers of one launch over those of another, or waits for the device."""
    engine = make("direct", SMALL)
    engine.follow()
    device.hold(engine.pages._copies.streams["store"].key)
    launches = device.calls("cuLaunchKernel")
    for turn in range(40):
        engine.start("store", [turn % 8], [turn % 8])
    assert device.calls("cuLaunchKernel") - launches == 32
    assert engine.pages.finished() == []
    device.go_on()
    assert len(engine.end()) == 40
    assert [engine.world.slot(block)[: SMALL.block_bytes] for block in range(8)] == [
        engine.world.block(block) for block in range(8)
    ]
    engine.run("store", [0], [1])
    assert device.calls("cuLaunchKernel") - launches == 33  # they came back


# ---------------------------------------------------------------- order


@pytest.fixture
def told(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """As `make`, for moves of blocks 2 and 5 and slots 1 and 4, of whose kernels the fake is told what they use."""

    telling, plain = list[Telling](), DeviceLauncher.launch

    def launch(launcher: DeviceLauncher, launch: Launch, stream_key: int) -> None:
        for each in telling:
            each.tell(launch)
        plain(launcher, launch, stream_key)

    def opened(method: str) -> Engine:
        engine = make(method, SMALL)
        telling.append(Telling(engine.world, (2, 5), (1, 4)))
        return engine

    monkeypatch.setattr(DeviceLauncher, "launch", launch)

    return opened


@pytest.mark.parametrize("method", WAYS)
def test_a_step_and_its_moves_in_the_right_order(method: str, told: Callable[..., Engine]) -> None:
    """Order is demanded where none is needed: every engine fails here."""
    engine = told(method)
    engine.fake.hold(engine.stream.key)
    assert engine.kernel(2, writes=True) == engine.kernel(5, writes=True) == 0
    engine.follow()
    engine.start("store", [2, 5], [1, 4])
    assert engine.pages.finished() == []
    engine.fake.go_on()
    assert [o.status for o in engine.end()[0].outcomes] == [Status.DONE] * 2
    assert engine.kernel(5, writes=False) == 0  # the last of a request that gives the block up
    engine.follow()
    engine.start("load", [2, 5], [1, 4])
    engine.pages.wait(engine.stream)
    assert engine.kernel(2, writes=False) == engine.kernel(5, writes=True) == 0
    engine.follow()
    engine.start("store", [2, 5], [1, 4])
    assert {o.status for done in engine.end() for o in done.outcomes} == {Status.DONE}
    assert engine.fake.report == ""


@pytest.mark.parametrize("method", WAYS)
def test_a_store_that_does_not_wait_for_the_step_is_caught(method: str, told: Callable[..., Engine]) -> None:
    """A block is stored half computed: the event of this step was not given, only that of the last one."""
    engine = told(method)
    engine.follow()
    assert engine.kernel(2, writes=True) == 0
    engine.start("store", [2, 5], [1, 4])
    (done,) = engine.end()
    assert [o.status for o in done.outcomes] == [Status.DEVICE_LOST] * 2
    assert engine.fake.report.startswith("unordered overlap")


@pytest.mark.parametrize("method", WAYS)
def test_a_load_into_a_block_that_is_still_read_is_caught(method: str, told: Callable[..., Engine]) -> None:
    """A block that a request has given up is overwritten under that request's last kernel."""
    engine = told(method)
    engine.follow()
    assert engine.kernel(5, writes=False) == 0
    engine.start("load", [2, 5], [1, 4])
    (done,) = engine.end()
    assert [o.status for o in done.outcomes] == [Status.DEVICE_LOST] * 2
    assert "unordered overlap" in engine.fake.report


@pytest.mark.parametrize("waits", ["for nothing", "for the store", "for the load", "for all"])
@pytest.mark.parametrize("method", WAYS)
def test_a_kernel_that_does_not_wait_for_its_load_is_caught(
    method: str, waits: str, told: Callable[..., Engine]
) -> None:
    """Attention reads what was in the block before."""
    engine = told(method)
    engine.follow()
    store = engine.start("store", [2, 5], [1, 4])
    engine.end()
    load = engine.start("load", [2, 5], [1, 4])
    if waits == "for all":
        engine.pages.wait(engine.stream)
    elif waits != "for nothing":
        engine.pages.wait(engine.stream, store if waits == "for the store" else load)
    fails = waits in ("for nothing", "for the store")
    assert engine.kernel(5, writes=False) == (LAUNCH_FAILED if fails else 0)


@pytest.mark.parametrize("method", WAYS)
def test_both_ways_at_once(method: str, make: Callable[..., Engine], device: FakeCuda) -> None:
    """A load's numbers or blocks lie on the device where those of a store are still needed."""
    engine = make(method, SMALL)
    world = engine.world
    engine.follow()
    device.hold()
    payload = world.fill(6, 6)
    moves = engine.start("store", [1, 2], [1, 2]), engine.start("load", [4], [6])
    device.go_on()
    assert sorted(done.batch_id for done in engine.end()) == [*moves]
    assert device.report == ""
    assert [world.slot(slot)[: SMALL.block_bytes] for slot in (1, 2)] == [world.block(1), world.block(2)]
    assert world.block(4, world.get()) == payload


def test_all_loads_are_waited_for(make: Callable[..., Engine], device: FakeCuda) -> None:
    """Attention starts when the first of several loads is there."""
    engine = make("pieces", SMALL)
    engine.follow()
    engine.start("load", [2], [1])
    engine.start("load", [5], [4])
    engine.pages.wait(engine.stream)
    assert engine.kernel(2, writes=False) == engine.kernel(5, writes=False) == 0
    assert device.report == ""


def test_a_load_waits_for_its_own_move_alone(make: Callable[..., Engine], device: FakeCuda) -> None:
    """A stream that waits for the first load waits for all those behind it."""
    engine = make("pieces", SMALL)
    engine.follow()
    first = engine.start("load", [1], [1])
    engine.pages.join([first])
    device.hold(engine.pages._copies.streams["load"].key)
    engine.start("load", [2], [2])
    engine.pages.wait(engine.stream, first)
    engine.streams.record(engine.event, engine.stream)
    engine.streams.synchronize(engine.event)  # would hang
    device.go_on()
    assert len(engine.end()) == 2


def test_an_event_may_be_recorded_again_at_once(make: Callable[..., Engine], device: FakeCuda) -> None:
    """Moves wait for the engine's next step as well, and the step for the move: neither ends."""
    engine = make("pieces", SMALL)
    engine.follow()
    engine.streams.finish(engine.stream)
    device.hold(engine.stream.key)
    assert engine.kernel(1, writes=True) == 0
    engine.streams.record(engine.event, engine.stream)
    engine.run("store", [2], [2])
    device.go_on()


def test_the_slot_is_the_hosts_when_the_move_is_answered(make: Callable[..., Engine], device: FakeCuda) -> None:
    """A tier below reads a slot that the device is still writing."""
    engine = make("pieces", SMALL)
    address = HostPlaces.of_tier(engine.world.host).address
    engine.follow()
    engine.start("store", [2], [0])
    assert engine.end()[0].outcomes[0].done
    assert device.host_access(address, SMALL.block_bytes, writes=False) == 0
    engine.start("store", [2], [0])
    assert device.host_access(address, SMALL.block_bytes, writes=False) == LAUNCH_FAILED


# ---------------------------------------------------------------- what cannot be asked


def test_mistakes_are_told_and_copy_nothing(make: Callable[..., Engine], device: FakeCuda) -> None:
    """A stray number overwrites memory of somebody else's, on a device that does not notice."""
    engine = make("direct")
    with pytest.raises(UsageError, match="call `follow` with an event behind your kernels first"):
        engine.start("store", [1], [1])
    engine.follow()
    before = device.calls("cuMemcpyBatchAsync"), device.calls("cuLaunchKernel")
    for arguments, problem in (
        (("copy", [1], [1]), "is a 'copy'; use store or load"),
        (("store", [BLOCKS], [1]), f"block {BLOCKS}, of {BLOCKS}"),
        (("store", [-1], [1]), f"block -1, of {BLOCKS}"),
        (("load", [1], [8]), "place 8, of 8"),
        (("load", [1, 2, 1], [1, 2, 3]), "block 1 is written 2 times in one move"),
        (("store", [1, 2, 3], [4, 4, 4]), "place 4 is written 3 times in one move"),
        (("store", [1, 2], [4]), "2 blocks of 2 caches, and 1 places"),
        (("store", [1], [4], [1]), "cache 1, of 1"),
    ):
        with pytest.raises(UsageError, match=problem):
            engine.pages.begin(1, *arguments)
    assert (device.calls("cuMemcpyBatchAsync"), device.calls("cuLaunchKernel")) == before
    engine.pages.begin(1, "store", [1, 1], [4, 5])  # read twice is no mistake
    engine.pages.begin(2, "load", [1, 2], [6, 6])
    with pytest.raises(UsageError, match="move 2 is under way already"):
        engine.pages.begin(2, "store", [1], [1])
    assert len(engine.end()) == 2
    for no_stream in (None, "stream", "7", True, 1.5, object()):
        with pytest.raises(UsageError, match="pass a stream of torch, CuPy or the CUDA bindings"):
            engine.pages.wait(no_stream)
    with pytest.raises(UsageError, match="pass the event that you have recorded"):
        engine.pages.follow(None)


class TorchStream:
    cuda_stream = 0


def test_streams_of_others_are_known(make: Callable[..., Engine]) -> None:
    """torch's default stream, whose number is 0, counts as none."""
    engine = make("pieces", SMALL)
    engine.follow()
    engine.start("load", [1], [1])
    for stream in (TorchStream(), engine.stream, engine.stream.key, np.int64(engine.stream.key), Stream(0)):
        engine.pages.wait(stream)
    assert len(engine.end()) == 1


def test_caches_elsewhere_and_blocks_too_large_are_refused(device: FakeCuda, images: Images) -> None:
    """A tensor of the CPU is handed to a kernel; or blocks reach into the next slot."""
    world = World(device, LAYERS)
    places = HostPlaces.of_tier(world.host)
    with pytest.raises(UsageError, match="blocks of 1024 bytes, and places of 256"):
        ForeignPages.on_device([world.cache], HostPlaces(places.address, 4096, 8, 0, 256), images=images)
    here = ForeignCache.of([np.zeros((8, 4), np.float32)], blocks=8)
    with pytest.raises(UsageError, match="cache 0 lies in the host's memory"):
        ForeignPages.on_device([here], places, images=images)
    with pytest.raises(UsageError, match="cache 0 lies on a device; use on_device"):
        ForeignPages.on_host([world.cache], places)
    with pytest.raises(UsageError, match="no cache"):
        ForeignPages.on_host([], places)
    world.close()


# ---------------------------------------------------------------- failures


def test_a_batch_that_is_refused_has_failed_and_no_other_has(
    make: Callable[..., Engine], device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused copy is taken for made, or all blocks of its move count as lost."""
    monkeypatch.setattr(methods, "PIECES_MAX", 3 * 4)
    engine = make("pieces")
    engine.follow()
    device.fault("cuMemcpyBatchAsync", 1, nth=2)
    engine.start("store", [*range(8)], [*range(8)])
    (store,) = engine.end()
    assert [o.status for o in store.outcomes] == [Status.DONE] * 3 + [Status.FAILED] * 3 + [Status.DONE] * 2
    assert "cuMemcpyBatchAsync" in store.outcomes[4].detail
    engine.run("load", [0], [1])


@pytest.mark.parametrize("method", ["direct", "staged"])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_kernel_that_is_refused_is_given_up_for_pieces(
    method: str, kind: str, make: Callable[..., Engine], device: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """One refused launch costs its blocks, and so does every one after it."""
    engine = make(method)
    engine.follow()
    payloads = [engine.world.fill(slot, slot) for slot in range(8)]
    device.fault("cuLaunchKernel", 2)  # CUDA_ERROR_OUT_OF_MEMORY
    engine.run(kind, [3, 4], [1, 2])
    assert f"{kind} by {method} is given up for pieces: cuLaunchKernel" in caplog.text
    assert (engine.pages.choices[kind, 0].method, engine.pages.choices[kind, 0].why) == ("pieces", "refused")
    assert {choice.method for choice in engine.pages.choices.values()} == {"pieces", method}
    if kind == "store":
        assert engine.world.slot(1)[: LAYERS.block_bytes] == engine.world.block(3)
    else:
        assert engine.world.block(4, engine.world.get()) == payloads[2]


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventQuery"])
def test_a_move_without_an_event_has_failed(call: str, make: Callable[..., Engine], device: FakeCuda) -> None:
    """A move is never answered, or answered while its copies run."""
    engine = make("pieces")
    engine.follow()
    device.fault(call, 2)
    engine.start("store", [3, 4], [1, 2])
    (done,) = engine.pages.finished()
    assert [o.status for o in done.outcomes] == [Status.FAILED] * 2
    engine.run("store", [3, 4], [1, 2])


@pytest.mark.parametrize("method", WAYS)
def test_a_lost_device_is_an_outcome_of_every_move(method: str, make: Callable[..., Engine], device: FakeCuda) -> None:
    """A scheduler waits for ever for moves on a device that is gone, or is ended by an error in its step."""
    engine = make(method)
    engine.follow()
    device.hold()
    engine.start("store", [1, 2], [1, 2])
    engine.start("load", [3], [3])
    device.lose()
    device.go_on()
    engine.start("load", [4], [4])
    with pytest.raises(DeviceLost):
        engine.pages.wait(engine.stream)
    engine.pages.join()
    done = engine.pages.finished()
    assert sorted(d.batch_id for d in done) == [1, 2, 3]
    assert {o.status for d in done for o in d.outcomes} == {Status.DEVICE_LOST}
    with pytest.raises(DeviceLost):
        engine.pages.follow(engine.event)


def test_the_end(make: Callable[..., Engine], device: FakeCuda) -> None:
    """Memory, pins, modules or streams stay behind; or what is closed copies on."""
    engine = make("staged")
    engine.follow()
    device.hold()
    engine.start("store", [1], [1])
    device.go_on()
    used_bytes = engine.world.driver.used_bytes
    engine.pages.close()
    engine.pages.close()
    assert device.used_bytes == used_bytes  # the engine's own
    assert device.calls("cuModuleUnload") == device.calls("cuModuleLoadData")
    assert device.calls("cuMemHostUnregister") == device.calls("cuMemHostRegister_v2")
    for verb in (engine.pages.finished, engine.pages.join, lambda: engine.start("load", [1], [1]), engine.follow):
        with pytest.raises(ClosedError, match="the copying for a foreign cache is closed"):
            verb()


# ---------------------------------------------------------------- without a device


@pytest.mark.parametrize("seed", range(4))
def test_on_host_memory_the_same(seed: int) -> None:
    """An engine on a CPU, or a test of an adapter, gets other bytes than on a device."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 256, (2, 6, 4, 3, 8), np.uint8)
    layers = [whole[:, :, :, n] for n in range(3)]
    cache = ForeignCache.of(layers, blocks=6, block_axis=1)
    slab = np.zeros((5, 512), np.uint8)
    pages = ForeignPages.on_host([cache], HostPlaces(slab.ctypes.data, 512, 5, 0, 512))
    pages.follow(None)
    pages.begin(1, "store", [5, 0, 3], [4, 1, 2])
    pages.wait(None)
    assert [o.done for o in pages.finished()[0].outcomes] == [True] * 3
    for block, slot in ((5, 4), (0, 1), (3, 2)):
        wanted = b"".join(layer[:, block].tobytes() for layer in layers)
        assert slab[slot].tobytes() == wanted + bytes(512 - len(wanted))
    wanted = whole.copy()
    wanted[:, 1], wanted[:, 2] = whole[:, 0], whole[:, 5]
    pages.begin(2, "load", [1, 2], [1, 4])
    pages.join()
    assert len(pages.finished()) == 1
    assert np.array_equal(whole, wanted)
    pages.close()
