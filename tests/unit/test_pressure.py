"""A disk that others fill: what leaves the store so that they find what they were promised."""

import pytest

from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import BLOCK_BYTES, make_engine, prompt, serve, tiers_of


def stored(prompts, blocks=4, policies=("lru", "lru")):
    """An engine without a host tier whose disk has these prompts, oldest first."""
    engine = make_engine(gpu=8, host=None, disk=DictTier(), policies=policies)
    for number in range(prompts):
        serve(engine, prompt(number, blocks))
        engine.core.submit_flush()
        engine.run()
    return engine, engine.tiers[-1]


def later(engine, seconds=1.5, times=20):
    for _ in range(times):
        engine.clock.advance(seconds)
        engine.run()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_an_idle_store_gives_way_coldest_first(policy):
    """The disk fills up although half of it could be given back, or what is given back is what is used most."""
    engine, disk = stored(6, policies=("lru", policy))
    assert len(disk.rows) == 24
    serve(engine, prompt(0, 4))
    disk.allowed_bytes = 10 * BLOCK_BYTES
    later(engine)
    assert len(disk.rows) == 10
    assert tiers_of(engine, prompt(0, 4))["lmdb"] + tiers_of(engine, prompt(0, 4))["gpu"] == 16
    assert engine.core.peek(prompt(1, 4)).tokens == 0
    tier = engine.core.stats()["tiers"]["lmdb"]
    assert (tier["gave_way"], tier["evicted"]) == (14, 14)
    engine.check()


def test_what_is_held_stays():
    """A lease that is being loaded loses its source."""
    _, disk = stored(2)
    fresh = make_engine(gpu=8, host=None, disk=disk)
    match = fresh.match(prompt(0, 4), ttl_s=1e6)
    disk.allowed_bytes = 0
    later(fresh)
    assert len(disk.rows) == 4
    fresh.core.release_match(match)
    later(fresh)
    assert len(disk.rows) == 0
    fresh.check()


def test_nothing_is_stored_while_it_gives_way_and_again_afterwards():
    """Blocks are written and evicted in turns; or the store stays useless after the disk is free again."""
    engine, disk = stored(2)
    disk.allowed_bytes = 4 * BLOCK_BYTES
    later(engine)
    written = engine.core.stats()["tiers"]["lmdb"]["written_blocks"]
    serve(engine, prompt(7, 4))
    engine.core.submit_flush()
    later(engine)
    assert engine.core.stats()["tiers"]["lmdb"]["written_blocks"] <= written + 4
    assert len(disk.rows) <= 4
    disk.allowed_bytes = None
    later(engine)
    serve(engine, prompt(8, 4))
    engine.core.submit_flush()
    engine.run()
    assert engine.core.peek(prompt(8, 4)).tokens == 16
    assert any(key[4:] in prompt(8, 4).groups[0] for key, _, _ in disk.rows.values())
    engine.check()


def test_a_disk_smaller_than_what_the_memory_above_wants_clean_comes_to_rest():
    """What leaves the disk is dirty in the host tier again, and written again, for ever."""
    engine = make_engine(gpu=8, host=16, disk=DictTier(blocks_max=8), watermarks=(0.5, 1.0))
    for number in range(6):
        serve(engine, prompt(number, 4))
        later(engine, times=2)
    engine.tiers[-1].allowed_bytes = 5 * BLOCK_BYTES + BLOCK_BYTES // 2  # room for a part of a block
    later(engine)
    written = engine.core.stats()["tiers"]["lmdb"]["written_blocks"]
    later(engine)
    assert engine.core.stats()["tiers"]["lmdb"]["written_blocks"] == written
    assert 0 < len(engine.tiers[-1].rows) <= 5
    engine.check()


@pytest.mark.parametrize("status", [Status.FAILED, Status.NO_ROOM])
def test_evictions_that_fail_are_tried_again_later(status):
    """A full disk makes the engine spin, or give up for good."""
    engine, disk = stored(3)
    disk.allowed_bytes = 0
    evict = disk.write
    disk.write = lambda batch: [Outcome(status)] * (len(batch.items) + len(batch.evict) + bool(batch.sidecar))
    later(engine, times=5)
    assert len(disk.rows) == 12
    assert engine.core.stats()["tiers"]["lmdb"]["gave_way"] <= 5
    disk.write = evict
    later(engine, seconds=20.0)
    assert len(disk.rows) == 0
    engine.check()


def test_a_write_that_takes_long_does_not_keep_the_engine_awake():
    """A hung disk costs a processor."""
    engine = make_engine(gpu=8, host=None, disk=DictTier())
    serve(engine, prompt(1, 4))
    engine.core.submit_flush()
    engine.plan()
    assert engine.held  # and it hangs
    for _ in range(5):
        engine.clock.advance(1.3)
        engine.plan()
        assert engine.core.wake_at_s(engine.clock.now()) > engine.clock.now()


def test_an_idle_engine_asks_once_a_second():
    """A disk that fills while nobody uses the cache is noticed late, or the engine never sleeps."""
    engine, disk = stored(1)
    asked = []
    write = disk.write
    disk.write = lambda batch: asked.append(engine.clock.now()) or write(batch)
    for _ in range(100):
        engine.clock.advance(0.1)
        engine.run()
    assert 9 <= len(asked) <= 11
    wake_s = engine.core.wake_at_s(engine.clock.now())
    assert engine.clock.now() < wake_s <= engine.clock.now() + 1.0
