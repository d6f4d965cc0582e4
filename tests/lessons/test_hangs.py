"""Waits without end, loops without end, and engines that fall with their tiers."""

import threading

import pytest

import kvtier
from kvtier.cache.leases import Lease, NoRoom
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.held import Gate
from kvtier.types import Outcome, Status
from tests.cache_bench import compute, config_for, serve
from tests.cache_bench import prompt as real_prompt
from tests.engine_bench import check_prefix, fill, make_engine, prompt
from tests.engine_bench import serve as serve_polled
from tests.lessons.places import TIERS, at_rest, prefix_in, run_but, store_alone

PATIENCE_S = 60.0


def test_a_full_staging_tier_is_gone_round_or_refused_at_once():
    """Allocation spins until the staging pool has room, which nothing can make (LMCache#2942, LMCache#1330)."""
    disk = DictTier()
    store_alone(disk, [prompt(number, 4) for number in range(4)])
    engine = make_engine(gpu=8, host=4, disk=disk)
    engine.core.prefetch(prompt(0, 4), engine.clock.now())
    engine.core.prefetch(prompt(1, 4), engine.clock.now())
    engine.run()
    pinned = [engine.match(prompt(number, 4), ttl_s=1e9) for number in (0, 1)]
    lease = engine.reserve(engine.match(prompt(2, 4)), 4)
    assert lease.tokens_ready == 16
    check_prefix(engine, lease, prompt(2, 4))
    second = engine.reserve(engine.match(prompt(3, 4)), 4)
    assert second.tokens_ready == 16
    planned = len(engine.held)
    answer = engine.reserve_now(engine.match(prompt(4, 1)), 1)
    assert answer == NoRoom(1, 0)
    assert len(engine.held) == planned
    for match in pinned:
        engine.core.release_match(match)
    engine.release(lease)
    engine.release(second)
    engine.check()


@pytest.mark.parametrize("path", [(2, 1), (1, 0)])
def test_a_load_that_never_ends_holds_nobody_up(path):
    """There is no deadline on a load, on one of its hops (LMCache RFC#4945); or what ends it is the next request that
    looks (LMCache PR#4517)."""
    engine, keys = prefix_in(TIERS[path[0]])
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=0.5)
    engine.plan()
    hung = [batch for batch in engine.held if (batch.source, batch.target) == path]
    assert len(hung) == 1
    assert engine.core.wake_at_s(engine.clock.now()) <= 0.5
    engine.clock.advance(0.5)
    engine.plan()
    lease = engine.answers[ticket]
    assert lease.tokens_ready == 0
    targets = {transfer.target_place for transfer in hung[0].transfers}
    assert path[1] or not targets & set(lease.slots())
    fill(engine, lease, keys)
    engine.release(lease)
    for number in range(10, 20):  # whatever comes meanwhile gets other slots than those that are still written to
        other = engine.submit_reserve(engine.match(prompt(number, 2)), 2)
        run_but(engine, hung)
        answer = engine.answers.pop(other)
        assert isinstance(answer, Lease)
        assert path[1] or not targets & set(answer.slots())
        engine.release(answer)
        engine.check()
    engine.finish(hung[0])
    stats = at_rest(engine)
    assert stats["deadline_cuts"] == 1
    assert stats["tiers"]["gpu"]["slots_free"] + stats["tiers"]["gpu"]["blocks_idle"] == 8


