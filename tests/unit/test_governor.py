"""What the governor takes of a match: all that loads faster than it computes, in time, and no more."""

import pytest

from kvtier.engine.governor import MEMORY_S_PER_BYTE
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import (
    BLOCK_BYTES,
    check_prefix,
    fill,
    fill_and_push_down,
    make_engine,
    prompt,
    serve,
    tiers_of,
    tiny_model,
)

BLOCKS = 8
TOKENS = 4 * BLOCKS


def pushed_down(bytes_per_s, prefill=None):
    """A prompt of 8 blocks that lies on disk, read at a known speed until now; and the engine it does so in."""
    engine, keys = fill_and_push_down(blocks=BLOCKS)
    if prefill:
        engine.core.prefilled(0, prefill, 1.0)
    measure(engine, bytes_per_s)
    return engine, keys


def measure(engine, bytes_per_s):
    """Let the disk bring one block of something else at this speed."""
    rates, now_s = engine.core.planner.flight.rates, engine.clock.now()
    for lane in ((2, 1), (1, 0)):
        rates.departed(lane, BLOCK_BYTES, now_s)
    engine.clock.advance(BLOCK_BYTES / bytes_per_s)
    rates.arrived((2, 1), BLOCK_BYTES, engine.clock.now(), done=True)
    engine.core.planner.flight.rates._ways[1, 0].underway_bytes = 0


def reserve(engine, keys, deadline_s=1.0):
    ticket = engine.submit_reserve(engine.match(keys), BLOCKS, deadline_s)
    engine.run()
    return engine.answers.pop(ticket)


def test_without_the_speed_of_computing_everything_is_loaded():
    """A cache that was told nothing declines, and seems to be of no use."""
    engine, keys = pushed_down(1e9)
    lease = reserve(engine, keys)
    assert (lease.decision.why, lease.tokens_ready, lease.decision.tokens_found) == ("unmeasured", TOKENS, TOKENS)


def test_a_fast_disk_is_used():
    """A load that is worth it is declined."""
    engine, keys = pushed_down(1e9, prefill=1000)
    lease = reserve(engine, keys)
    assert (lease.decision.why, lease.tokens_ready) == ("faster", TOKENS)
    assert lease.decision.prefill_s == pytest.approx(TOKENS / 1000)
    assert lease.decision.load_s < lease.decision.prefill_s
    assert engine.core.stats()["prefill_saved_ms"] == TOKENS
    assert engine.core.stats()["tiers"]["lmdb"]["prefill_saved_ms"] == TOKENS
    check_prefix(engine, lease, keys)


def test_a_disk_slower_than_computing_is_not_waited_for():
    """A hit costs more than a miss (sglang#26305, #12809, LMCache#1109, #2205, #1938)."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    ticket = engine.submit_reserve(engine.match(keys), BLOCKS, 1.0)
    lease = engine.answers.pop(ticket)  # at once
    assert (lease.decision.why, lease.decision.tokens_chosen, lease.tokens_ready) == ("slower", 0, 0)
    stats = engine.core.stats()
    assert (stats["declined_loads"], stats["declined_tokens"], stats["cut_loads"]) == (1, TOKENS, 0)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.run()
    assert tiers_of(engine, keys)["gpu"] == TOKENS
    engine.check()


@pytest.mark.parametrize(("reads", "writes", "why"), [(64 << 10, 1e9, "slower"), (1e9, 64 << 10, "faster")])
def test_writing_says_nothing_of_reading(reads, writes, why):
    """A drive that writes faster than it reads is waited for, or one that reads faster is not made use of."""
    engine, keys = fill_and_push_down(blocks=BLOCKS)
    engine.core.prefilled(0, 1000, 1.0)
    rates = engine.core.planner.flight.rates
    rates.departed((1, 2), BLOCK_BYTES, engine.clock.now())
    engine.clock.advance(BLOCK_BYTES / writes)
    rates.arrived((1, 2), BLOCK_BYTES, engine.clock.now(), done=True)
    measure(engine, reads)
    assert reserve(engine, keys).decision.why == why


def test_in_between_it_takes_what_arrives_before_the_deadline():
    """A part that would have come in time is computed, or more is waited for than can come."""
    engine, keys = pushed_down(4 * BLOCK_BYTES, prefill=1)
    lease = reserve(engine, keys, deadline_s=1.0)
    assert (lease.decision.why, lease.decision.tokens_chosen, lease.tokens_ready) == ("deadline", 12, 12)
    assert lease.decision.load_s <= 1.0
    assert engine.core.stats()["cut_loads"] == 1
    check_prefix(engine, lease, keys)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.run()
    engine.check()


def test_what_lies_in_memory_is_taken_though_the_disk_is_slow():
    """The slow part of a prefix spoils the fast one."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    engine.core.prefetch(keys.prefix(16), engine.clock.now())
    engine.run()
    assert tiers_of(engine, keys) == {"gpu": 0, "host": 16, "lmdb": 16}
    measure(engine, 64 << 10)
    measure(engine, 64 << 10)
    lease = reserve(engine, keys)
    assert (lease.decision.why, lease.tokens_ready) == ("slower", 16)
    check_prefix(engine, lease, keys)


