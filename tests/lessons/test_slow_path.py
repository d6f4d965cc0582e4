"""Caches that cost more than they save: work for nothing, in the wrong order, or too much at once."""

import kvtier
from kvtier.cache.leases import Lease
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.held import Gate
from tests.cache_bench import config_for
from tests.cache_bench import prompt as real_prompt
from tests.cache_bench import serve as real_serve
from tests.engine_bench import check_prefix, make_engine, prompt, serve, tiers_of
from tests.lessons.places import OTHERS, at_rest, prefix_in, run_but, store_alone

# ---------------------------------------------------------------- work for nothing


def slots_free(engine):
    tiers = engine.core.stats()["tiers"]
    return [tier["slots_free"] for tier in tiers.values() if "slots_free" in tier]


def test_a_miss_takes_no_memory_and_reads_nothing():
    """Host memory is taken for a prefetch before anybody knows that the disk has nothing (sglang PR#31398,
    sglang#19320)."""
    engine, _ = prefix_in("lmdb")
    before = slots_free(engine)
    unknown = prompt(77, 6)
    match = engine.match(unknown)
    assert (match.tokens, engine.core.peek(unknown).tokens) == (0, 0)
    engine.core.prefetch(unknown, engine.clock.now())
    assert slots_free(engine) == before
    assert engine.plan() == []
    lease = engine.reserve_now(match, 6)
    assert isinstance(lease, Lease)
    assert slots_free(engine) == [before[0] - 6, before[1]]
    assert engine.tiers[2].reads == 0
    engine.release(lease)


def test_of_a_known_prefix_no_more_is_taken_than_is_known():
    """The same in part: memory for the whole prompt, of which the disk has the head (sglang PR#31398)."""
    engine, keys = prefix_in("lmdb", blocks=3)
    longer = prompt(1, 6)
    before = slots_free(engine)
    match = engine.match(longer)
    assert match.tokens == keys.tokens
    assert slots_free(engine) == before
    engine.core.prefetch(longer, engine.clock.now())
    engine.run()
    assert slots_free(engine) == [before[0], before[1] - 3]
    assert engine.tiers[2].reads == 3


def test_many_readers_of_one_prefix_read_it_once_in_every_order():
    """Each of N concurrent readers loads the shared prefix (vllm#44294): before, between and after the hops."""
    engine, keys = prefix_in("lmdb")
    tickets = []
    for _ in range(4):
        tickets += [engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0) for _ in range(16)]
        engine.plan()
        if engine.held:
            engine.finish(engine.held[0])
    engine.run()
    assert engine.tiers[2].reads == 4
    assert engine.core.stats()["tiers"]["host"]["read_blocks"] == 4
    assert len({engine.answers[ticket].slots() for ticket in tickets}) == 1
    for ticket in tickets:
        assert engine.answers[ticket].tokens_ready == 16
        engine.release(engine.answers[ticket])
    engine.check()


# ---------------------------------------------------------------- in time and in order


def test_a_load_that_ended_is_an_answer_at_once():
    """A prefetch is done, and nobody looks until the scheduler comes round (sglang#32724)."""
    engine, keys = prefix_in("lmdb")
    ticket = engine.submit_reserve(engine.match(keys), 4)
    later = engine.submit_reserve(engine.match(prompt(77, 2)), 2)
    assert later in engine.answers  # a request that came later does not wait for it
    engine.plan()
    engine.finish(engine.held[0])
    engine.plan()
    (last,) = engine.held
    engine.held.clear()
    assert ticket not in engine.answers
    engine.held.append(last)
    engine.finish(last)  # nothing is planned, asked or looked up any more
    assert engine.answers[ticket].tokens_ready == 16


def test_loads_pass_stores_that_hang():
    """There is no back-pressure: stores fill the queue, and loads wait behind them (vllm RFC#50031)."""
    engine, keys = prefix_in("lmdb", gpu=16, host=16)
    for number in range(OTHERS + 10, OTHERS + 13):
        serve(engine, prompt(number, 4))
    engine.core.submit_flush()
    engine.plan()
    stores = [batch for batch in engine.held if batch.target > batch.source]
    assert stores
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=9.0)
    run_but(engine, stores)
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 16
    check_prefix(engine, lease, keys)
    engine.release(lease)
    for batch in stores:
        engine.finish(batch)
    at_rest(engine)


def test_a_plan_begins_with_its_loads():
    """Stores that were asked for first are sent first (vllm RFC#50031)."""
    engine, keys = prefix_in("lmdb", gpu=16)
    serve(engine, prompt(2, 4))
    engine.core.submit_flush()
    engine.submit_reserve(engine.match(keys), 4)
    ways = [batch.target < batch.source for batch in engine.plan()]
    assert set(ways) == {True, False}
    assert ways == sorted(ways, reverse=True)


def test_stores_that_hang_are_bounded_and_what_they_cost_is_counted(tmp_path):
    """The queue of stores has no end (vllm RFC#50031): memory grows with it, or every slot is held by it."""
    config = config_for(tmp_path / "store", watermarks=(0.5, 0.9))
    with kvtier.open_sync(config) as cache:
        gate = Gate(cache._running._tiers[2])
        gate.hold("write")
        in_flight = set()
        for number in range(40):
            real_serve(cache, real_prompt(config, number, 4))  # each is served all the same
            in_flight.add(cache.stats()["batches_in_flight"])
        gate.wait_for("write")
        tiers = cache.stats()["tiers"]
        assert max(in_flight) <= 8  # two per way, and the notes
        assert tiers["gpu"]["dropped_dirty"] > 0
        gate.let_go()
        cache.flush()
        assert cache.check() == []


def test_waiting_requests_are_promoted_within_a_budget():
    """Every request that waits is promoted, and they push each other out (vllm#49902): the first ones are brought,
    stay until they are used, and the others follow."""
    disk = DictTier()
    waiting = [prompt(number, 2) for number in range(12)]
    store_alone(disk, waiting)
    engine = make_engine(gpu=8, host=12, disk=disk)
    for keys in waiting:
        engine.core.prefetch(keys, engine.clock.now())
    engine.run()
    brought = [tiers_of(engine, keys)["host"] for keys in waiting]
    assert sum(brought) == 24  # half of the host tier, in the order in which they will run
    assert brought == sorted(brought, reverse=True)
    for keys in waiting:
        assert tiers_of(engine, keys)["host"] == 8, "it was pushed out, or never brought"
        assert serve(engine, keys).tiers["host"] == 8
        engine.run()
    stats = engine.core.stats()
    assert (stats["prefetch_useful"], stats["prefetch_wasted"], stats["prefetch_late"]) == (24, 0, 0)
    assert stats["tiers"]["lmdb"]["read_blocks"] == 24
    engine.check()
