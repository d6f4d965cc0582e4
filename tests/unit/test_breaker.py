"""A disk that fails or hangs is left alone, tried again, and used again; the rest of the cache serves meanwhile."""

import pytest

from kvtier.cache.leases import Lease
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Status
from tests.engine_bench import check_prefix, fill, make_engine, prompt, serve, tiers_of

PROMPTS = 12


def stored(host=16, gpu=8):
    """Twelve prompts of two blocks on a disk, and an engine that has none of them in memory."""
    disk = DictTier()
    first = make_engine(gpu=gpu, host=host, disk=disk)
    for number in range(PROMPTS):
        serve(first, prompt(number, 2))
        first.core.submit_flush()
        first.run()
    return make_engine(gpu=gpu, host=host, disk=disk)


def circuit(engine):
    return engine.core.stats()["tiers"]["lmdb"]["circuit"]


def fail(engine, number):
    """A request whose loads fail; it recomputes nothing."""
    lease = engine.reserve(engine.match(prompt(number, 2)), 2)
    assert lease.tokens_ready == 0
    engine.release(lease)


@pytest.mark.parametrize("host", [None, 16])
def test_a_failing_disk_is_bypassed_probed_and_used_again(host):
    """Every request waits for a disk that is known to be broken, or nobody ever asks it again."""
    engine = stored(host)
    disk = engine.tiers[-1]
    disk.fail_read = Status.FAILED
    for number in range(3):
        assert circuit(engine) == "closed"
        fail(engine, number)
    assert circuit(engine) == "open"
    reads = disk.reads
    lease = engine.reserve_now(engine.match(prompt(5, 2)), 2)  # at once: nobody asks the disk
    assert lease.tokens_ready == 0
    assert engine.core.peek(prompt(6, 2)).tokens == 0
    fill(engine, lease, prompt(5, 2))
    engine.release(lease)
    assert tiers_of(engine, prompt(5, 2))["gpu"] == 8
    engine.run()
    assert disk.reads == reads
    engine.clock.advance(1.0)  # the pause is over: one block is tried, and fails
    engine.run()
    assert disk.reads == reads + 1
    assert circuit(engine) == "open"
    disk.fail_read = None
    assert engine.core.wake_at_s(engine.clock.now()) is not None
    engine.clock.advance(1.5)
    engine.run()
    assert circuit(engine) == "open", "the second pause is twice as long"
    engine.clock.advance(0.5)
    engine.run()
    assert circuit(engine) == "closed"
    lease = serve(engine, prompt(8, 2))
    assert lease.tokens_ready == 8
    assert engine.core.stats()["tiers"]["lmdb"]["breaker_opened"] == 2
    engine.check()


def test_failures_between_successes_are_not_the_tiers():
    """A few bad sectors take a whole disk away."""
    engine = stored()
    disk = engine.tiers[-1]
    for number in range(8):
        disk.fail_read = Status.FAILED if number % 3 else None
        serve(engine, prompt(number, 2))
    assert circuit(engine) == "closed"


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISSING])
def test_a_lost_or_damaged_block_is_no_fault_of_the_device(status):
    """A disk that answers well, and says that a block is bad, is left alone."""
    engine = stored()
    engine.tiers[-1].fail_read = status
    for number in range(8):
        fail(engine, number)
    assert circuit(engine) == "closed"


def test_a_hung_disk_keeps_nobody_waiting():
    """Each request waits for its whole deadline on a disk that has stopped answering (vllm#54363)."""
    engine = stored()
    first = engine.submit_reserve(engine.match(prompt(0, 2)), 2, deadline_s=60.0)
    engine.plan()
    second = engine.submit_reserve(engine.match(prompt(1, 2)), 2, deadline_s=60.0)
    engine.clock.advance(4.0)
    engine.plan()
    assert first not in engine.answers
    assert engine.core.wake_at_s(engine.clock.now()) <= 5.0
    engine.clock.advance(1.0)
    engine.plan()
    for ticket, number in ((first, 0), (second, 1)):
        lease = engine.answers.pop(ticket)
        assert lease.tokens_ready == 0
        fill(engine, lease, prompt(number, 2))
        engine.release(lease)
    assert circuit(engine) == "open"
    assert engine.core.stats()["breaker_cuts"] == 2
    assert engine.reserve_now(engine.match(prompt(2, 2)), 2).tokens_ready == 0
    engine.clock.advance(600.0)
    hung = [batch for batch in engine.held if batch.source == 2 and batch.target == 1]
    engine.plan()
    assert [b for b in engine.held if b.source == 2 and b.target == 1] == hung, "nothing new is sent to a hung disk"
    for batch in hung:  # it wakes up: what comes now is late, and no proof that it is well
        engine.finish(batch)
    assert circuit(engine) == "open"
    engine.run()
    assert circuit(engine) == "closed", "the probe that followed was"
    for number in range(3):
        lease = serve(engine, prompt(number, 2), keep=True)
        check_prefix(engine, lease, prompt(number, 2))
        engine.release(lease)
    engine.check()


def test_a_probe_that_hangs_opens_it_again():
    """A disk that hangs again during the probe is taken for a good one."""
    engine = stored()
    engine.tiers[-1].fail_read = Status.FAILED
    for number in range(3):
        fail(engine, number)
    engine.run()
    engine.clock.advance(1.0)
    [probe] = [batch for batch in engine.plan() if batch.source == 2 and batch.target != 2]
    assert circuit(engine) == "half_open"
    assert engine.core.peek(prompt(5, 2)).tokens == 0
    engine.clock.advance(5.0)
    engine.plan()
    assert circuit(engine) == "open"
    engine.tiers[-1].fail_read = None
    engine.finish(probe)
    assert circuit(engine) == "open"
    engine.clock.advance(4.0)
    engine.run()
    assert circuit(engine) == "closed"
    engine.check()


def test_without_a_slot_for_the_probe_the_next_request_is_it():
    """A full host tier keeps a healthy disk closed for ever."""
    engine = stored(host=4, gpu=8)
    engine.tiers[-1].fail_read = Status.FAILED
    for number in range(3):
        fail(engine, number)
    engine.run()
    taken = engine.core.residency.levels[1].slots.take(engine.core.residency.levels[1].slots.slots_free)
    engine.clock.advance(1.0)
    engine.plan()
    assert circuit(engine) == "closed"
    fail(engine, 5)
    assert circuit(engine) == "open"
    engine.core.residency.levels[1].slots.give(taken)


def test_memory_serves_on_while_the_disk_is_left_alone():
    """A broken disk takes host memory with it (vllm#44249)."""
    engine = stored()
    engine.core.prefetch(prompt(9, 2), 0.0)
    engine.run()
    engine.tiers[-1].fail_read = Status.FAILED
    for number in range(3):
        fail(engine, number)
    lease = engine.reserve(engine.match(prompt(9, 2)), 2)
    assert isinstance(lease, Lease)
    assert lease.tiers["host"] == 8
    check_prefix(engine, lease, prompt(9, 2))
    engine.release(lease)
    engine.core.prefetch(prompt(10, 2), engine.clock.now())
    reads = engine.tiers[-1].reads
    engine.run()
    assert engine.tiers[-1].reads == reads, "hints do not go to a disk that is left alone"
    engine.check()
