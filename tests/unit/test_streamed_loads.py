"""Leases over blocks that a device's stream has taken and not brought yet, event by event."""

import pytest

from kvtier.cache.leases import Lease, NoRoom
from kvtier.cache.transitions import State
from kvtier.errors import DeviceLost, UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, Outcome, Status
from tests.engine_bench import BLOCK_BYTES, check_prefix, fill, make_engine, prompt, serve


class Coming:
    """Stands for copies on a stream; notes who waited for what."""

    def __init__(self):
        self.waited = []

    def wait(self, stream, layer):
        self.waited.append((stream, layer))


@pytest.fixture
def below():
    """An engine with a prompt of four blocks in host memory alone, and its keys."""
    engine = make_engine(gpu=8, host=16, device=True)
    for number in (1, 2, 3, 4):
        serve(engine, prompt(number, 4))
        engine.run()
    keys = prompt(1, 4)
    assert engine.core.peek(keys).tiers["host"] == 16
    return engine, keys


def from_disk():
    """A new engine over a disk with a prompt of four blocks, which comes in batches of two, and its keys."""
    before, keys = make_engine(gpu=8, host=16, disk=DictTier()), prompt(1, 4)
    serve(before, keys)
    before.core.submit_flush()
    before.run()
    engine = make_engine(gpu=8, host=16, disk=before.tiers[2], device=True)
    engine.core.residency.levels[2].batch_bytes = 2 * BLOCK_BYTES
    return engine, keys


def load_of(engine):
    """The load into the top tier that is planned now; what else is planned ends."""
    engine.plan()
    (load,) = [batch for batch in engine.held if batch.target == 0]
    for batch in [batch for batch in engine.held if batch.target > batch.source]:
        engine.finish(batch)
    return load


def reserve(engine, keys, **options):
    return engine.submit_reserve(engine.match(keys), len(keys.groups[0]), **options)


def test_a_lease_is_there_when_the_stream_has_taken_the_copies(below):
    """Nobody can start before all has come, or starts before anything is on its way."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    assert batch.parts
    assert ticket not in engine.answers
    engine.enqueue(batch, coming := Coming())
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 16
    lease.wait("stream", layer=1)
    lease.wait("stream")
    assert coming.waited == [("stream", 1), ("stream", None)]
    engine.check()
    engine.finish(batch)
    check_prefix(engine, lease, keys)
    engine.release(lease)
    engine.check()
    assert engine.core.stats()["leases"] == 0


def test_who_did_not_ask_for_it_waits_for_the_bytes(below):
    """A caller that never waits on its stream reads bytes that are not there yet."""
    engine, keys = below
    plain, streamed = reserve(engine, keys), reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, coming := Coming())
    assert streamed in engine.answers
    assert plain not in engine.answers
    engine.finish(batch)
    lease = engine.answers[plain]
    lease.wait("stream", layer=0)
    assert coming.waited == []
    for each in (lease, engine.answers[streamed]):
        check_prefix(engine, each, keys)
        engine.release(each)
    engine.check()


def test_a_second_request_waits_for_the_same_copies(below):
    """A request that joins reads too early, or is not answered before all has come."""
    engine, keys = below
    first = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, coming := Coming())
    second = reserve(engine, keys, streamed=True)
    joined = engine.answers[second]
    joined.wait("mine", layer=0)
    assert coming.waited == [("mine", 0)]
    assert joined.slots() == engine.answers[first].slots()
    engine.finish(batch)
    third = engine.answers[reserve(engine, keys, streamed=True)]
    third.wait("late", layer=0)
    assert len(coming.waited) == 1
    for ticket in (first, second):
        engine.release(engine.answers[ticket])
    engine.release(third)
    engine.check()


def test_a_stream_wants_its_whole_prefix_in_one_batch(below):
    """Layer 0 of the last blocks comes behind the last layer of the first ones."""
    engine, keys = below
    source = engine.core.residency.levels[1]
    source.batch_bytes = 1
    reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    assert len(batch.transfers) == 4
    engine.finish(batch)
    for ticket in list(engine.answers):
        engine.release(engine.answers.pop(ticket))
    for number in (2, 3, 4):
        serve(engine, prompt(number, 4))
    engine.run()
    reserve(engine, keys)
    assert [len(batch.transfers) for batch in engine.plan() if batch.target == 0] == [1, 1, 1, 1]


def test_slots_stay_until_the_copies_are_over_however_early_the_lease_ends(below):
    """A slot is given to another request while a copy into it is still to come."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, Coming())
    slots = engine.answers[ticket].slots()
    engine.release(engine.answers[ticket])
    engine.check()
    other = engine.answers[engine.submit_reserve(engine.match(prompt(7, 8)), 8)]
    assert isinstance(other, NoRoom)
    four = engine.answers[engine.submit_reserve(engine.match(prompt(7, 4)), 4)]
    assert not set(four.slots()) & set(slots)
    engine.finish(batch)
    engine.check()
    lease = engine.answers[reserve(engine, keys)]
    assert lease.slots() == slots
    check_prefix(engine, lease, keys)