def test_a_hung_disk_stops_no_verb_that_needs_none(tmp_path):
    """A call that blocks is made under a lock that every other verb needs (LMCache#4676, kvcached#371)."""
    config = config_for(tmp_path / "store", watermarks=(0.6, 0.9))
    below, here = real_prompt(config, 1, 4), real_prompt(config, 2, 4)
    with kvtier.open_sync(config) as cache:
        serve(cache, below)
    with kvtier.open_sync(config) as cache:
        gate = Gate(cache._running._tiers[2])
        gate.hold("read")
        gate.hold("write")
        asking = threading.Thread(target=lambda: waited.append(cache.reserve(cache.match(below, owner="w"), 4)))
        waited, flushed = [], []
        serve(cache, here)
        asking.start()
        flushing = threading.Thread(target=lambda: flushed.append(cache.flush()))
        flushing.start()
        gate.wait_for("read")
        gate.wait_for("write")
        for number in range(10, 14):
            keys = real_prompt(config, number, 3)
            match = cache.match(keys, owner="x")
            lease = cache.reserve(match, 3)
            compute(cache, lease, keys)
            cache.release(lease)
            cache.prefetch(below)
            assert cache.peek(keys).tokens == 12
            assert cache.stats()["leases"] <= 1
        assert cache.check() == []
        gate.let_go()
        asking.join(PATIENCE_S)
        flushing.join(PATIENCE_S)
        cache.release(waited[0])
        assert len(flushed) == 1


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_exception_in_a_tier_reaches_nobody(tmp_path, verb, caplog):
    """A failed load is an assertion that kills the engine (vllm#39732, vllm PR#52838), or the exception of a worker
    is swallowed and its caller waits for ever (kvcached#372)."""
    config = config_for(tmp_path / "store", watermarks=(0.6, 0.9))
    keys = real_prompt(config, 1, 4)
    with kvtier.open_sync(config) as cache:
        serve(cache, keys)

    reached = threading.Event()

    def broken(*_):
        reached.set()
        raise RuntimeError("a bug of the tier's")

    with kvtier.open_sync(config) as cache:
        tier = cache._running._tiers[2]
        honest = getattr(tier, verb)
        setattr(tier, verb, broken)
        lease = serve(cache, keys)
        assert lease.tokens_ready == (0 if verb == "read" else 16)
        for number in range(2, 8):
            serve(cache, real_prompt(config, number, 4))
        assert reached.wait(PATIENCE_S)
        setattr(tier, verb, honest)
        serve(cache, keys)
        assert cache.check() == []
        assert cache.stats()["leases"] == 0
    assert "a bug of the tier's" in caplog.text


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISSING])
@pytest.mark.parametrize("fails", [0, 2])
def test_a_bad_block_is_tried_once_and_computed_once(status, fails):
    """A stale positive lookup sends a request to the same bad file again and again (vllm#49176, vllm PR#49328,
    vllm PR#55297)."""
    engine, keys = prefix_in("lmdb", gpu=16)
    bad = keys.groups[0][fails]
    disk = engine.tiers[2]
    for place, (key, _, _) in list(disk.rows.items()):
        if key[4:] == bad:
            if status is Status.CORRUPT:
                disk.corrupt.add(place)
            else:
                del disk.rows[place]
    tickets = [engine.submit_reserve(engine.match(keys), 4) for _ in range(3)]
    engine.run()
    leases = [engine.answers[ticket] for ticket in tickets]
    assert [lease.tokens_ready for lease in leases] == [fails * 4] * 3
    assert engine.core.peek(keys).tokens == fails * 4
    for lease in leases:
        engine.release(lease)
    reads = disk.reads
    again = engine.reserve(engine.match(keys), 4)
    assert again.tokens_ready == fails * 4
    assert disk.reads - reads <= 4 - fails - 1  # the blocks behind it may be brought, the bad one is not asked for
    fill(engine, again, keys)
    engine.release(again)
    at_rest(engine)
    assert serve_polled(engine, keys).tokens_ready == 16
    name = "corrupt" if status is Status.CORRUPT else "missing"
    assert engine.core.stats()["tiers"]["lmdb"][name] == 1


def test_a_dead_disk_is_asked_less_and_less():
    """Retries have no bound, and a persistent failure is a loop (vllm PR#55297)."""
    disk = DictTier()
    disk.fail_write = Status.FAILED
    stores = []
    write, disk.write = disk.write, lambda batch: stores.extend(batch.items[:1]) or write(batch)
    engine = make_engine(gpu=8, host=4, disk=disk, watermarks=(0.5, 0.9))
    serve_polled(engine, prompt(1, 6))
    for _ in range(1000):
        engine.run()
        engine.clock.advance(0.1)
    assert 6 <= len(stores) <= 40  # in 100 s: it waits 0.1 s, twice as long each time, and 10 s in the end
    disk.fail_write = None
    at_rest(engine)
    assert engine.core.stats()["tiers"]["lmdb"]["written_blocks"] > 0


