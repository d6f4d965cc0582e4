"""The top tier's memory away and back: what is saved, what is refused, and what comes back first."""

import os

import pytest

from kvtier.allocator import host_memory
from kvtier.engine.answers import Resized, Slept, Woken
from kvtier.errors import Asleep, DeviceLost, DriverError, UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Status
from tests.engine_bench import check_prefix, make_engine, prompt, serve, tiers_of


def sleep(engine):
    ticket = engine.core.submit_sleep()
    engine.run()
    return answer(engine, ticket)


def wake(engine, restore=True):
    ticket = engine.core.submit_wake(restore=restore)
    engine.run()
    return answer(engine, ticket)


def answer(engine, ticket):
    engine.check()
    tier = engine.tiers[0]
    assert tier.check() == []
    level = engine.core.residency.levels[0]
    assert memory_bytes(engine) == len(level.granules) * PAGE_BYTES == tier._arena.held_bytes
    if not level.granules:
        assert level.slots.slots_withdrawn == level.slots.slots_total - 1, "somebody has a slot without memory"
    stats = engine.core.stats()["tiers"]["gpu"]
    assert stats["slots"] == len(level.granules)
    assert stats["capacity_bytes"] == tier.traits.capacity_bytes == max(0, len(level.granules) - 1) * PAGE_BYTES
    return engine.answers.pop(ticket)


def memory_bytes(engine):
    return os.fstat(engine.tiers[0]._driver.fd).st_blocks * 512


def counted(engine, name):
    return engine.core.counters.engine()[name]


def test_all_memory_goes_and_comes_back_at_the_same_place():
    """A sleeping cache keeps memory, loses blocks that had room below, or wakes elsewhere."""
    engine = make_engine(gpu=8, host=16)
    array = engine.tiers[0].array()
    first = [prompt(number, 4) for number in (1, 2)]
    for keys in first:
        serve(engine, keys)
    assert sleep(engine) == Slept(9 * PAGE_BYTES, 0)
    assert [tiers_of(engine, keys) for keys in first] == [{"gpu": 0, "host": 16}] * 2
    assert wake(engine, restore=False) == Woken(9 * PAGE_BYTES, 0)
    assert engine.tiers[0].array().ctypes.data == array.ctypes.data
    assert not array[:9].any(), "old content is shown"
    for keys in first:
        assert serve(engine, keys).tokens_ready == 16
    assert counted(engine, "sleeps") == 1
    assert counted(engine, "slept_dropped") == 0


def test_what_lay_there_comes_back_used_last_first(monkeypatch):
    """Who wakes on less memory gets the cold blocks back, or the hot ones push others out."""
    engine = make_engine(gpu=8, host=16)
    for number in (1, 2):
        serve(engine, prompt(number, 4))
    sleep(engine)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: 5 * PAGE_BYTES)
        assert wake(engine) == Woken(5 * PAGE_BYTES, 4 * PAGE_BYTES)
    engine.run()
    assert [tiers_of(engine, prompt(number, 4))["gpu"] for number in (1, 2)] == [0, 16]
    assert counted(engine, "rewarmed_blocks") == counted(engine, "rewarm_skipped") == 4
    assert engine.core.stats()["tiers"]["gpu"]["no_memory"] == 1
    check_prefix(engine, serve(engine, prompt(2, 4), keep=True), prompt(2, 4))