def test_others_who_wait_for_the_same_blocks_do_not_make_them_slower():
    """The second of many readers of one prefix declines it, for it counts its bytes twice (vllm#44294)."""
    engine, keys = pushed_down(BLOCKS * BLOCK_BYTES / 0.6, prefill=TOKENS)
    tickets = [engine.submit_reserve(engine.match(keys), BLOCKS, 1.0) for _ in range(3)]
    engine.run()
    assert [engine.answers[ticket].decision.why for ticket in tickets] == ["faster"] * 3
    assert engine.tiers[2].reads == BLOCKS


def test_what_queues_on_the_disk_counts():
    """The hundredth request in a burst waits as long as if it were alone (LMCache#1938)."""
    engine = make_engine(gpu=24, host=64, disk=DictTier())
    for number in range(3):
        serve(engine, prompt(number, BLOCKS))
        engine.core.submit_flush()
        engine.run()
    fresh = make_engine(gpu=24, host=64, disk=engine.tiers[2])
    fresh.core.prefilled(0, TOKENS, 1.0)
    measure(fresh, BLOCKS * BLOCK_BYTES / 0.4)
    tickets = [fresh.submit_reserve(fresh.match(prompt(number, BLOCKS)), BLOCKS, 9.0) for number in range(3)]
    fresh.run()
    chosen = [fresh.answers[ticket].decision.tokens_chosen for ticket in tickets]
    assert chosen == [TOKENS, TOKENS, 0]


def test_waiting_ends_when_it_cannot_be_worth_it_any_more():
    """A disk that stops answering costs the whole deadline, many times what computing costs."""
    engine, keys = pushed_down(1e9, prefill=1000)
    ticket = engine.submit_reserve(engine.match(keys), BLOCKS, 100.0)
    engine.plan()
    wake_s = engine.core.wake_at_s(engine.clock.now())
    assert wake_s == pytest.approx(engine.clock.now() + TOKENS / 1000)
    engine.clock.advance(TOKENS / 1000)
    engine.plan()
    assert engine.answers[ticket].tokens_ready == 0
    engine.run()
    engine.check()


def test_a_declined_disk_is_measured_again():
    """A disk that was slow once is never used again."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    engine.clock.advance(60.0)
    lease = reserve(engine, keys)  # the batch that measures takes no time here
    assert lease.decision.tokens_chosen == 0
    assert engine.tiers[2].reads == 1
    engine.release(lease)
    lease = reserve(engine, keys)
    assert (lease.decision.why, lease.tokens_ready) == ("faster", TOKENS)
    check_prefix(engine, lease, keys)
    engine.check()


def test_a_disk_that_was_never_read_is_as_fast_as_it_was_written():
    """The first load of a process hangs on a disk whose slowness was seen all the time."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk)
    engine.core.prefilled(0, 1000, 1.0)
    serve(engine, prompt(1, BLOCKS))
    flushed = engine.core.submit_flush()
    while flushed not in engine.answers:
        engine.plan()
        engine.clock.advance(1.0)
        engine.finish(engine.held[0])
    serve(engine, prompt(2, BLOCKS))
    lease = reserve(engine, prompt(1, BLOCKS))
    assert (lease.decision.why, lease.tokens_ready) == ("slower", 0)


