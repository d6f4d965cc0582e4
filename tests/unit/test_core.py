"""The core without threads: what is demoted, reclaimed, promoted and cut, event by event."""

import pytest

from kvtier.cache.leases import Lease, NoRoom
from kvtier.engine.core import Dropped, Flushed
from kvtier.errors import UsageError
from kvtier.events import Reason
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, Outcome, Status
from tests.engine_bench import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    check_prefix,
    content_of,
    fill,
    make_engine,
    prompt,
    serve,
    tiny_model,
)


def tiers_of(engine, keys):
    return engine.core.peek(keys).tiers


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


def fill_and_push_down(disk=None, blocks=4):
    """A prompt that lies on disk only, and the engine it does so in."""
    disk = disk or DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk)
    keys = prompt(1, blocks)
    serve(engine, keys)
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=8, host=16, disk=disk)
    assert tiers_of(fresh, keys) == {"gpu": 0, "host": 0, "lmdb": blocks * BLOCK_TOKENS}
    return fresh, keys


def test_a_prefix_on_disk_is_promoted_by_way_of_host_memory():
    """A hit in a lower tier is not restored, or its bytes are wrong."""
    engine, keys = fill_and_push_down()
    lease = serve(engine, keys)
    assert lease.tokens_ready == 16
    assert lease.tiers == {"gpu": 0, "host": 0, "lmdb": 16}
    assert engine.core.stats()["tiers"]["host"]["blocks"] == 4
    assert engine.core.stats()["tiers"]["lmdb"]["blocks"] == 4
    engine.check()


def test_promoted_blocks_are_born_clean():
    """A promoted block is written down again."""
    engine, keys = fill_and_push_down()
    serve(engine, keys)
    engine.core.submit_flush()
    assert engine.plan() == []
    assert engine.core.unsaved() == 0


def test_two_reservers_share_one_transfer():
    """N readers of one prefix read it N times (vllm#44294)."""
    engine, keys = fill_and_push_down()
    tickets = [engine.submit_reserve(engine.match(keys), 4) for _ in range(3)]
    engine.run()
    leases = [engine.answers[ticket] for ticket in tickets]
    assert engine.tiers[2].reads == 4
    assert len({lease.slots() for lease in leases}) == 1
    for lease in leases:
        assert lease.tokens_ready == 16
        check_prefix(engine, lease, keys)
        engine.release(lease)
    engine.check()


def test_a_cancelled_reserve_loses_nothing():
    """Giving a pending reservation up leaks slots or pins (vllm-ascend#16662)."""
    engine, keys = fill_and_push_down()
    match = engine.match(keys)
    ticket = engine.submit_reserve(match, 4)
    (batch,) = engine.plan()
    engine.core.give_up(ticket)
    engine.check()
    engine.finish(batch)
    engine.run()
    engine.core.release_match(match)
    engine.check()
    stats = engine.core.stats()
    assert ticket not in engine.answers
    assert stats["leases"] == 0
    assert stats["tiers"]["host"]["blocks_idle"] == 4  # the load went on, and its blocks are there for the next
    assert stats["tiers"]["gpu"]["slots_free"] == 8