def test_blocks_are_committed_before_the_prefix_has_come(below):
    """A short prompt's own blocks cannot be published while its prefix is on its way."""
    engine, _ = below
    longer = prompt(1, 6)
    ticket = reserve(engine, longer, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, Coming())
    lease = engine.answers[ticket]
    fill(engine, lease, longer)
    engine.check()
    assert engine.core.peek(longer).tokens == 24
    engine.finish(batch)
    engine.release(lease)
    engine.check()
    assert engine.core.peek(longer).tiers["gpu"] == 24


@pytest.mark.parametrize("status", [Status.DEVICE_LOST, Status.FAILED])
def test_copies_that_fail_after_they_were_taken_mean_that_the_device_is_lost(below, status):
    """A request computes with bytes that never came, and its answer is cached."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, Coming())
    lease = engine.answers[ticket]
    engine.finish(batch, [DONE, Outcome(status), DONE, DONE])
    with pytest.raises(DeviceLost):
        engine.core.commit(lease, [])
    with pytest.raises(DeviceLost):
        reserve(engine, keys, streamed=True)
    engine.release(lease)
    engine.check()
    assert engine.core.peek(keys).tiers["host"] == 16


def test_copies_that_fail_before_they_are_taken_are_a_miss(below):
    """A copy that the driver refuses is taken for a lost device, or for bytes that come."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.finish(batch, [DONE, DONE, Outcome(Status.FAILED), DONE])
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 8
    engine.release(lease)
    engine.check()


def test_a_prefix_from_disk_is_there_when_its_last_block_is_taken():
    """What is still on the disk counts as coming, or what the stream has is waited for."""
    later, keys = from_disk()
    ticket = reserve(later, keys, streamed=True)
    first, second = later.plan()
    later.finish(first)
    up = load_of(later)
    later.enqueue(up, Coming())
    assert ticket not in later.answers
    later.finish(second)
    later.plan()
    (rest,) = [batch for batch in later.held if batch is not up]
    assert len(rest.transfers) == 2
    later.enqueue(rest, coming := Coming())
    lease = later.answers[ticket]
    assert lease.tokens_ready == 16
    lease.wait(1)
    assert coming.waited == [(1, None)]
    later.finish(up)
    later.finish(rest)
    check_prefix(later, lease, keys)
    later.release(lease)
    later.check()


def test_at_its_deadline_a_lease_keeps_what_is_on_the_stream():
    """What only has to be waited for on the stream is thrown away."""
    later, keys = from_disk()
    ticket = reserve(later, keys, streamed=True, deadline_s=0.5)
    first, _second = later.plan()
    later.finish(first)
    up = load_of(later)
    later.enqueue(up, coming := Coming())
    later.clock.advance(1.0)
    later.plan()
    lease = later.answers[ticket]
    assert lease.tokens_ready == 8
    lease.wait(1, layer=0)
    assert coming.waited == [(1, 0)]
    later.run()
    check_prefix(later, lease, keys)
    later.release(lease)
    later.check()


def test_what_was_dropped_is_not_served_because_it_is_on_the_stream(below):
    """A reset while the copies are taken gives a lease over blocks of the old weights."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.core.submit_drop()
    engine.enqueue(batch, Coming())
    assert ticket not in engine.answers
    engine.finish(batch)
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    engine.release(lease)
    engine.run()
    engine.check()


def test_a_reset_under_a_lease_leaves_its_slots_alone_until_both_are_over(below):
    """A reset gives slots away into which a stream still copies, or which a lease still reads."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, Coming())
    lease = engine.answers[ticket]
    engine.core.submit_drop()
    engine.finish(batch)
    engine.check()
    assert engine.core.stats()["tiers"]["gpu"]["slots_quarantined"] == 4
    engine.release(lease)
    engine.run()
    engine.check()
    assert engine.core.stats()["tiers"]["gpu"]["slots_quarantined"] == 0


def test_mistakes_in_waiting_are_told(below):
    """A layer that is not there is waited for by nobody, or a lease that ended is waited for."""
    engine, keys = below
    ticket = reserve(engine, keys, streamed=True)
    batch = load_of(engine)
    engine.enqueue(batch, Coming())
    lease = engine.answers[ticket]
    for layer in (-1, 2, 10**9):
        with pytest.raises(UsageError, match="no layer"):
            lease.wait(1, layer=layer)
    with pytest.raises(UsageError, match="layer is a str"):
        lease.wait(1, layer="0")
    engine.release(lease)
    with pytest.raises(UsageError, match="was released"):
        lease.wait(1)
    engine.finish(batch)
    engine.check()


def test_on_host_memory_it_changes_nothing():
    """The same program gets another answer without a device."""
    engine = make_engine(gpu=8, host=16)
    keys = prompt(1, 4)
    for number in (1, 2, 3, 4):
        serve(engine, prompt(number, 4))
        engine.run()
    ticket = reserve(engine, keys, streamed=True)
    assert not any(batch.parts for batch in engine.plan())
    engine.run()
    lease = engine.answers[ticket]
    assert isinstance(lease, Lease)
    assert lease.tokens_ready == 16
    lease.wait()
    lease.wait(layer=1)
    check_prefix(engine, lease, keys)
    engine.release(lease)
    assert all(engine.core._directory.state(h, 0) is not State.FILLING for h in engine.core._directory.handles())
