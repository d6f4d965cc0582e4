"""Blocks on their way down and out: demotion, flush, eviction, drop, event by event."""

import pytest

from kvtier.cache.leases import Lease
from kvtier.engine.answers import Dropped, Flushed
from kvtier.events import Reason
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import (
    fill,
    fill_and_push_down,
    make_engine,
    prompt,
    serve,
    tiers_of,
)


def test_demotion_runs_ahead_of_need_in_policy_order():
    """Blocks are demoted too late, or the wrong ones first."""
    engine = make_engine(gpu=8, watermarks=(0.25, 0.5))
    old, new = prompt(1, 4), prompt(2, 3)
    serve(engine, old)
    serve(engine, new)  # 1 of 8 slots is free now, less than 25 %
    batches = engine.plan()
    assert {(batch.source, batch.target) for batch in batches} == {(0, 1)}
    # 4 slots must be had without I/O: 1 is free, so 3 go down: the oldest prompt's, its deepest block first.
    keys = [transfer.key[4:] for batch in batches for transfer in batch.transfers]
    assert keys == list(reversed(old.groups[0]))[:3]
    engine.run()
    engine.check()


def test_hung_stores_leave_slots_to_the_living():
    """One flush to a hung disk holds every slot of the top tier, and nobody is served."""
    engine = make_engine(gpu=16, host=None, disk=DictTier(batch_bytes=1 << 20))
    for number in range(4):
        serve(engine, prompt(number, 4))
    engine.core.submit_flush()
    engine.plan()
    assert engine.held
    assert isinstance(engine.reserve_now(engine.match(prompt(9, 8)), 8), Lease)
    engine.check()