def test_what_comes_back_evicts_nothing_and_rests_while_a_request_loads():
    """Rewarming costs somebody a block or a wait."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=4, disk=disk)
    for number in (1, 2):
        serve(engine, prompt(number, 4))
        engine.core.submit_flush()
        engine.run()
    sleep(engine)
    in_host = engine.core.residency.directory.ready_in(1)
    engine.core.submit_wake()
    until_awake(engine)
    ticket = engine.submit_reserve(engine.match(prompt(3, 6)), 6)
    assert ticket in engine.answers
    engine.run()
    assert {*in_host} <= {*engine.core.residency.directory.ready_in(1)}
    assert engine.core.residency.directory.ready[0] == 2
    assert counted(engine, "rewarmed_blocks") == 2
    assert engine.core.stats()["tiers"]["gpu"]["reclaimed"] == 8


def on_disk(*numbers, gpu=8):
    """An engine without host memory, and these prompts of 4 blocks on its disk."""
    disk = DictTier()
    before = make_engine(gpu=16, host=None, disk=disk)
    for number in numbers:
        serve(before, prompt(number, 4))
    before.core.submit_flush()
    before.run()
    return make_engine(gpu=gpu, host=None, disk=disk)


def until_awake(engine):
    while engine.core.residency.levels[0].asleep:
        engine.plan()
        engine.finish(engine.held[0])


def test_it_rests_while_a_request_loads():
    """What comes back for nobody is read before what somebody waits for."""
    engine = on_disk(1, 2)
    serve(engine, prompt(1, 4))
    sleep(engine)
    engine.core.submit_wake()
    until_awake(engine)
    ticket = engine.submit_reserve(engine.match(prompt(2, 4)), 4)
    engine.plan()
    assert len(engine.held) == 1
    assert counted(engine, "rewarmed_blocks") == 0
    engine.run()
    assert engine.answers.pop(ticket).tokens_ready == 16
    assert counted(engine, "rewarmed_blocks") == 4


def test_it_comes_back_past_memory_that_is_full():
    """What was to come back for nobody pushes others out of host memory."""
    engine = make_engine(gpu=8, host=4, disk=DictTier())
    for number in (1, 2):
        serve(engine, prompt(number, 4))
    sleep(engine)
    engine.core.submit_flush()
    engine.run()
    in_host = engine.core.residency.directory.ready_in(1)
    wake(engine)
    assert counted(engine, "rewarmed_blocks") == 8
    assert engine.core.residency.directory.ready_in(1) == in_host


def test_it_comes_back_while_memory_still_comes(monkeypatch):
    """Of a large tier only what fits into the first piece of memory comes back."""
    monkeypatch.setattr("kvtier.engine.resizing.GROW_BYTES", 2 * PAGE_BYTES)
    engine = make_engine(gpu=8, host=16)
    serve(engine, prompt(1, 8))
    sleep(engine)
    engine.core.submit_wake()
    while engine.plan() or engine.held:
        engine.finish(min(engine.held, key=lambda batch: batch.remap is not None))  # blocks before memory
    assert counted(engine, "rewarmed_blocks") == 8


def test_what_is_queued_for_nobody_does_not_start():
    """A cache that is to sleep reads a slow disk first."""
    engine = on_disk(1)
    engine.core.prefetch(prompt(1, 4), 0.0)
    engine.core.submit_sleep()
    engine.plan()
    assert [bool(batch.remap) for batch in engine.held] == [True]


def test_nothing_comes_up_while_the_rest_is_saved():
    """A tier that is being emptied is filled at the other end."""
    engine = on_disk(1)
    serve(engine, prompt(2, 4))
    engine.core.submit_sleep()
    engine.plan()
    engine.core.prefetch(prompt(1, 4), 0.0)
    engine.plan()
    assert {(batch.source, batch.target) for batch in engine.held} == {(0, 1)}


def test_what_has_no_room_below_is_dropped_and_said():
    """Sleep never ends over full tiers, or keeps the cold blocks and not the hot ones."""
    engine = make_engine(gpu=8, host=3, watermarks=(0.01, 0.02))
    for number in (1, 2):
        serve(engine, prompt(number, 4))
    assert sleep(engine) == Slept(9 * PAGE_BYTES, 5)
    assert counted(engine, "slept_dropped") == 5
    assert engine.core.peek(prompt(2, 4)).tokens == 12
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)


def test_without_a_tier_below_all_is_dropped():
    """A single tier cannot sleep."""
    engine = make_engine(gpu=8, host=None)
    serve(engine, prompt(1, 8))
    assert sleep(engine) == Slept(9 * PAGE_BYTES, 8)
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)
    serve(engine, prompt(1, 8))


def test_what_was_used_last_stays_in_the_faster_of_the_tiers_below():
    """The hot blocks come back from disk after a sleep, and the cold ones from memory."""
    engine = make_engine(gpu=8, host=4, disk=DictTier(), watermarks=(0.01, 0.02))
    for number in (1, 2):
        serve(engine, prompt(number, 4))
    sleep(engine)
    assert tiers_of(engine, prompt(1, 4))["lmdb"] == 16
    assert tiers_of(engine, prompt(2, 4))["host"] == 16


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_blocks_go_as_far_down_as_there_is_room(one_at_a_time):
    """A small host tier loses what a disk below it had room for."""
    engine = make_engine(gpu=24, host=4, disk=DictTier(), watermarks=(0.01, 0.02))
    prompts = [prompt(number, 4) for number in range(6)]
    for keys in prompts:
        serve(engine, keys)
    ticket = engine.core.submit_sleep()
    while ticket not in engine.answers:
        batches = engine.plan()
        assert engine.held, "it waits for nothing"
        for batch in list(engine.held[:1] if one_at_a_time else batches):
            engine.finish(batch)
    assert answer(engine, ticket) == Slept(25 * PAGE_BYTES, 0)
    assert all(engine.core.peek(keys).tokens == 16 for keys in prompts)


@pytest.mark.parametrize(("status", "host"), [(Status.FAILED, None), (Status.NO_ROOM, None), (Status.FAILED, 2)])
def test_a_disk_that_fails_is_tried_and_not_waited_for(status, host):
    """One failed write costs all blocks, or a broken disk keeps a cache awake."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=host, disk=disk, watermarks=(0.01, 0.02))
    serve(engine, prompt(1, 8))
    disk.fail_write = status
    ticket = engine.core.submit_sleep()
    engine.run()
    assert ticket not in engine.answers, "it was tried once"
    for _ in range(20):
        engine.clock.advance(1.0)
        engine.run()
    assert answer(engine, ticket) == Slept(9 * PAGE_BYTES, 8 - (host or 0))


