"""Blocks on their way up: promotion, sharing, deadlines, failures, prefetch, event by event."""

import pytest

from kvtier.cache.leases import Lease
from kvtier.events import Reason
from kvtier.testing.dict_tier import DictTier
from kvtier.types import DONE, Outcome, Status
from tests.engine_bench import (
    BLOCK_BYTES,
    check_prefix,
    content_of,
    fill,
    fill_and_push_down,
    make_engine,
    prompt,
    serve,
)


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
    assert not any(batch.transfers for batch in engine.plan())
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
