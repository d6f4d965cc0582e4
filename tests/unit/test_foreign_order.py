"""Moves between a foreign cache on the fake device and host slots: who waits for whom."""

from collections.abc import Callable

import pytest

from kvtier.tiers.foreign.places import HostPlaces
from kvtier.types import Status
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.foreign_engine import LAUNCH_FAILED, SMALL, WAYS, Engine, device, make, told
from tests.foreign_world import images

__all__ = ["device", "fake_cuda", "images", "make", "told"]


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
