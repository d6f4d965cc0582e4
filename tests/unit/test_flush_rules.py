"""What a flush may give up, and what a lying or mended disk does to it."""

import pytest

from kvtier.cache.leases import Lease
from kvtier.engine.answers import Flushed
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, Outcome, Status
from tests.engine_bench import check_prefix, fill, make_engine, prompt, serve, tiers_of


def flush(engine):
    ticket = engine.core.submit_flush()
    engine.run()
    return engine.answers.pop(ticket)


def dirty(engine, count, blocks=4):
    prompts = [prompt(number, blocks) for number in range(count)]
    for keys in prompts:
        serve(engine, keys)
    return prompts


def test_a_pause_of_the_disk_is_no_attempt():
    """A disk that has just been mended loses the blocks above a full host tier, which were never tried."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=4, disk=disk, watermarks=(0.01, 0.02))
    disk.fail_write = Status.FAILED
    prompts = dirty(engine, 4)
    ticket = engine.core.submit_flush()
    for _ in range(2):  # it is tried twice, and fails
        engine.run()
        engine.clock.advance(0.3)
    disk.fail_write = None
    for _ in range(20):  # whoever plans meanwhile is no attempt
        engine.plan()
    for _ in range(40):
        engine.run()
        engine.clock.advance(0.5)
    answer = engine.answers.pop(ticket)
    assert answer.failed <= 4, "only what was in the failing batches"
    assert flush(engine).failed == 0
    assert all(tiers_of(engine, keys)["gpu"] + tiers_of(engine, keys)["lmdb"] >= 16 for keys in prompts)


def test_a_disk_that_goes_on_failing_ends_a_flush():
    """A flush over a full host tier waits for ever for a disk that fails."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=4, disk=disk, watermarks=(0.01, 0.02))
    disk.fail_write = Status.FAILED
    dirty(engine, 4)
    ticket = engine.core.submit_flush()
    for _ in range(100):
        engine.run()
        engine.clock.advance(10.0)
    assert engine.answers.pop(ticket) == Flushed(16, 16)
    engine.check()


def seconds_of_a_flush(engine):
    """How long it takes if time passes only where the engine waits for it, and how it ended."""
    started_s = engine.clock.now()
    ticket = engine.core.submit_flush()
    for _ in range(1000):
        engine.run()
        if ticket in engine.answers:
            return engine.clock.now() - started_s, engine.answers.pop(ticket)
        engine.clock.advance(engine.core.wake_at_s(engine.clock.now()) - engine.clock.now())
    raise AssertionError("it does not end")


