"""Loads from disk into a device that find no slot on their way through host memory, event by event."""

import pytest

from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import check_prefix, make_engine, prompt, serve


def stored(prompts, gpu=16, host=4):
    """A new engine on a device, over a disk with these (number, blocks) prompts: their keys."""
    before = make_engine(gpu=32, host=64, disk=DictTier())
    keys = [prompt(*each) for each in prompts]
    for each in keys:
        serve(before, each)
        before.core.submit_flush()
        before.run()
    return make_engine(gpu=gpu, host=host, disk=before.tiers[2], device=True), keys


def reserve(engine, keys, deadline_s=1.0):
    return engine.submit_reserve(engine.match(keys), len(keys.groups[0]), deadline_s)


def empty_top(engine):
    """What lies on the device lies only below from now on."""
    engine.run()
    lease = engine.reserve(engine.match(prompt(50, 16)), 16)
    assert lease.tokens_ready == 0
    engine.release(lease)


def expect_idle(engine):
    """Nothing is held or under way."""
    engine.run()
    engine.check()
    stats = engine.core.stats()
    assert (stats["leases"], stats["matches"]) == (0, 0)
    for tier in stats["tiers"].values():
        assert tier["blocks_idle"] == tier["blocks"]


def test_a_prefix_longer_than_host_memory_comes_whole():
    """What does not fit into host memory at once is computed anew, however fast the disk is."""
    engine, (keys,) = stored([(1, 12)])
    ticket = reserve(engine, keys)
    engine.run()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 48
    check_prefix(engine, lease, keys)
    engine.release(lease)
    expect_idle(engine)


def test_a_prefix_does_not_wait_for_slots_that_its_own_match_pins():
    """A prefix half in host memory waits for itself until its deadline."""
    engine, (keys,) = stored([(1, 12)])
    serve(engine, keys.prefix(16))
    empty_top(engine)
    assert engine.core.peek(keys).tiers == {"gpu": 0, "host": 16, "lmdb": 32}
    ticket = reserve(engine, keys)
    engine.run()
    assert engine.answers[ticket].tokens_ready == 48
    engine.release(engine.answers[ticket])
    expect_idle(engine)


def pinned_below(engine, keys):
    """A match that pins all slots of host memory for a prompt that lies there and on the disk."""
    serve(engine, keys)
    empty_top(engine)
    match = engine.match(keys, ttl_s=5.0)
    assert match.tiers["host"] == 16
    return match


def test_it_goes_on_when_somebody_lets_go_of_a_slot():
    """A load is given up although there was time, or nobody looks when a slot becomes free."""
    engine, (other, keys) = stored([(1, 4), (2, 6)])
    match = pinned_below(engine, other)
    ticket = reserve(engine, keys)
    engine.run()
    assert ticket not in engine.answers
    engine.check()
    engine.core.release_match(match)
    engine.run()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 24
    check_prefix(engine, lease, keys)
    engine.release(lease)
    expect_idle(engine)


@pytest.mark.parametrize("joined", [False, True])
def test_at_the_deadline_it_is_given_up(joined):
    """A request waits for ever for a slot of host memory, or what it gives up stays held."""
    engine, (other, keys) = stored([(1, 4), (2, 6)])
    match = pinned_below(engine, other)
    tickets = [reserve(engine, keys, 0.5) for _ in range(1 + joined)]
    engine.run()
    assert not engine.answers.keys() & set(tickets)
    engine.clock.advance(0.6)
    engine.plan()
    for ticket in tickets:
        lease = engine.answers[ticket]
        assert lease.tokens_ready == 0
        engine.release(lease)
    engine.core.release_match(match)
    expect_idle(engine)
    assert engine.core.stats()["deadline_cuts"] == len(tickets)
    assert serve(engine, keys).tokens_ready == 24


def test_one_that_is_given_up_leaves_the_others_waiting():
    """A cancelled request takes the load of another one with it."""
    engine, (other, keys) = stored([(1, 4), (2, 6)])
    match = pinned_below(engine, other)
    gone, stays = reserve(engine, keys), reserve(engine, keys)
    engine.run()
    engine.core.give_up(gone)
    engine.check()
    engine.core.release_match(match)
    engine.run()
    assert gone not in engine.answers
    assert engine.answers[stays].tokens_ready == 24
    engine.release(engine.answers[stays])
    engine.clock.advance(60.0)  # the match of the one that was given up
    expect_idle(engine)


def test_the_most_urgent_one_gets_the_slot():
    """A request with time enough takes the slot of one that has none."""
    engine, (other, late, soon) = stored([(1, 4), (2, 4), (3, 4)])
    match = pinned_below(engine, other)
    patient, urgent = reserve(engine, late, 9.0), reserve(engine, soon, 1.0)
    engine.run()
    engine.core.release_match(match)
    (batch,) = engine.plan()
    assert [transfer.key[4:] for transfer in batch.transfers] == list(soon.groups[0])
    engine.run()
    for ticket in (patient, urgent):
        assert engine.answers[ticket].tokens_ready == 16
        engine.release(engine.answers[ticket])
    expect_idle(engine)


def test_what_is_dropped_meanwhile_is_answered_and_not_loaded():
    """A load of a dropped block takes a slot when one is free, or its request is never answered."""
    engine, (other, keys) = stored([(1, 4), (2, 6)])
    pinned_below(engine, other)
    ticket = reserve(engine, keys)
    engine.run()
    engine.core.submit_drop()
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    engine.check()
    engine.release(lease)
    engine.clock.advance(60.0)
    expect_idle(engine)
    assert engine.core.stats()["blocks"] == 0


def test_a_disk_that_stops_answering_lets_them_go():
    """A request waits until its deadline for a slot into which nothing would come."""
    engine, (other, keys) = stored([(1, 4), (2, 6)])
    match = pinned_below(engine, other)
    ticket = reserve(engine, keys, 100.0)
    engine.run()
    engine.core._leases.give_up_on(2)
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    engine.release(lease)
    engine.core.release_match(match)
    expect_idle(engine)