def test_a_late_load_cuts_the_prefix_and_never_writes_into_the_leases_slots():
    """A request waits for ever for a slow tier, or its own KV is overwritten by the late bytes (LMCache#4517)."""
    engine, keys = fill_and_push_down()
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=0.5)
    engine.plan()
    engine.clock.advance(1.0)
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    promoted = {t.target_place for batch in engine.held for t in batch.transfers if batch.target == 0}
    assert not promoted & set(lease.slots())
    fill(engine, lease, keys)
    engine.run()
    for slot, key in zip(lease.slots(), keys.groups[0], strict=True):
        assert bytes(engine.tiers[0].slot(slot)[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES)
    engine.release(lease)
    assert engine.core.stats()["deadline_cuts"] == 1
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


@pytest.mark.parametrize("host", [None, 4, 64])
def test_a_hung_disk_does_not_take_the_slots_away(host):
    """Loads that nobody waits for any more pile up on slots, until no request finds room."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=host, disk=disk)
    for number in range(30):
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        engine.run()
    hung = make_engine(gpu=8, host=host, disk=disk)
    for number in range(30):
        ticket = hung.submit_reserve(hung.match(prompt(number, 4)), 4, deadline_s=0.1)
        hung.plan()
        hung.clock.advance(0.2)
        hung.plan()
        lease = hung.answers.pop(ticket)
        assert isinstance(lease, Lease), number
        hung.release(lease)
        hung.check()
    stuck = sum(len(batch.transfers) for batch in hung.held if batch.target == 0)
    assert hung.core.stats()["tiers"]["gpu"]["slots_free"] == 8 - stuck
    assert stuck <= 4
    for batch in list(hung.held):
        hung.finish(batch)
    hung.run()
    hung.check()
    serve(hung, prompt(5, 4))


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISSING, Status.FAILED])
def test_a_failed_load_is_a_miss_from_that_block_on(status):
    """A failed block is served, waited for, or takes the whole prefix with it (LMCache#3388, dynamo#15079)."""
    engine, keys = fill_and_push_down()
    ticket = engine.submit_reserve(engine.match(keys), 4)
    (batch,) = engine.plan()
    good = [DONE] * 2
    for transfer in batch.transfers[:2]:
        engine.tiers[1].slot(transfer.target_place)[:BLOCK_BYTES] = disk_bytes(engine, transfer)
    engine.finish(batch, [*good, Outcome(status), DONE])
    engine.run()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 8
    check_prefix(engine, lease, keys)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.run()
    engine.check()
    counters = engine.core.stats()["tiers"]["lmdb"]
    name = {Status.CORRUPT: "corrupt", Status.MISSING: "missing", Status.FAILED: "read_failed"}[status]
    assert counters[name] == 1
    assert engine.core.stats()["failed_cuts"] == 1


def disk_bytes(engine, transfer):
    return engine.tiers[2].rows[transfer.source_place][2]


def test_a_corrupt_block_is_forgotten_and_erased():
    """A condemned block is offered again and again (vllm#49176)."""
    engine, keys = fill_and_push_down()
    disk = engine.tiers[2]
    bad = next(place for place, row in disk.rows.items() if row[0][4:] == keys.groups[0][1])
    disk.corrupt.add(bad)
    lease = engine.reserve(engine.match(keys), 4)
    assert lease.tokens_ready == 4
    engine.release(lease)
    engine.run()
    assert engine.core.peek(keys).tokens == 4
    assert bad not in disk.rows
    assert engine.core.stats()["tiers"]["lmdb"]["evicted"] == 0
    assert [entry.reason for entry in engine.core.residency.journal.entries()] == [Reason.CONDEMNED]
    engine.check()


def test_a_condemned_block_that_cannot_be_erased_stays_condemned():
    """A disk that refuses the erasing makes a damaged block good again."""
    engine, keys = fill_and_push_down()
    disk = engine.tiers[2]
    bad = next(place for place, row in disk.rows.items() if row[0][4:] == keys.groups[0][1])
    disk.corrupt.add(bad)
    disk.fail_write = Status.FAILED
    engine.release(engine.reserve(engine.match(keys), 4))
    engine.run()
    assert engine.core.peek(keys).tokens == 4
    assert bad in disk.rows
    disk.fail_write = None
    engine.clock.advance(60.0)
    engine.run()
    assert bad not in disk.rows
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
    serve_unplanned = engine.core.peek(prompt(0, 4)).tokens
    assert serve_unplanned < 16
    lease = engine.answers[engine.submit_reserve(engine.match(prompt(0, 4)), 4)]
    fill(engine, lease, prompt(0, 4))
    engine.release(lease)
    ticket = engine.core.submit_flush()
    engine.finish(evicting, [Outcome(Status.FAILED)] * (len(evicting.transfers) + len(evicting.evict)))
    for _ in range(20):
        engine.clock.advance(1.0)
        engine.run()
    assert ticket in engine.answers
    engine.check()


def test_a_reset_during_a_load_is_no_damage():
    """A healthy disk is said to be corrupt."""
    engine, keys = fill_and_push_down()
    ticket = engine.submit_reserve(engine.match(keys), 4)
    (batch,) = engine.plan()
    engine.core.submit_drop()
    engine.finish(batch, [Outcome(Status.CORRUPT), Outcome(Status.MISSING), DONE, DONE])
    engine.run()
    disk = engine.core.stats()["tiers"]["lmdb"]
    assert (disk["corrupt"], disk["missing"]) == (0, 0)
    engine.release(engine.answers[ticket])
    engine.check()


def test_a_full_disk_evicts_in_policy_order():
    """A full store stops taking blocks, or throws new ones away."""
    disk = DictTier(blocks_max=8)
    engine = make_engine(gpu=8, host=8, disk=disk)
    for number in range(6):
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        engine.run()
    assert len(disk.rows) <= 8
    assert tiers_of(engine, prompt(5, 4))["lmdb"] + tiers_of(engine, prompt(5, 4))["gpu"] == 16
    fresh = make_engine(gpu=8, host=8, disk=disk)
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


@pytest.mark.parametrize("host", [None, 16])
@pytest.mark.parametrize("hops", [0, 1])
def test_giving_up_a_dropped_prefix_lets_everything_go(host, hops):
    """A reset and a cancelled load meet in the queue, and slots stay in quarantine for good."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=host, disk=disk)
    keys = prompt(1, 4)
    serve(engine, keys)
    engine.core.submit_flush()
    engine.run()
    engine = make_engine(gpu=8, host=host, disk=disk)
    match = engine.match(keys)
    ticket = engine.submit_reserve(match, 4)
    if hops and host:
        (batch,) = engine.plan()
        engine.finish(batch)  # the blocks are in host memory, their next hop is queued
    engine.core.submit_drop()
    engine.core.give_up(ticket)
    engine.core.release_match(match)
    engine.run()
    engine.check()
    tiers = engine.core.stats()["tiers"]
    assert tiers["gpu"]["slots_free"] == 8
    assert not host or tiers["host"]["slots_free"] == host
    assert not disk.rows


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


def test_prefetch_brings_disk_blocks_to_host_within_its_budget():
    """A hint reads nothing, or more than it may, or loses what it brought."""
    engine, keys = fill_and_push_down(blocks=6)
    engine.core.prefetch(keys, engine.clock.now())
    engine.run()
    assert tiers_of(engine, keys) == {"gpu": 0, "host": 24, "lmdb": 0}
    lease = serve(engine, keys)
    assert lease.tiers["host"] == 24
    assert engine.core.stats()["prefetched_blocks"] == 6
    engine.core.prefetch(prompt(9, 3), engine.clock.now())  # unknown: nothing happens
    assert not engine.plan()
    engine.check()


def test_prefetch_respects_its_budget():
    """Prefetching thrashes host memory (vllm#49902)."""
    engine, keys = fill_and_push_down(blocks=6)
    engine.core._prefetch._blocks_max = 2
    engine.core.prefetch(keys, engine.clock.now())
    engine.run()
    stats = engine.core.stats()
    assert (stats["prefetched_blocks"], stats["prefetch_refused"]) == (2, 4)
    engine.clock.advance(31.0)
    engine.run()
    assert engine.core.stats()["tiers"]["host"]["blocks_idle"] == 2  # never used: not held any longer
    engine.check()


def test_prefetch_works_for_a_few_requests_at_a_time():
    """A long queue of announced requests pushes out what the first of them need."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=16, disk=disk)
    for number in range(3):
        serve(engine, prompt(number, 2))
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=8, host=16, disk=disk)
    fresh.core._prefetch._lookahead_requests = 2
    for number in range(3):
        fresh.core.prefetch(prompt(number, 2), fresh.clock.now())
    fresh.run()
    assert [tiers_of(fresh, prompt(number, 2))["host"] for number in range(3)] == [8, 8, 0]
    serve(fresh, prompt(0, 2))
    fresh.core.prefetch(prompt(2, 2), fresh.clock.now())
    fresh.run()
    assert tiers_of(fresh, prompt(2, 2))["host"] == 8
    fresh.check()


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