def test_a_disk_that_fails_once_costs_nothing():
    """What a second try would have saved is dropped."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, watermarks=(0.01, 0.02))
    serve(engine, prompt(1, 8))
    disk.fail_write = Status.FAILED
    ticket = engine.core.submit_sleep()
    engine.run()
    disk.fail_write = None
    engine.clock.advance(1.0)
    engine.run()
    assert answer(engine, ticket) == Slept(9 * PAGE_BYTES, 0)
    assert engine.core.peek(prompt(1, 8)).tokens == 32


def test_who_holds_slots_keeps_it_awake_and_is_named():
    """Memory goes under a running request, or nobody can tell whose."""
    engine = make_engine(gpu=8, host=8)
    lease = serve(engine, prompt(1, 4), keep=True)
    with pytest.raises(UsageError, match=r"1 leases .* 'test': release"):
        engine.core.submit_sleep()
    check_prefix(engine, lease, prompt(1, 4))
    engine.release(lease)
    assert sleep(engine).bytes_freed == 9 * PAGE_BYTES


def test_a_reservation_that_loads_keeps_it_awake():
    """Memory goes under a load."""
    engine = on_disk(1)
    ticket = engine.submit_reserve(engine.match(prompt(1, 4)), 4)
    engine.plan()
    with pytest.raises(UsageError, match="wait for some"):
        engine.core.submit_sleep()
    engine.core.give_up(ticket)  # its load goes on, for nobody
    asked = engine.core.submit_sleep()
    engine.plan()
    assert memory_bytes(engine) == 9 * PAGE_BYTES
    assert len(engine.held) == 1
    engine.run()
    assert answer(engine, asked) == Slept(9 * PAGE_BYTES, 0)


def test_what_is_brought_up_for_a_hint_does_not_keep_it_awake():
    """A prefetch into the top tier holds its slots against sleep, or starts in it."""
    engine = on_disk(1)
    engine.core.prefetch(prompt(1, 4), 0.0)
    engine.plan()
    asked = engine.core.submit_sleep()
    engine.core.prefetch(prompt(1, 2), 0.0)
    engine.run()
    assert answer(engine, asked) == Slept(9 * PAGE_BYTES, 0)
    engine.core.prefetch(prompt(1, 4), 0.0)
    assert engine.plan() == []


def test_asleep_it_says_so_and_answers_what_needs_no_slot():
    """A sleeping cache hands out slots without memory, or is good for nothing."""
    engine = make_engine(gpu=8, host=8, disk=DictTier())
    lease = serve(engine, prompt(1, 4))
    sleep(engine)
    match = engine.match(prompt(1, 4))
    for verb in (
        lambda: engine.submit_reserve(match, 4),
        lambda: engine.core.commit(lease, []),
        lambda: engine.core.submit_resize("gpu", 4 * PAGE_BYTES),
    ):
        with pytest.raises(Asleep, match="wake"):
            verb()
    assert match.tokens == engine.core.peek(prompt(1, 4)).tokens == 16
    engine.core.prefetch(prompt(1, 4), 0.0)
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers.pop(ticket).failed == 0
    engine.core.submit_drop()
    engine.run()
    assert engine.core.peek(prompt(1, 4)).tokens == 0
    assert engine.core.unsaved() == 0
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)
    assert counted(engine, "rewarm_skipped") == 4
    serve(engine, prompt(1, 4))


def test_a_match_outlives_the_memory_that_it_pinned():
    """A pinned match keeps the cache awake, or points into memory that is gone."""
    engine = make_engine(gpu=8, host=8)
    serve(engine, prompt(1, 4))
    match = engine.match(prompt(1, 4))
    assert match.tiers == {"gpu": 16, "host": 0}
    assert sleep(engine) == Slept(9 * PAGE_BYTES, 0)
    assert match.tiers == {"gpu": 0, "host": 16}
    assert match.pins
    wake(engine, restore=False)
    assert engine.reserve(match, 4).tokens_ready == 16


def test_as_much_memory_as_there_is_wakes_it_and_more_comes_later(monkeypatch):
    """A wake without memory crashes, pretends, or can't be repeated."""
    engine = make_engine(gpu=8, host=8)
    serve(engine, prompt(1, 4))
    sleep(engine)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: PAGE_BYTES)
        assert wake(engine) == Woken(0, 9 * PAGE_BYTES)  # the null block alone is of no use
        with pytest.raises(Asleep):
            engine.core.submit_resize("gpu", 4 * PAGE_BYTES)
        patch.setattr(host_memory, "available_bytes", lambda: 3 * PAGE_BYTES)
        assert wake(engine) == Woken(3 * PAGE_BYTES, 6 * PAGE_BYTES)
        serve(engine, prompt(2, 2))
        assert sleep(engine) == Slept(3 * PAGE_BYTES, 0)
        assert wake(engine) == Woken(3 * PAGE_BYTES, 6 * PAGE_BYTES)
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)
    assert engine.core.stats()["tiers"]["gpu"]["no_memory"] == 3