@pytest.mark.parametrize(("gpu", "host", "under_way"), [(64, None, 4), (16, None, 2), (64, 32, 2)])
def test_how_many_stores_are_under_way(gpu, host, under_way):
    """A disk has nothing to commit together while it writes; or what is under way holds most of a small tier."""
    engine = make_engine(gpu=gpu, host=host, disk=DictTier())
    for number in range(4):
        serve(engine, prompt(number, gpu // 4 - 1))
    engine.core.submit_flush()
    engine.plan()
    stores = [batch for batch in engine.held if batch.transfers]
    assert len(stores) == under_way
    assert sum(len(batch.transfers) for batch in stores) <= gpu // 2
    engine.run()
    engine.check()


def test_flush_writes_everything_once():
    """Flush returns early, or writes what is there already."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=4, disk=disk)
    serve(engine, prompt(1, 6))
    serve(engine, prompt(2, 2), keep=True)  # held blocks are flushed as well
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers[ticket] == Flushed(8, 0)
    assert len(disk.rows) == 8
    assert engine.core.unsaved() == 0
    engine.check()


@pytest.mark.parametrize("status", [Status.FAILED, Status.NO_ROOM])
def test_flush_to_a_failing_disk_ends_and_says_so(status):
    """Flush hangs on a disk that does not take anything."""
    disk = DictTier()
    disk.fail_write = status
    engine = make_engine(gpu=8, host=4, disk=disk)
    serve(engine, prompt(1, 6))
    ticket = engine.core.submit_flush()
    for _ in range(200):
        engine.run()
        if ticket in engine.answers:
            break
        engine.clock.advance(1.0)
    assert engine.answers[ticket] == Flushed(6, 6)
    assert engine.core.unsaved() == 6
    engine.check()


def test_a_block_thrown_away_during_a_flush_is_a_failed_one():
    """Flush answers that all is safe although a block was dropped before it was written."""
    engine = make_engine(gpu=4, host=4, disk=DictTier())
    serve(engine, prompt(1, 4))
    ticket = engine.core.submit_flush()
    other = engine.reserve(engine.match(prompt(2, 3)), 3)  # nothing is clean yet: takes three dirty slots
    engine.run()
    assert engine.answers[ticket] == Flushed(4, 3)
    engine.release(other)
    serve(engine, prompt(3, 4))
    ticket = engine.core.submit_flush()
    engine.core.submit_drop()  # on purpose: nothing is owed
    engine.run()
    assert engine.answers[ticket].failed == 0
    engine.check()


def test_a_flush_larger_than_the_disk_says_so_and_destroys_nothing_it_saved():
    """Blocks stored by a flush are evicted by the same flush, and it answers that all is well."""
    disk = DictTier(blocks_max=6)
    engine = make_engine(gpu=6, host=8, disk=disk)
    serve(engine, prompt(1, 6))
    serve(engine, prompt(2, 4))
    in_memory = engine.core.stats()["blocks"]
    ticket = engine.core.submit_flush()
    for _ in range(20):
        engine.run()
        engine.clock.advance(1.0)
    flushed = engine.answers[ticket]
    assert flushed.failed >= flushed.blocks - 6
    assert flushed.blocks - flushed.failed <= len(disk.rows)
    assert engine.core.stats()["blocks"] == in_memory
    engine.check()


def test_flushes_are_answered_each_for_its_own_blocks():
    """One flush is told of another one's failures, or waits for its blocks."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk)
    serve(engine, prompt(1, 2))
    first = engine.core.submit_flush()
    (batch,) = engine.plan()
    serve(engine, prompt(2, 2))
    second = engine.core.submit_flush()
    engine.finish(batch)
    engine.plan()
    assert engine.answers.pop(first) == Flushed(2, 0)
    disk.fail_write = Status.FAILED
    for _ in range(10):
        engine.clock.advance(20.0)
        engine.run()
    assert engine.answers[second] == Flushed(4, 2)
    engine.check()


def test_a_flush_does_not_wait_for_a_condemned_copy_that_is_held():
    """One forgotten match on a damaged block stops every flush for as long as it lives."""
    engine, keys = fill_and_push_down()
    disk = engine.tiers[2]
    disk.corrupt.update(disk.rows)
    match = engine.match(keys, ttl_s=600.0)
    lease = serve(engine, keys)
    assert lease.tokens_ready == 0
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers[ticket].failed > 0
    disk.corrupt.clear()
    engine.core.release_match(match)
    engine.run()
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers[ticket].failed == 0
    assert engine.core.unsaved() == 0
    engine.check()


def test_a_flush_is_content_with_a_copy_that_could_not_be_erased():
    """A block computed anew while its old copy was leaving a failing disk is waited for in vain."""
    disk = DictTier(blocks_max=4)
    engine = make_engine(gpu=8, host=None, disk=disk)
    for number in (0, 1):  # the second prompt makes the first one leave
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        if number == 0:
            engine.run()
    serve(engine, prompt(2, 8))  # pushes the first prompt out of memory
    engine.plan()
    evicting = next(batch for batch in engine.held if batch.evict)
    victim = evicting.evict[0].key[4:]
    assert victim in prompt(0, 4).groups[0]
    assert engine.core.peek(prompt(0, 4)).tokens < 16
    lease = engine.answers[engine.submit_reserve(engine.match(prompt(0, 4)), 4)]
    fill(engine, lease, prompt(0, 4))
    engine.release(lease)
    ticket = engine.core.submit_flush()
    engine.finish(evicting, [Outcome(Status.FAILED)] * evicting.outcomes)
    for _ in range(20):
        engine.clock.advance(1.0)
        engine.run()
    assert ticket in engine.answers
    engine.check()


def test_a_full_disk_evicts_in_policy_order():
    """A full store stops taking blocks, or throws new ones away."""
    disk = DictTier(blocks_max=8)
    engine = make_engine(gpu=4, host=4, disk=disk)
    for number in range(6):
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        engine.run()
    assert len(disk.rows) <= 8
    assert tiers_of(engine, prompt(5, 4))["lmdb"] + tiers_of(engine, prompt(5, 4))["gpu"] == 16
    fresh = make_engine(gpu=4, host=4, disk=disk)
    assert tiers_of(fresh, prompt(5, 4))["lmdb"] == 16
    assert tiers_of(fresh, prompt(0, 4))["lmdb"] == 0
    engine.check()


def test_without_a_disk_the_host_tier_is_the_last_and_forgets():
    """Two memory tiers fill up and nothing can be reserved any more."""
    engine = make_engine(gpu=8, host=6)
    for number in range(8):
        serve(engine, prompt(number, 3))
        engine.run()
    engine.check()
    assert engine.core.stats()["tiers"]["host"]["evicted"] > 0
    assert Reason.EVICTED in {entry.reason for entry in engine.core.residency.journal.entries()}


def test_a_drop_overtakes_transfers_in_flight():
    """A late result resurrects a dropped block, or its slot is reused while it is written."""
    engine, keys = fill_and_push_down()
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=5.0)
    engine.plan()
    load = engine.held[0]
    drop = engine.core.submit_drop()
    assert engine.core.peek(keys).tokens == 0
    engine.plan()
    free_before = engine.core.stats()["tiers"]["host"]["slots_free"]
    assert engine.core.stats()["tiers"]["host"]["slots_quarantined"] == 4
    engine.finish(load)
    assert engine.core.stats()["tiers"]["host"]["slots_quarantined"] == 0
    assert engine.core.stats()["tiers"]["host"]["slots_free"] == free_before + 4
    engine.run()
    assert engine.answers[drop] == Dropped(durable=True)
    assert engine.answers[ticket].tokens_ready == 0
    assert not engine.tiers[2].rows
    assert engine.core.peek(keys).tokens == 0
    engine.release(engine.answers[ticket])
    engine.check()
    assert engine.core.stats()["blocks"] == 0


def test_blocks_stored_after_a_reset_survive_it():
    """A reset erases what was written after it."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=8, disk=disk)
    serve(engine, prompt(1, 4))
    engine.core.submit_flush()
    engine.plan()
    engine.core.submit_drop()
    serve(engine, prompt(1, 4))
    engine.core.submit_flush()
    engine.run()
    assert engine.core.peek(prompt(1, 4)).tiers == {"gpu": 16, "host": 0, "lmdb": 0}
    assert len(disk.rows) == 4
    engine.check()


def test_a_failed_drop_is_not_called_durable():
    """A drop that the disk refused is reported as done."""
    engine, keys = fill_and_push_down()
    engine.tiers[2].fail_write = Status.FAILED
    drop = engine.core.submit_drop()
    engine.run()
    assert engine.answers[drop] == Dropped(durable=False)
    assert engine.core.peek(keys).tokens == 0
    engine.tiers[2].fail_write = None
    engine.clock.advance(60.0)
    engine.run()
    assert not engine.tiers[2].rows
    engine.check()


def test_a_failing_disk_is_left_alone_for_a_while():
    """Stores to a dead disk spin (vllm PR#55297)."""
    disk = DictTier()
    disk.fail_write = Status.FAILED
    engine = make_engine(gpu=4, host=4, disk=disk)
    for number in range(4):
        serve(engine, prompt(number, 4))
        engine.run()
    failures = engine.core.stats()["tiers"]["lmdb"]["write_failed"]
    assert failures > 0
    engine.run()
    assert engine.core.stats()["tiers"]["lmdb"]["write_failed"] == failures
    disk.fail_write = None
    engine.clock.advance(20.0)
    engine.run()
    assert engine.core.stats()["tiers"]["lmdb"]["written_blocks"] > 0
    engine.check()
