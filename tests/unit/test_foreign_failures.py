"""Moves between a foreign cache and host slots: what cannot be asked, and what fails."""

from collections.abc import Callable

import numpy as np
import pytest

from kvtier.allocator.streams import Stream
from kvtier.engine.foreign_pages import ForeignPages
from kvtier.errors import ClosedError, DeviceLost, UsageError
from kvtier.kernels.launch_device import Images
from kvtier.tiers.foreign import methods
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.places import HostPlaces
from kvtier.types import Status
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.foreign_engine import LAYERS, SMALL, WAYS, Engine, device, make
from tests.foreign_world import BLOCKS, World, images

__all__ = ["device", "fake_cuda", "images", "make"]


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
