"""The core without threads: lookups, leases, commits and what they may not do."""

import pytest

from kvtier.cache.leases import Lease, NoRoom
from kvtier.errors import UsageError
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import (
    BLOCK_TOKENS,
    check_prefix,
    fill,
    make_engine,
    prompt,
    serve,
    tiny_model,
)


def test_a_committed_prefix_is_found_and_its_bytes_are_right():
    """Nothing is ever restored."""
    engine = make_engine()
    keys = prompt(1, 3)
    serve(engine, keys)
    lease = serve(engine, keys)
    assert lease.tokens_ready == 12
    assert lease.tiers == {"gpu": 12, "host": 0}
    engine.check()


def test_uncommitted_slots_are_never_found():
    """A lookup serves a block that was reserved and never written."""
    engine = make_engine()
    keys = prompt(1, 3)
    lease = engine.reserve(engine.match(keys), 3)
    assert engine.core.peek(keys).tokens == 0
    engine.release(lease)
    assert engine.core.peek(keys).tokens == 0
    engine.check()


def test_reclaim_of_clean_slots_needs_no_io():
    """A reserve under pressure waits for a store."""
    engine = make_engine(gpu=8)
    serve(engine, prompt(1, 4))
    serve(engine, prompt(2, 3))
    engine.run()
    ticket = engine.submit_reserve(engine.match(prompt(3, 4)), 4)
    assert isinstance(engine.answers[ticket], Lease)  # answered at once, with no batch planned in between
    assert not engine.held
    assert engine.core.stats()["tiers"]["gpu"]["dropped_dirty"] == 0
    assert engine.core.stats()["tiers"]["gpu"]["reclaimed"] == 3
    engine.check()


def test_dirty_blocks_are_dropped_only_when_nothing_is_clean_and_counted():
    """A reserve fails, or waits, although idle blocks could make room."""
    engine = make_engine(gpu=4)
    first = prompt(1, 4)
    serve(engine, first)
    ticket = engine.submit_reserve(engine.match(prompt(2, 3)), 3)
    assert isinstance(engine.answers[ticket], Lease)
    assert engine.core.stats()["tiers"]["gpu"]["dropped_dirty"] == 3
    assert engine.core.peek(first).tokens == BLOCK_TOKENS  # the shallowest block stays
    engine.check()


def test_no_room_changes_nothing_and_the_match_stays_valid():
    """A refused reserve leaks pins or slots."""
    engine = make_engine(gpu=4)
    held = serve(engine, prompt(1, 3), keep=True)
    keys = prompt(1, 4)
    match = engine.match(keys)
    assert match.tokens == 12
    answer = engine.reserve(match, 6)
    assert answer == NoRoom(slots_needed=3, slots_available=1)
    engine.check()
    engine.release(held)
    lease = engine.reserve(match, 4)
    assert lease.tokens_ready == 12
    engine.release(lease)
    engine.check()


def test_duplicates_are_private_and_inherit():
    """Two leases that computed the same block share a slot, or the survivor is lost."""
    engine = make_engine(gpu=8)
    keys = prompt(1, 2)
    first = engine.reserve(engine.match(keys), 2)
    second = engine.reserve(engine.match(keys), 2)
    fill(engine, first, keys)
    fill(engine, second, keys)
    assert not set(first.slots()) & set(second.slots())
    assert engine.core.stats()["duplicate_blocks"] == 2
    engine.release(first)
    engine.check()
    other = engine.reserve(engine.match(prompt(2, 6)), 6)  # takes all other slots: the first copies are reclaimed
    assert isinstance(other, Lease)
    assert engine.core.peek(keys).tokens == 8
    engine.check()
    engine.release(second)
    serve(engine, keys)
    engine.check()


def test_misuse_is_refused_before_anything_changes():
    """A wrong pair corrupts somebody else's block."""
    engine = make_engine(gpu=8)
    keys, other = prompt(1, 2), prompt(2, 2)
    lease = engine.reserve(engine.match(keys), 2)
    stranger = engine.reserve(engine.match(other), 2)
    good = (lease.slots()[0], keys.groups[0][0])
    with pytest.raises(UsageError, match="does not belong"):
        engine.core.commit(lease, [good, (stranger.slots()[0], keys.groups[0][1])])
    with pytest.raises(UsageError, match="not a key of this model"):
        engine.core.commit(lease, [good, (lease.slots()[1], b"\0\0")])
    with pytest.raises(UsageError, match="another key"):
        engine.core.commit(lease, [good, (lease.slots()[0], keys.groups[0][1])])
    assert engine.core.peek(keys).tokens == 0
    engine.core.commit(lease, [good])
    with pytest.raises(UsageError, match="another key"):
        engine.core.commit(lease, [(lease.slots()[0], keys.groups[0][1])])
    engine.release(lease)
    with pytest.raises(UsageError, match="released"):
        engine.core.commit(lease, [good])
    serve(engine, other)
    with pytest.raises(UsageError, match="covers"):
        engine.submit_reserve(engine.match(other), 1)
    with pytest.raises(UsageError, match="at least one"):
        engine.submit_reserve(engine.match(other), 0)
    engine.check()


def test_releases_are_idempotent_and_matches_expire():
    """Pins are never or twice released (LMCache#1034, #3381)."""
    engine = make_engine(gpu=4)
    keys = prompt(1, 2)
    lease = serve(engine, keys)
    engine.release(lease)
    engine.release(lease)
    match = engine.match(keys, ttl_s=5.0)
    engine.core.release_match(match)
    engine.core.release_match(match)
    abandoned = engine.match(keys, ttl_s=5.0)
    assert engine.core.stats()["tiers"]["gpu"]["blocks_idle"] == 0
    engine.clock.advance(6.0)
    engine.run()
    assert engine.core.stats()["tiers"]["gpu"]["blocks_idle"] == 2
    assert engine.core.stats()["matches_expired"] == 1
    serve(engine, prompt(2, 4))  # takes all slots
    lease = engine.reserve(abandoned, 2)  # an expired match looks again, and finds what is there now
    assert lease.tokens_ready in (0, 8)
    check_prefix(engine, lease, keys)
    engine.release(lease)
    engine.check()


def test_groups_are_cut_at_what_all_of_them_have():
    """One group's blocks are used without the other's (sglang PR#21125, PR#31108)."""
    model = tiny_model(groups=2)
    disk = DictTier()
    engine = make_engine(gpu=12, host=16, disk=disk, model=model)
    keys = prompt(1, 3, model)
    serve(engine, keys)
    engine.core.submit_flush()
    engine.run()
    lost = next(place for place, row in disk.rows.items() if row[0][4:] == keys.groups[1][2])
    del disk.rows[lost]
    fresh = make_engine(gpu=12, host=16, disk=disk, model=model)
    assert fresh.core.peek(keys).tokens == 8
    lease = serve(fresh, keys)
    assert lease.tokens_ready == 8
    assert serve(fresh, keys).tokens_ready == 12
    fresh.check()


def test_namespaces_do_not_see_each_other():
    """Another model's, or another epoch's, KV is served (vllm#42125)."""
    engine = make_engine(gpu=8)
    keys = prompt(1, 2)
    serve(engine, keys)
    engine.core.set_weights_epoch("v2")
    assert engine.core.peek(keys).tokens == 0
    serve(engine, keys)
    engine.core.set_weights_epoch("v1")
    assert engine.core.peek(keys).tokens == 8
    engine.check()
