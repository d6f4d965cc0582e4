"""Rules of movement that no single part shows: who gives way to whom, and what a drop or a death takes back."""

import pytest

from kvtier.cache.leases import Lease, NoRoom
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import fill, fill_and_push_down, make_engine, prompt, serve, tiers_of


def test_a_block_that_cannot_be_read_is_not_found_again():
    """A stale positive lookup makes an engine that polls ask for it for ever (vllm#49176, PR 55297)."""
    engine, keys = fill_and_push_down()
    engine.tiers[2].fail_read = Status.FAILED
    asked = 0
    while engine.core.peek(keys).tokens and asked < 10:
        asked += 1
        engine.release(engine.reserve(engine.match(keys), 4))
    assert asked == 1
    engine.run()
    assert not engine.tiers[2].rows, "it is erased as well, or a restart would find it again"
    engine.check()


def test_a_memory_copy_is_not_blamed_for_the_tier_above():
    """A failing device makes the cache forget what lies safely below it."""
    engine = make_engine(gpu=4, host=8, disk=DictTier())
    serve(engine, prompt(0, 4))
    engine.core.submit_flush()
    engine.run()
    serve(engine, prompt(1, 4))
    assert tiers_of(engine, prompt(0, 4))["host"] == 16
    ticket = engine.submit_reserve(engine.match(prompt(0, 4)), 4)
    [batch] = [batch for batch in engine.plan() if batch.target == 0]
    engine.finish(batch, [Outcome(Status.FAILED)] * 4)
    lease = engine.answers.pop(ticket)
    assert lease.tokens_ready == 0
    assert tiers_of(engine, prompt(0, 4))["host"] == 16
    engine.check()


@pytest.mark.parametrize("when", ["pending", "taken"])
def test_what_was_begun_before_a_drop_is_not_published_after_it(when):
    """KV of old weights is found after the reset that was to forget it (llm-d-kv-cache#396, vllm#9744)."""
    engine, keys = fill_and_push_down()
    ticket = engine.submit_reserve(engine.match(keys), 4)
    if when == "taken":
        engine.run()
    engine.core.submit_drop()
    engine.run()
    lease = engine.answers.pop(ticket)
    fill(engine, lease, keys)
    assert engine.core.peek(keys).tokens == 0
    assert engine.core.stats()["stale_commits"] == 4 - lease.tokens_ready // 4
    engine.release(lease)
    serve(engine, keys)
    assert engine.core.peek(keys).tokens == 16
    engine.check()


def test_the_death_of_an_owner_gives_everything_back():
    """Slots and pins of a process that died are lost until a restart (LMCache#1034, PR#3884)."""
    engine, keys = fill_and_push_down()
    engine.match(keys)
    taken = engine.reserve(engine.match(prompt(1, 2)), 2)
    pending = engine.submit_reserve(engine.match(keys), 4)
    engine.plan()
    assert engine.core.release_owner("nobody") == 0
    assert engine.core.release_owner("test") == 4  # two leases and two matches: a pending one keeps its match
    engine.run()
    assert isinstance(engine.answers.pop(pending), NoRoom)
    engine.core.release_lease(taken)
    stats = engine.core.stats()
    gpu = stats["tiers"]["gpu"]
    assert (stats["leases"], stats["matches"], gpu["slots_free"] + gpu["blocks_idle"]) == (0, 0, 8)
    engine.check()


def test_the_order_is_written_down_within_a_second():
    """A crash forgets more of the order than a second's touches."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk)
    for number in range(2):
        serve(engine, prompt(number, 2))
    engine.core.submit_flush()
    engine.run()
    serve(engine, prompt(0, 2))  # in every tier: told to all their policies
    expected = order_of(engine)
    engine.plan()
    assert engine.core.wake_at_s(engine.clock.now()) <= engine.clock.now() + 1.0
    engine.clock.advance(1.0)
    engine.run()
    assert order_of(make_engine(gpu=8, host=16, disk=disk)) == expected  # the first engine was not closed


def order_of(engine):
    residency = engine.core.residency
    order = residency.orders[2]
    return [residency.directory.key(handle) for handle in order.candidates(len(order))]


def test_host_memory_first_gives_up_what_is_found_above_and_below():
    """Host memory keeps what the top tier has as well, and gives up what must then be read from disk."""
    engine = make_engine(gpu=4, host=8, disk=DictTier())
    for number in range(3):  # gpu has the last two; host and disk have all three
        serve(engine, prompt(number, 2))
        engine.core.submit_flush()
        engine.run()
    assert {number: tiers_of(engine, prompt(number, 2))["gpu"] for number in range(3)} == {0: 0, 1: 8, 2: 8}
    residency = engine.core.residency
    level = residency.levels[1]
    taken = residency.take(1, level.slots.slots_free + 2, drop_dirty=False)
    lost = [number for number in range(3) if not in_host(engine, number)]
    assert tiers_of(engine, prompt(0, 2))["host"] == 8, "the oldest, but the only one that is not above"
    assert lost == [1]
    level.slots.give(taken)
    engine.check()


def in_host(engine, number):
    residency = engine.core.residency
    keys = (b"\0\0\0\0" + key for key in prompt(number, 2).groups[0])
    return all(residency.directory.is_ready(residency.directory.find(key), 1) for key in keys)


def test_stores_give_way_to_loads_as_long_as_there_are_slots():
    """A disk that a request waits for is kept busy with stores (vllm RFC#50031)."""
    disk = DictTier()
    first = make_engine(gpu=8, host=None, disk=disk)
    serve(first, prompt(0, 2))
    first.core.submit_flush()
    first.run()
    engine = make_engine(gpu=8, host=None, disk=disk, watermarks=(0.6, 0.8))
    leases = [serve(engine, prompt(1, 3), keep=True)]
    engine.run()
    engine.submit_reserve(engine.match(prompt(0, 2)), 2)
    for lease in leases:
        engine.release(lease)
    batches = engine.plan()
    assert [(batch.source, batch.target) for batch in batches if batch.transfers] == [(1, 0)]
    engine.finish(batches[0])
    assert {(batch.source, batch.target) for batch in engine.plan() if batch.transfers} == {(0, 1)}


def test_without_a_disk_two_memory_tiers_come_to_rest():
    """Blocks that lie in both take each other's slots for ever, and a core of the machine with them."""
    engine = make_engine(gpu=14, host=6)
    for number in range(4):
        serve(engine, prompt(number, 3))
    engine.run()  # fails when it does not end
    assert isinstance(serve(engine, prompt(9, 4)), Lease)
    engine.check()


def test_a_flush_is_not_told_that_lost_blocks_are_saved():
    """A flush answers that all is well, as the handles of what it lost name blocks that were dropped on purpose."""
    engine = make_engine(gpu=4, host=None, disk=DictTier())
    serve(engine, prompt(0, 4))
    flush = engine.core.submit_flush()
    engine.core.set_weights_epoch("v2")
    serve_now(engine, prompt(1, 4, engine.core.model))  # takes the four slots, and with them the handles
    engine.core.submit_drop()
    engine.run()
    assert engine.answers[flush].failed == 4
    engine.check()


def serve_now(engine, keys):
    lease = engine.reserve_now(engine.match(keys), 4)
    fill(engine, lease, keys)
    engine.release(lease)
