"""Announced requests: what is brought up for them, what that may take, and how it is counted."""

import pytest

from kvtier.cache.leases import Lease
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Status
from tests.engine_bench import check_prefix, fill_and_push_down, make_engine, prompt, serve, tiers_of

COUNTS = ("prefetched_blocks", "prefetch_useful", "prefetch_late", "prefetch_wasted", "prefetch_refused")


def counts(engine):
    stats = engine.core.stats()
    return tuple(stats[name] for name in COUNTS)


def announce(engine, *prompts):
    for keys in prompts:
        engine.core.prefetch(keys, engine.clock.now())


def pushed_down(prompts, blocks, gpu=8, host=16, budget=0.5, lookahead=8):
    """An engine whose disk alone has these prompts."""
    disk = DictTier()
    engine = make_engine(gpu=prompts * blocks, host=host, disk=disk)
    for number in range(prompts):
        serve(engine, prompt(number, blocks))
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=gpu, host=host, disk=disk)
    prefetch = fresh.core._prefetch
    prefetch._budget = budget
    prefetch._lookahead_requests = lookahead
    return fresh


def test_what_is_announced_is_in_memory_when_its_request_comes():
    """A hint reads nothing, reads twice, or loses what it brought."""
    engine, keys = fill_and_push_down(blocks=6)
    announce(engine, keys)
    engine.run()
    assert tiers_of(engine, keys) == {"gpu": 0, "host": 24, "lmdb": 0}
    lease = serve(engine, keys)
    assert lease.tiers["host"] == 24
    assert counts(engine) == (6, 6, 0, 0, 0)
    announce(engine, prompt(9, 3), keys)  # unknown, and in the gpu tier: nothing happens
    assert not engine.plan()
    assert engine.core.stats()["tiers"]["lmdb"]["read_blocks"] == 6
    engine.check()


def test_without_a_host_tier_blocks_come_to_the_top():
    """Where there are two tiers, hints do nothing."""
    engine = pushed_down(2, 3, gpu=8, host=None)
    announce(engine, prompt(0, 3))
    engine.run()
    assert tiers_of(engine, prompt(0, 3)) == {"gpu": 12, "lmdb": 0}
    lease = serve(engine, prompt(0, 3))
    assert lease.tiers == {"gpu": 12, "lmdb": 0}
    assert counts(engine) == (3, 3, 0, 0, 0)
    engine.check()


@pytest.mark.parametrize("host", [16, None])
def test_a_request_that_comes_early_joins_what_is_under_way(host):
    """A block is read twice because its request did not wait for the prefetch."""
    engine = pushed_down(1, 3, host=host, budget=0.5)
    announce(engine, prompt(0, 3))
    engine.plan()
    ticket = engine.submit_reserve(engine.match(prompt(0, 3)), 3)
    engine.run()
    lease = engine.answers[ticket]
    assert isinstance(lease, Lease)
    assert lease.tokens_ready == 12
    check_prefix(engine, lease, prompt(0, 3))
    assert engine.core.stats()["tiers"]["lmdb"]["read_blocks"] == 3
    assert counts(engine) == (3, 0, 3, 0, 0)
    engine.release(lease)
    engine.check()


@pytest.mark.parametrize("host", [16, None])
def test_the_budget_is_kept(host):
    """Prefetching thrashes memory (vllm#49902)."""
    engine = pushed_down(1, 6, host=host, budget=0.25)
    budget = engine.core._prefetch._blocks_max
    announce(engine, prompt(0, 6))
    engine.run()
    assert counts(engine) == (budget, 0, 0, 0, 0)
    engine.clock.advance(31.0)
    engine.run()
    assert counts(engine) == (budget, 0, 0, budget, 1)
    tier = engine.core.stats()["tiers"]["host" if host else "gpu"]
    assert tier["blocks_idle"] == budget  # not held any longer
    engine.check()


