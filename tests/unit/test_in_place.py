"""Prefixes that are read in host memory, where they lie, event by event."""

import pytest

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease, NoRoom
from kvtier.engine.polled import Load, PolledSurface
from kvtier.errors import DeviceLost, UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import BLOCK_BYTES, content_of, make_engine, prompt, tiny_model


def shown(engine, lease, keys):
    """How many leading blocks of a lease's table hold their keys' bytes; all that are ready must."""
    count = 0
    for group, row in enumerate(keys.groups):
        for entry, key in list(zip(lease.table(group), row, strict=False))[: lease.tokens_ready // 4]:
            slot = engine.tiers[0].slot(entry) if entry >= 0 else engine.tiers[1].slot(~entry)
            assert bytes(slot[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES), entry
            count += 1
    return count


def fill(engine, lease, keys):
    """Compute and commit what is not restored."""
    for group, row in enumerate(keys.groups):
        pairs = list(zip(lease.table(group), row, strict=False))[lease.tokens_ready // 4 :]
        for slot, key in pairs:
            engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
        engine.core.commit(lease, pairs)


def serve(engine, keys: Keys, blocks=None) -> Lease:
    lease = engine.reserve(engine.match(keys), blocks or len(keys.groups[0]))
    assert isinstance(lease, Lease), lease
    shown(engine, lease, keys)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.run()
    return lease


def empty_top(engine):
    """What lies in the top tier lies only below from now on."""
    free = engine.core.residency.takeable(0, drop_dirty=True)
    engine.release(engine.reserve(engine.match(prompt(90, free)), free))


def in_host(gpu=8, host=16, blocks=4, **options):
    """An engine with a prompt in host memory alone, and its keys."""
    engine, keys = make_engine(gpu=gpu, host=host, watermarks=(0.9, 0.95), in_place=True, **options), prompt(1, blocks)
    serve(engine, keys)
    empty_top(engine)
    assert engine.core.peek(keys).tiers["host"] == 4 * blocks
    return engine, keys


def on_disk(host=16, blocks=4, device=False):
    """An engine over a disk with a prompt, and its keys."""
    before, keys = make_engine(gpu=8, host=16, disk=DictTier()), prompt(1, blocks)
    serve(before, keys)
    before.core.submit_flush()
    before.run()
    return make_engine(gpu=8, host=host, disk=before.tiers[2], in_place=True, device=device), keys


def expect_idle(engine):
    engine.run()
    engine.check()
    stats = engine.core.stats()
    assert stats["leases"] == 0
    for tier in stats["tiers"].values():
        assert tier["blocks_idle"] == tier["blocks"]


def test_what_lies_in_host_memory_is_neither_copied_nor_waited_for():
    """A hit takes a slot of the device and a copy over the link."""
    engine, keys = in_host()
    ticket = engine.submit_reserve(engine.match(keys), 6)
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 16
    assert [entry < 0 for entry in lease.table()] == [True] * 4 + [False] * 2
    assert shown(engine, lease, keys) == 4
    assert lease.tiers == {"gpu": 0, "host": 16}
    assert engine.core.residency.levels[0].slots.slots_free == 6
    engine.release(lease)
    expect_idle(engine)
    assert engine.core.stats()["tiers"]["gpu"]["promoted_blocks"] == 0


def test_slots_are_refused_where_they_would_name_others():
    """A negative entry is taken for a slot: numpy counts it from the end."""
    engine, keys = in_host()
    lease = engine.answers[engine.submit_reserve(engine.match(keys), 6)]
    with pytest.raises(UsageError, match=r"use lease\.table"):
        lease.slots()
    engine.release(lease)
    with pytest.raises(UsageError, match="was released"):
        lease.table()
    plain = engine.answers[engine.submit_reserve(engine.match(prompt(2, 2)), 2)]
    assert plain.slots() == plain.table()
    with pytest.raises(UsageError, match="no group"):
        plain.table(1)
    engine.release(plain)


def test_what_lies_in_the_top_tier_is_read_there():
    """A block that was just computed is read over the link."""
    engine, _ = in_host()
    longer = prompt(1, 6)
    serve(engine, longer)
    lease = engine.reserve(engine.match(longer), 6)
    assert [entry < 0 for entry in lease.table()] == [True] * 4 + [False] * 2
    assert shown(engine, lease, longer) == 6
    engine.release(lease)
    expect_idle(engine)


def test_a_copy_that_is_read_is_not_given_away_until_the_release():
    """A host slot is overwritten by another block while a kernel reads it."""
    engine, keys = in_host(host=4)
    lease = engine.reserve(engine.match(keys), 4)
    for number in (5, 6, 7):
        serve(engine, prompt(number, 4))
    assert shown(engine, lease, keys) == 4
    engine.check()
    engine.release(lease)
    for number in (5, 6, 7):
        serve(engine, prompt(number, 4))
    assert engine.core.peek(keys).tiers["host"] < 16
    expect_idle(engine)


def test_what_was_read_in_place_leaves_after_what_was_not():
    """A prefix that is read all the time is the first to leave host memory: its policy hears of no read."""
    engine = make_engine(gpu=8, host=8, watermarks=(0.9, 0.95), in_place=True)
    read, other = prompt(1, 3), prompt(2, 3)
    serve(engine, read)
    serve(engine, other)
    empty_top(engine)
    engine.release(engine.reserve(engine.match(read), 3))
    serve(engine, prompt(3, 4))
    assert engine.core.peek(read).tiers["host"] == 12
    assert engine.core.peek(other).tokens < 12


def test_leases_share_the_copies_and_hold_them_each():
    """The first release takes the copies away from the others."""
    engine, keys = in_host(host=4)
    first, second = (engine.reserve(engine.match(keys), 4) for _ in range(2))
    assert first.table() == second.table()
    engine.release(first)
    engine.core.release_lease(first)
    for number in (5, 6, 7):
        serve(engine, prompt(number, 4))
    assert shown(engine, second, keys) == 4
    engine.core.release_owner("test")
    expect_idle(engine)


@pytest.mark.parametrize("device", [False, True])
def test_what_lies_on_disk_comes_into_host_memory_and_no_further(device):
    """A load goes over the link although nobody wants it there."""
    engine, keys = on_disk(device=device)
    tickets = [engine.submit_reserve(engine.match(keys), 5) for _ in range(2)]
    engine.run()
    leases = [engine.answers[ticket] for ticket in tickets]
    assert engine.tiers[2].reads == 4
    for lease in leases:
        assert lease.tokens_ready == 16
        assert shown(engine, lease, keys) == 4
        assert lease.table()[4] >= 0
        engine.release(lease)
    assert leases[0].tiers == {"gpu": 0, "host": 0, "lmdb": 16}
    expect_idle(engine)


def test_blocks_of_several_batches_are_held_from_when_they_come():
    """What came first is evicted before the last of it has come."""
    engine, keys = on_disk(host=6)
    engine.core.residency.levels[2].batch_bytes = BLOCK_BYTES
    ticket = engine.submit_reserve(engine.match(keys), 4, 50.0)
    engine.plan()
    engine.finish(engine.held[0])
    for number in (5, 6, 7):
        lease = engine.answers[engine.submit_reserve(engine.match(prompt(number, 2)), 2)]
        fill(engine, lease, prompt(number, 2))
        engine.release(lease)
        engine.plan()
        for batch in [batch for batch in engine.held if batch.target > batch.source]:
            engine.finish(batch)
    engine.run()
    assert engine.answers[ticket].tokens_ready == 16
    assert shown(engine, engine.answers[ticket], keys) == 4
    engine.release(engine.answers[ticket])
    expect_idle(engine)


def test_a_prefix_longer_than_host_memory_is_cut_at_the_deadline():
    """A lease waits for ever for slots that it holds itself, or reads what is not there."""
    engine, keys = on_disk(host=4, blocks=6)
    ticket = engine.submit_reserve(engine.match(keys), 6, 1.0)
    engine.run()
    assert ticket not in engine.answers
    engine.clock.advance(2.0)
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 16
    assert [entry < 0 for entry in lease.table()] == [True] * 4 + [False] * 2
    assert shown(engine, lease, keys) == 4
    fill(engine, lease, keys)
    engine.release(lease)
    expect_idle(engine)


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.FAILED])
def test_a_failed_load_cuts_the_prefix(status):
    """A block that did not come is read where it should have been."""
    engine, keys = on_disk()
    ticket = engine.submit_reserve(engine.match(keys), 4)
    (batch,) = engine.plan()
    engine.finish(batch, [*[Outcome(Status.DONE)] * 2, Outcome(status), Outcome(Status.DONE)])
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 8
    assert [entry < 0 for entry in lease.table()] == [True, True, False, False]
    engine.release(lease)
    expect_idle(engine)
    assert engine.core.stats()["failed_cuts"] == 1


def test_a_block_that_is_computed_elsewhere_while_its_load_fails_is_no_hit():
    """A lease counts a block of the top tier as there that it does not hold."""
    engine, keys = on_disk(blocks=1)
    ticket = engine.submit_reserve(engine.match(keys), 1)
    (batch,) = engine.plan()
    other = engine.answers[engine.submit_reserve(engine.core.blank_match(keys, "other", 0), 1)]
    fill(engine, other, keys)
    engine.finish(batch, [Outcome(Status.FAILED)])
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    engine.release(other)
    engine.release(lease)
    expect_idle(engine)


def test_a_late_load_goes_on_for_the_next():
    """A load that was given up leaves its slot held, or is thrown away."""
    engine, keys = on_disk()
    ticket = engine.submit_reserve(engine.match(keys), 4, 0.5)
    engine.plan()
    engine.clock.advance(1.0)
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    engine.release(lease)
    engine.run()
    assert engine.core.peek(keys).tiers["host"] == 16
    expect_idle(engine)


def test_no_room_leaves_the_match_as_it_was():
    """A refused reservation holds copies in host memory for ever."""
    engine, keys = in_host()
    match = engine.match(keys)
    refused = engine.answers[engine.submit_reserve(match, 13)]
    assert isinstance(refused, NoRoom)
    lease = engine.answers[engine.submit_reserve(match, 12)]
    assert lease.tokens_ready == 16
    engine.release(lease)
    expect_idle(engine)


def test_a_reset_leaves_what_is_read_alone_until_the_release():
    """A reset gives host slots away that a kernel reads."""
    engine, keys = in_host()
    lease = engine.reserve(engine.match(keys), 4)
    before = [bytes(engine.tiers[1].slot(~entry)) for entry in lease.table()]
    engine.core.submit_drop()
    engine.run()
    assert engine.core.residency.levels[1].slots.slots_quarantined == 4
    assert [bytes(engine.tiers[1].slot(~entry)) for entry in lease.table()] == before
    engine.release(lease)
    expect_idle(engine)
    assert engine.core.residency.levels[1].slots.slots_free == 16


def test_a_reset_while_the_rest_still_comes_leaves_nothing_to_be_read():
    """A lease that is answered after a reset is told to read blocks of before, for it had held them already."""
    engine, keys = on_disk()
    engine.core.residency.levels[2].batch_bytes = BLOCK_BYTES
    ticket = engine.submit_reserve(engine.match(keys), 4, 50.0)
    engine.plan()
    engine.finish(engine.held[0])
    engine.core.submit_drop()
    engine.run()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    assert min(lease.table()) > 0
    engine.release(lease)
    expect_idle(engine)


def test_groups_have_a_table_each():
    """Of a hybrid model one group's blocks are found in another's slots."""
    model = tiny_model(groups=2)
    engine = make_engine(gpu=12, host=32, watermarks=(0.9, 0.95), in_place=True, model=model)
    keys = prompt(1, 4, model)
    serve(engine, keys)
    free = engine.core.residency.takeable(0, drop_dirty=True)
    engine.release(engine.reserve(engine.match(prompt(90, free // 2, model)), free // 2))
    lease = engine.reserve(engine.match(keys), 4)
    assert len({*lease.table(0), *lease.table(1)}) == 8
    assert shown(engine, lease, keys) == 8
    engine.release(lease)
    expect_idle(engine)


def test_the_governor_counts_no_load_for_it():
    """What costs nothing to reserve is computed because the link is slow."""
    engine, keys = in_host()
    engine.core.prefilled(0, 1000, 1e-6)
    lease = engine.reserve(engine.match(keys), 4)
    assert (lease.tokens_ready, lease.decision.why, lease.decision.load_s) == (16, "resident", 0.0)
    engine.release(lease)


def test_the_governor_counts_what_comes_from_disk():
    """A load from a slow disk is taken for one that costs nothing."""
    engine, keys = on_disk()
    engine.core.planner.flight.rates.departed((2, 1), 1 << 20, 0.0)
    engine.clock.advance(10.0)
    engine.core.planner.flight.rates.arrived((2, 1), 1 << 20, 10.0, done=True)
    engine.core.prefilled(0, 1000, 1e-3)
    lease = engine.answers[engine.submit_reserve(engine.match(keys), 4)]
    assert (lease.tokens_ready, lease.decision.why) == (0, "slower")
    engine.release(lease)


def test_hints_and_a_lost_device_go_on_as_ever():
    """What a hint brought up is brought again, or leases in host memory survive their device."""
    engine, keys = on_disk()
    engine.core.prefetch(keys, engine.clock.now())
    engine.run()
    lease = engine.answers[engine.submit_reserve(engine.match(keys), 4)]
    assert lease.tokens_ready == 16
    assert engine.core.stats()["prefetch_useful"] == 4
    engine.core.lose_device()
    with pytest.raises(DeviceLost):
        engine.submit_reserve(engine.match(keys), 4)
    engine.release(lease)
    engine.clock.advance(60.0)  # the match that was refused
    expect_idle(engine)
    assert engine.core.peek(keys).tiers["host"] == 16


def test_after_a_sleep_nothing_comes_up_again():
    """Waking takes slots for blocks that nothing ever brings up."""
    engine, keys = make_engine(gpu=8, host=2, disk=DictTier(), in_place=True), prompt(1, 6)
    serve(engine, keys)
    engine.core.submit_sleep()
    engine.run()
    assert engine.core.peek(keys).tiers == (asleep := {"gpu": 0, "host": 8, "lmdb": 16})
    engine.core.submit_wake(restore=True)
    engine.run()
    assert engine.core.peek(keys).tiers == asleep
    assert engine.core.stats()["rewarmed_blocks"] == 0
    assert engine.core.residency.levels[0].slots.slots_free == 8
    expect_idle(engine)


def test_a_job_that_names_slots_is_refused():
    """A foreign engine copies from slots that are counted from the end."""
    engine, keys = in_host()
    with pytest.raises(UsageError, match="access: uva"):
        PolledSurface(engine.core).submit(Load(engine.match(keys)), 0.0)
