"""Moves between a foreign cache on the fake device and host slots: the bytes."""

from collections.abc import Callable

import numpy as np
import pytest

from kvtier.engine.foreign_pages import ForeignPages
from kvtier.engine.moves import Move
from kvtier.kernels.launch_device import Images
from kvtier.tiers.foreign import kernel_kit, methods
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.types import Status, block_key
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.foreign_engine import LAYERS, SMALL, WAYS, Engine, device, make, round_trip
from tests.foreign_world import LAYOUTS, Favouring, Layout, World, drawn, images

__all__ = ["device", "fake_cuda", "images", "make"]


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