def test_a_first_read_that_does_not_come_back_is_a_measurement():
    """Until the first read of a very slow disk has ended, each request waits for that disk until its deadline."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=None, disk=disk)
    for number in (1, 2):
        serve(engine, prompt(number, BLOCKS))
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=16, host=None, disk=disk)
    fresh.core.prefilled(0, TOKENS, 1.0)
    fresh.submit_reserve(fresh.match(prompt(1, BLOCKS)), BLOCKS, 0.5)
    fresh.plan()  # its read is under way, and stays so
    assert fresh.held
    fresh.clock.advance(3.0)
    later = fresh.submit_reserve(fresh.match(prompt(2, BLOCKS)), BLOCKS, 0.5)
    lease = fresh.answers.pop(later)
    assert (lease.decision.why, lease.tokens_ready) in (("deadline", 0), ("slower", 0))
    assert lease.decision.load_s is not None


def test_groups_are_decided_together():
    """A hybrid model's groups are cut at different lengths (sglang PR#31108)."""
    model = tiny_model(groups=2)
    disk = DictTier()
    first = make_engine(gpu=16, host=32, disk=disk, model=model)
    keys = prompt(1, BLOCKS, model)
    serve(first, keys)
    first.core.submit_flush()
    first.run()
    engine = make_engine(gpu=16, host=32, disk=disk, model=model)
    engine.core.prefilled(0, 1, 1.0)
    measure(engine, 8 * BLOCK_BYTES)  # two blocks a step: about four steps in a second
    lease = reserve(engine, keys, deadline_s=1.0)
    assert lease.decision.why == "deadline"
    assert lease.tokens_ready == 12
    check_prefix(engine, lease, keys)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.run()
    engine.check()


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, 60.0], ids=["no time", "little time", "enough time"])
def test_what_was_declined_is_told_with_what_it_would_have_taken(deadline_s):
    """`decision` says that loading takes no time, and that computing is faster than that."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    decision = engine.answers.pop(engine.submit_reserve(engine.match(keys), BLOCKS, deadline_s)).decision
    assert decision.tokens_chosen == 0
    up_s = BLOCKS * BLOCK_BYTES * MEMORY_S_PER_BYTE  # the second hop
    assert decision.load_s == pytest.approx(BLOCKS * BLOCK_BYTES / (64 << 10) + up_s)
    assert decision.load_s > decision.prefill_s


def test_what_lies_in_the_top_tier_does_not_hide_what_the_rest_would_have_taken():
    """A prefix that is resident in part seems to load in no time, and is not loaded."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    engine.core.prefilled(0, 1000, 1000.0)
    engine.core.prefilled(0, 1000, 1000.0)
    first = keys.prefix(16)
    ticket = engine.submit_reserve(engine.match(first), 4, 600.0)
    engine.run()
    engine.release(engine.answers.pop(ticket))
    assert tiers_of(engine, keys)["gpu"] == 16
    for _ in range(60):
        engine.core.prefilled(0, 1000, 1.0)
    measure(engine, 64 << 10)
    measure(engine, 64 << 10)
    decision = engine.answers.pop(engine.submit_reserve(engine.match(keys), BLOCKS, 60.0)).decision
    assert (decision.why, decision.tokens_chosen, decision.tokens_found) == ("slower", 16, TOKENS)
    assert decision.load_s > decision.prefill_s > 0


def test_a_decline_before_a_way_that_nobody_has_measured_says_so():
    """A time is made up for a disk that was never read."""
    engine, keys = pushed_down(64 << 10, prefill=1000)
    engine.core.prefetch(keys.prefix(16), engine.clock.now())
    engine.run()
    assert tiers_of(engine, keys) == {"gpu": 0, "host": 16, "lmdb": 16}
    engine.core.planner.flight.rates._ways.clear()
    decision = engine.answers.pop(engine.submit_reserve(engine.match(keys), BLOCKS, 0.0)).decision
    assert (decision.tokens_chosen, decision.load_s) == (0, None)
    assert decision.prefill_s > 0