@pytest.mark.parametrize("host", [None, 6])
@pytest.mark.parametrize("status", [Status.FAILED, Status.NO_ROOM])
def test_a_cache_that_loses_its_disk_step_by_step_goes_on(host, status):
    """A degraded cache meets an assertion instead of recomputing (vllm#44249), or a full tier does (vllm#26329)."""
    disk = DictTier(blocks_max=12)
    engine = make_engine(gpu=8, host=host, disk=disk, watermarks=(0.4, 0.8))
    prompts = [prompt(number, 3) for number in range(6)]

    def rounds():
        for keys in prompts * 2:
            lease = serve_polled(engine, keys)  # looks at every byte that is restored
            assert isinstance(lease, Lease)
            engine.clock.advance(0.3)
            engine.run()
            engine.check()

    rounds()
    disk.fail_write = status
    rounds()
    disk.fail_read = Status.FAILED
    rounds()
    disk.rows.clear()  # somebody deletes its files
    disk.fail_read = None
    rounds()
    disk.fail_write = None
    rounds()
    stats = at_rest(engine)
    assert (stats["leases"], stats["matches"]) == (0, 0)
    assert disk.rows


def test_what_is_leased_is_what_was_found():
    """A lookup promises 768 tokens, and fewer are there when they are fetched (LMCache#4133)."""
    for tier in TIERS:
        engine, keys = prefix_in(tier, gpu=8, host=8, disk=DictTier(blocks_max=12))
        match = engine.match(keys, ttl_s=1e9)
        assert match.tokens == 16
        for number in range(20, 40):
            answer = engine.reserve(engine.match(prompt(number, 3)), 3)
            if isinstance(answer, Lease):
                fill(engine, answer, prompt(number, 3))
                engine.release(answer)
            engine.core.submit_flush()
            engine.run()
            engine.clock.advance(1.0)
        lease = engine.reserve(match, 4)
        assert lease.tokens_ready == match.tokens == 16, tier
        check_prefix(engine, lease, keys)
        engine.release(lease)
        engine.check()


def test_a_top_tier_that_is_no_buffer_is_filled_by_way_of_memory():
    """A path from disk to the device is taken that this machine does not have, and the load hangs (dynamo#5012,
    dynamo#6032)."""
    for host, tokens in ((8, 16), (None, 0)):
        engine, keys = prefix_in("lmdb", host=host)
        engine.core.residency.levels[0].host_addressable = False
        ticket = engine.submit_reserve(engine.match(keys), 4)
        moved = set()
        while ticket not in engine.answers:
            engine.plan()
            moved.add((engine.held[0].source, engine.held[0].target))
            engine.finish(engine.held[0])
        assert moved == ({(2, 1), (1, 0)} if host else set())
        lease = engine.answers[ticket]
        assert lease.tokens_ready == tokens
        check_prefix(engine, lease, keys)
        engine.release(lease)
        engine.check()


def test_every_slot_is_accounted_for_while_memory_and_blocks_move():
    """Pages that are being mapped are in no list, and whoever waits for them waits for ever (kvcached#371)."""
    engine, keys = prefix_in("lmdb", gpu=8)
    pool = engine.core.residency.levels[0].slots
    ticket = engine.submit_reserve(engine.match(keys), 4)
    resize = engine.core.submit_resize("gpu", 5 * 4096)
    for _ in range(50):
        engine.plan()
        engine.check()
        counted = pool.slots_free + pool.slots_quarantined + pool.slots_withdrawn
        taken = sum(pool.occupant(slot) is not None for slot in range(1, pool.slots_total))
        assert counted + taken == pool.slots_total - 1
        if not engine.held:
            break
        engine.finish(engine.held[0])
    assert engine.answers[ticket].tokens_ready == 16
    engine.release(engine.answers[ticket])
    engine.run()
    assert engine.answers[resize].bytes == 5 * 4096


def test_a_refused_map_is_an_answer():
    """Mapping fails on one worker, nobody is told, and all wait (kvcached#372)."""
    engine = make_engine(gpu=4, host=None, gpu_max=12)
    ticket = engine.core.submit_resize("gpu", 13 * 4096)
    (batch,) = engine.plan()
    engine.finish(batch, [Outcome(Status.FAILED)])
    engine.run()
    assert engine.answers[ticket].bytes == 5 * 4096
    assert isinstance(engine.reserve_now(engine.match(prompt(1, 4)), 4), Lease)
    again = engine.core.submit_resize("gpu", 13 * 4096)
    engine.run()
    assert engine.answers[again].bytes == 13 * 4096
    engine.check()