def test_a_size_that_was_chosen_since_is_not_undone():
    """A wake grows a tier that was shrunk on purpose."""
    engine = make_engine(gpu=8, host=8)
    sleep(engine)
    wake(engine)
    engine.core.submit_resize("gpu", 4 * PAGE_BYTES)
    engine.run()
    assert wake(engine) == Woken(4 * PAGE_BYTES, 0)
    assert sleep(engine) == Slept(4 * PAGE_BYTES, 0)
    assert wake(engine) == Woken(4 * PAGE_BYTES, 0)


def test_a_driver_that_refuses_leaves_it_awake(monkeypatch):
    """Slots are lost for memory that stays."""
    engine = make_engine(gpu=8, host=8)
    serve(engine, prompt(1, 4))

    def refuse(*_):
        raise DriverError("unmap", 5, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(engine.tiers[0]._driver, "unmap", refuse)
        assert sleep(engine) == Slept(0, 0)
    assert serve(engine, prompt(1, 4)).tokens_ready == 16
    assert sleep(engine) == Slept(9 * PAGE_BYTES, 0)


def test_asked_again_meanwhile_everybody_is_answered():
    """Who asks twice, or for the contrary, waits for ever or finds the cache in between."""
    engine = make_engine(gpu=8, host=8)
    serve(engine, prompt(1, 4))
    asleep = [engine.core.submit_sleep(), engine.core.submit_sleep()]
    engine.run()
    assert [answer(engine, ticket) for ticket in asleep] == [Slept(9 * PAGE_BYTES, 0)] * 2
    assert sleep(engine) == Slept(0, 0)
    wake(engine)

    serve(engine, prompt(2, 4))
    ticket, waking = engine.core.submit_sleep(), engine.core.submit_wake()  # nothing has gone yet
    engine.run()
    assert (answer(engine, ticket), answer(engine, waking)) == (Slept(0, 0), Woken(9 * PAGE_BYTES, 0))

    ticket = engine.core.submit_sleep()
    while not (engine.held and engine.held[0].remap):
        engine.plan()
        for batch in [b for b in engine.held if not b.remap]:
            engine.finish(batch)
    waking = engine.core.submit_wake()  # the memory is just going
    engine.run()
    assert answer(engine, ticket) == Slept(9 * PAGE_BYTES, 0)
    assert answer(engine, waking) == Woken(9 * PAGE_BYTES, 0)

    ticket = engine.core.submit_sleep()
    engine.run()
    engine.answers.pop(ticket)
    waking = engine.core.submit_wake()
    engine.plan()
    ticket = engine.core.submit_sleep()  # before any memory has come
    engine.run()
    assert engine.answers.pop(waking).bytes_missing == 9 * PAGE_BYTES
    assert answer(engine, ticket) == Slept(0, 0)
    assert wake(engine) == Woken(9 * PAGE_BYTES, 0)


@pytest.mark.parametrize("slots", [2, 12])
def test_a_resize_under_way_ends_where_it_stands(slots):
    """A resize and a sleep pull at the same memory, or the resize is never answered."""
    engine = make_engine(gpu=8, host=16, gpu_max=12)
    serve(engine, prompt(1, 8))
    resizing = engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)
    engine.plan()
    asked = engine.core.submit_sleep()
    engine.run()
    assert isinstance(engine.answers.pop(resizing), Resized)
    assert answer(engine, asked).blocks_dropped == 0
    assert engine.core.peek(prompt(1, 8)).tokens == 32
    assert wake(engine).bytes_missing == 0


