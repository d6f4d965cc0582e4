"""An engine with a cache of its own on the fake device, for tests of the moves between that and host slots."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from kvtier import notices
from kvtier.engine.foreign_pages import ForeignPages
from kvtier.engine.moves import Move
from kvtier.errors import DeviceLost
from kvtier.kernels.launch import Launch
from kvtier.kernels.launch_device import DeviceLauncher, Images
from kvtier.tiers.foreign import calibration
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.types import BatchDone, Status, block_key
from tests.fakecuda.fake import GRANULE_BYTES, FakeCuda, fake_cuda
from tests.foreign_world import BLOCKS, LAYOUTS, Favouring, Layout, Telling, World, images

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