@pytest.mark.parametrize("blocks", [8, 48])
def test_a_flush_to_a_disk_that_fails_at_once_does_not_grow_with_what_is_dirty(blocks):
    """Stopping a server whose disk is gone takes hours: each batch of host memory waits three times for a pause."""
    disk = DictTier()
    engine = make_engine(gpu=64, host=64, disk=disk, watermarks=(0.01, 0.02))
    disk.fail_write = Status.FAILED
    dirty(engine, blocks // 4)
    seconds, answer = seconds_of_a_flush(engine)
    assert answer == Flushed(blocks, blocks)
    assert seconds < 4.0
    for _ in range(8):
        seconds, answer = seconds_of_a_flush(engine)  # it has failed for long
        assert answer == Flushed(blocks, blocks)
        assert seconds <= 10.5, "one try, behind the longest pause"
    disk.fail_write = None
    seconds, answer = seconds_of_a_flush(engine)
    assert answer == Flushed(blocks, 0)
    engine.check()


def test_batches_that_fail_together_are_one_failure():
    """Four batches that are under way at once leave a disk alone for eight times as long as one; or a flush gives up
    after two tries."""
    disk = DictTier()
    engine = make_engine(gpu=64, host=64, disk=disk, watermarks=(0.01, 0.02))
    disk.fail_write = Status.FAILED
    dirty(engine, 12)
    engine.core.submit_flush()
    engine.run()
    level = engine.core.residency.levels[-1]
    assert engine.core.planner.stats(2)["circuit"] == "closed"
    assert level.setbacks >= 2
    assert (level.failures, round(level.blocked_until_s - engine.clock.now(), 6)) == (1, 0.1)


def test_a_disk_that_refuses_some_blocks_stores_the_others():
    """A few bad pages make a flush wait ten seconds for each batch, or give up what could be stored."""
    disk = DictTier()
    engine = make_engine(gpu=64, host=64, disk=disk, watermarks=(0.01, 0.02))
    dirty(engine, 12)
    real, bad = disk.write, set()

    def some(batch):
        ends = real(batch)
        for place, item in enumerate(batch.items):
            if item.key[8] % 4 == 0:
                bad.add(item.key)
                ends[place] = Outcome(Status.FAILED, detail="a bad page")
        return ends

    disk.write = some
    seconds, answer = seconds_of_a_flush(engine)
    assert len(bad) > 8
    assert answer == Flushed(48, len(bad))
    assert seconds < 4.0


def test_a_disk_that_refused_a_part_is_left_alone_for_a_moment():
    """A disk that begins to fail is given everything again at once; or a pause grows though it stores most."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=64, disk=disk, watermarks=(0.01, 0.02))
    real, level = disk.write, engine.core.residency.levels[-1]

    def all_but_one(batch):
        ends = real(batch)
        if len(batch.items) > 1:
            ends[0] = Outcome(Status.FAILED, detail="a bad page")
        return ends

    disk.write = all_but_one
    for number in range(3):
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        engine.run()
        assert disk.used_bytes() > 0
        assert (level.failures, round(level.blocked_until_s - engine.clock.now(), 6)) == (1, 0.1)
        engine.clock.advance(0.1)


def test_a_host_tier_that_others_hold_is_passed_by():
    """A caller that flushes before it has released its matches waits for their TTL."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=4, disk=disk, watermarks=(0.01, 0.02))
    below = prompt(9, 4)
    serve(engine, below)
    assert flush(engine).failed == 0
    dirty(engine, 2)  # they take its slots in the gpu tier
    held = engine.match(below)
    assert held.tiers["host"] == 16
    assert flush(engine) == Flushed(8, 0)
    engine.core.release_match(held)
    assert [tiers_of(engine, prompt(number, 4))["gpu"] for number in range(2)] == [16, 16]
    engine.check()


@pytest.mark.parametrize("lie", [Status.MISSING, Status.CORRUPT, Status.DEVICE_LOST])
@pytest.mark.parametrize("host", [None, 8])
def test_what_a_disk_says_of_a_store_costs_no_copy_above(lie, host):
    """A block that could not be stored is thrown away where it was, or the memory above is taken for lost."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=host, disk=disk, watermarks=(0.01, 0.02))
    keys = prompt(1, 4)
    serve(engine, keys)
    write = disk.write
    disk.write = lambda batch: [Outcome(lie)] * len(batch.items) + [DONE] * (len(batch.evict) + bool(batch.sidecar))
    ticket = engine.core.submit_flush()
    for _ in range(60):
        engine.run()
        engine.clock.advance(10.0)
    assert engine.answers.pop(ticket) == Flushed(4, 4)
    assert engine.core.stats()["tiers"]["lmdb"]["write_failed"] >= 4
    disk.write = write
    assert flush(engine) == Flushed(4, 0)
    lease = serve(engine, keys, keep=True)
    check_prefix(engine, lease, keys)
    assert lease.tokens_ready == 16
    engine.release(lease)
    engine.check()


def test_a_disk_that_says_a_device_is_lost_fails_its_reads():
    """One odd outcome of a disk ends the gpu tier."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, watermarks=(0.01, 0.02))
    keys, others = prompt(1, 4), prompt(2, 8)
    serve(engine, keys)
    assert flush(engine).failed == 0
    serve(engine, others)
    disk.fail_read = Status.DEVICE_LOST
    lease = serve(engine, keys, keep=True)
    assert isinstance(lease, Lease)
    assert lease.tokens_ready == 0
    engine.release(lease)
    engine.check()


def test_a_match_that_looks_again_is_cut_to_the_slots_asked_for():
    """Somebody commits the prefix meanwhile, and an engine that asked for two blocks is told it made a mistake."""
    engine = make_engine(gpu=16, host=8)
    keys = prompt(1, 6)
    blank = engine.match(keys)
    serve(engine, keys)
    ticket = engine.submit_reserve(blank, 2)
    engine.run()
    lease = engine.answers.pop(ticket)
    assert (lease.tokens_ready, len(lease.slots())) == (8, 2)
    engine.release(lease)
    engine.check()


def test_a_refused_reservation_lets_go_of_the_prefix_that_was_there():
    """A prefix that a refused request would have shared can never leave the gpu tier."""
    engine = make_engine(gpu=8, host=8)
    keys = prompt(1, 8)
    held = serve(engine, prompt(2, 4), keep=True)
    serve(engine, keys.prefix(12))
    match = engine.match(keys)
    assert not isinstance(engine.reserve(match, 8), Lease)
    engine.core.release_match(match)
    assert engine.core.stats()["tiers"]["gpu"]["blocks_idle"] == 3
    engine.release(held)
    engine.check()


def test_stores_stay_within_the_queue_and_leave_slots_to_the_living():
    """A slow disk's queue grows without bound, or holds every slot of the tier above."""
    engine = make_engine(gpu=32, host=None, disk=DictTier(), watermarks=(0.9, 0.95))
    engine.core.residency.levels[1].batch_bytes = 1 << 30
    engine.core.planner.demotions._queue_bytes = 1
    lease = engine.reserve(engine.match(prompt(1, 32)), 32)
    fill(engine, lease, prompt(1, 32))
    engine.release(lease)
    engine.plan()
    assert len(engine.held) == 1, "with a byte under way the queue is full"
    stats = engine.core.stats()["tiers"]
    moving = sum(transfer.length_bytes for transfer in engine.held[0].transfers)
    assert (stats["gpu"]["reading_bytes"], stats["lmdb"]["writing_bytes"]) == (moving, moving)
    assert stats["lmdb"]["reading_bytes"] == stats["gpu"]["writing_bytes"] == 0
    engine.core.planner.demotions._queue_bytes = 1 << 30
    engine.plan()
    held = sum(len(batch.transfers) for batch in engine.held)
    assert held <= 16, f"{held} of 32 slots wait for a disk"
    assert flush(engine).failed == 0
    serve(engine, prompt(2, 32))
    assert flush(engine).failed == 0
    match = engine.match(prompt(1, 32))
    engine.submit_reserve(match, 32, 1.0)
    stats = engine.core.stats()["tiers"]["lmdb"]
    loading = sum(t.length_bytes for batch in engine.held if batch.source == 1 for t in batch.transfers)
    assert stats["reading_bytes"] == loading
    assert stats["waiting_bytes"] + stats["reading_bytes"] > 0
    engine.run()
    assert engine.core.stats()["tiers"]["lmdb"]["waiting_bytes"] == 0