def test_who_waits_hears_of_a_lost_device():
    """A device dies in its sleep, and nobody is told."""
    engine = make_engine(gpu=8, host=8)
    serve(engine, prompt(1, 4))
    ticket = engine.core.submit_sleep()
    engine.core.lose_device()
    engine.run()
    assert isinstance(engine.answers.pop(ticket), DeviceLost)
    for verb in (engine.core.submit_sleep, engine.core.submit_wake):
        with pytest.raises(DeviceLost):
            verb()


def test_it_is_emptied_in_portions(monkeypatch):
    """Nobody is answered while a large tier goes to sleep, or its thread sleeps in the middle of it."""
    monkeypatch.setattr("kvtier.engine.sleeping.SLOTS_AT_ONCE", 3)
    engine = make_engine(gpu=8, host=16)
    serve(engine, prompt(1, 8))
    engine.core.submit_sleep()
    engine.run()
    left = [engine.core.residency.directory.ready[0]]
    while left[-1]:
        assert engine.core.wake_at_s(engine.clock.now()) == engine.clock.now()
        engine.plan()
        left.append(engine.core.residency.directory.ready[0])
    assert left == [5, 2, 0]
    assert engine.core.peek(prompt(1, 8)).tokens == 32


def test_what_a_policy_has_learnt_outlives_the_sleep():
    """An ARC starts anew after each sleep, or takes what comes back for blocks that it was wrong to evict."""
    engine = make_engine(gpu=8, host=16, policies=("arc", "arc", "arc"))
    for number in range(4):
        serve(engine, prompt(number, 4))
        serve(engine, prompt(number, 2))
        engine.run()
    policy = engine.core.residency.levels[0].policy
    ghosts, learnt = policy.ghosts(), policy.p
    sleep(engine)
    wake(engine)
    assert counted(engine, "rewarmed_blocks") == 8
    assert ({*policy.ghosts()}, policy.p) == ({*ghosts}, learnt)
    assert ghosts, "there was nothing to keep"


def test_a_tier_whose_memory_stays_says_so():
    """An engine that keeps its own memory believes that this cache has given it back."""
    engine = make_engine(gpu=8, host=8)
    engine.core.residency.levels[0].geometry = None
    for verb in (engine.core.submit_sleep, engine.core.submit_wake):
        with pytest.raises(UsageError, match="only a gpu tier sleeps"):
            verb()