def test_what_was_brought_is_not_evicted_before_its_use():
    """Other traffic pushes out what was just brought up (vllm#49902)."""
    engine = pushed_down(1, 3, gpu=4, host=6)
    announce(engine, prompt(0, 3))
    engine.run()
    for number in range(20, 30):
        serve(engine, prompt(number, 4))
        engine.run()
    assert tiers_of(engine, prompt(0, 3))["host"] == 12
    assert counts(engine) == (3, 0, 0, 0, 0)
    serve(engine, prompt(0, 3))
    assert counts(engine) == (3, 3, 0, 0, 0)
    engine.check()


def test_requests_beyond_the_lookahead_follow_when_it_is_their_turn():
    """A long queue pushes out what its first requests need; or those behind the lookahead are never brought."""
    engine = pushed_down(4, 2, lookahead=2)
    announce(engine, *(prompt(number, 2) for number in range(4)))
    engine.run()
    assert [tiers_of(engine, prompt(number, 2))["host"] for number in range(4)] == [8, 8, 0, 0]
    serve(engine, prompt(1, 2))
    engine.run()
    assert [tiers_of(engine, prompt(number, 2))["host"] for number in (0, 2, 3)] == [8, 8, 0]
    engine.clock.advance(31.0)  # nobody came for the others
    engine.run()
    assert tiers_of(engine, prompt(3, 2))["host"] == 8
    assert counts(engine) == (8, 2, 0, 4, 0)
    engine.check()


def test_the_rest_follows_when_there_is_room_again():
    """A prefetch that met a full tier is never taken up again."""
    engine = pushed_down(1, 4, gpu=8, host=4, budget=1.0)
    busy = [serve(engine, prompt(50 + number, 2), keep=True) for number in range(2)]
    engine.core.submit_flush()
    engine.plan()  # stores hold the host tier's slots
    announce(engine, prompt(0, 4))
    before = counts(engine)[0]
    assert before < 4
    engine.run()
    assert counts(engine)[0] == 4
    for lease in busy:
        engine.release(lease)
    engine.check()


def test_a_failing_disk_makes_waste_and_no_harm():
    """A failed prefetch keeps its slot for good, or a block that cannot be read is tried again by its request."""
    engine = pushed_down(1, 3)
    engine.tiers[-1].fail_read = Status.FAILED
    announce(engine, prompt(0, 3))
    engine.run()
    engine.tiers[-1].fail_read = None
    lease = serve(engine, prompt(0, 3))
    assert lease.tokens_ready == 0
    assert counts(engine) == (3, 0, 0, 3, 0)
    engine.check()
    assert engine.core.stats()["tiers"]["host"]["slots_quarantined"] == 0


def test_new_weights_end_what_was_announced():
    """Blocks of the old weights are brought up and held."""
    engine = pushed_down(3, 2, lookahead=1)
    announce(engine, *(prompt(number, 2) for number in range(3)))
    engine.run()
    engine.core.set_weights_epoch("v2")
    engine.clock.advance(31.0)
    engine.run()
    assert counts(engine)[:4] == (2, 0, 0, 2)
    engine.check()


def test_a_reset_ends_what_was_announced():
    """Blocks that nobody can find hold their slots, and the budget, until the hint is forgotten."""
    engine = pushed_down(3, 2, lookahead=1)
    announce(engine, *(prompt(number, 2) for number in range(3)))
    engine.run()
    engine.core.submit_drop()
    engine.run()
    tiers = engine.core.stats()["tiers"].values()
    assert [tier["slots_quarantined"] for tier in tiers if "slots_quarantined" in tier] == [0, 0]
    assert counts(engine)[:4] == (2, 0, 0, 2)
    engine.check()


def test_hints_that_cannot_help_are_counted():
    """Hints vanish without a trace."""
    engine = pushed_down(1, 3, lookahead=0)
    announce(engine, prompt(0, 3))
    assert counts(engine) == (0, 0, 0, 0, 1)
    memory_only = make_engine(gpu=4, host=4)
    announce(memory_only, prompt(0, 3))
    assert counts(memory_only) == (0, 0, 0, 0, 1)
    late = pushed_down(3, 2, lookahead=1)
    announce(late, *(prompt(number, 2) for number in range(3)))
    late.clock.advance(301.0)
    late.run()
    assert counts(late) == (2, 0, 0, 2, 2)
