"""The asyncio face: eviction in the background, shared promotion, cancellation, shutdown."""

import asyncio

import pytest

import kvtier
from kvtier.cache.leases import Lease
from kvtier.errors import ClosedError, InvariantError, UsageError
from kvtier.testing.held import Gate
from tests.cache_bench import BLOCK_TOKENS, aserve, check_ready, compute, config_for, finish, prompt


async def store(config, keys):
    """A cache that has computed these keys, and is gone: they lie on disk only."""
    async with kvtier.open(config) as cache:
        await aserve(cache, keys)
        assert (await cache.flush()).failed == 0


def tier(cache, index):
    return cache._running._tiers[index]


def closing_begins(cache):
    while not cache._running.closed:
        pass


def quiet(cache):
    """Wait until nothing moves, nor would after another look."""
    engine = cache._engine
    calm = 0
    while calm < 2:
        turns = engine.turns
        busy = engine.call(lambda core, now_s: core.busy)
        while engine.turns == turns:
            engine.call(lambda core, now_s: None)
        calm = 0 if busy else calm + 1


async def test_blocks_go_down_the_tiers_while_the_cache_is_used_and_come_back(tmp_path):
    """More prompts than the GPU tier holds are lost instead of demoted."""
    config = config_for(tmp_path / "store", watermarks=(0.6, 0.9))
    prompts = [prompt(config, number, 6) for number in range(8)]
    async with kvtier.open(config) as cache:
        for keys in prompts:
            await aserve(cache, keys)
            await asyncio.to_thread(quiet, cache)
        stats = cache.stats()["tiers"]
        assert stats["gpu"]["reclaimed"] > 0
        assert stats["gpu"]["dropped_dirty"] == 0
        assert stats["lmdb"]["written_blocks"] > 0
        for keys in prompts:
            lease = await aserve(cache, keys)
            assert lease.tokens_ready == 24
        assert cache.check() == []


async def test_a_new_process_finds_the_prefix_on_disk(tmp_path):
    """A restart starts from nothing (LMCache#562)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    async with kvtier.open(config) as cache:
        await aserve(cache, keys)
        assert (await cache.flush()).failed == 0
    async with kvtier.open(config) as cache:
        assert cache.peek(keys).tiers == {"gpu": 0, "host": 0, "lmdb": 24}
        lease = await aserve(cache, keys)
        assert lease.tiers["lmdb"] == 24
        assert cache.stats()["tiers"]["lmdb"]["written_blocks"] == 0


async def test_two_concurrent_reservers_share_one_transfer(tmp_path):
    """Each reader of a prefix reads it from disk (vllm#44294)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    await store(config, keys)
    async with kvtier.open(config) as cache:
        gate = Gate(tier(cache, 2))
        gate.hold("read")
        tasks = [asyncio.create_task(cache.reserve(cache.match(keys, owner=f"r{i}"), 6)) for i in range(4)]
        await asyncio.to_thread(gate.wait_for, "read")
        assert not any(task.done() for task in tasks)
        gate.let_go()
        leases = await asyncio.gather(*tasks)
        assert cache.stats()["tiers"]["lmdb"]["read_blocks"] == 6
        assert len({lease.slots() for lease in leases}) == 1
        for lease in leases:
            finish(cache, lease, keys)
        assert cache.check() == []


async def test_cancelling_a_reserve_loses_nothing(tmp_path):
    """A cancelled request leaks its slots, or takes a neighbour's promotion with it."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    await store(config, keys)
    async with kvtier.open(config) as cache:
        gate = Gate(tier(cache, 2))
        gate.hold("read")
        match = cache.match(keys, owner="gone")
        gone = asyncio.create_task(cache.reserve(match, 10))
        stays = asyncio.create_task(cache.reserve(cache.match(keys, owner="stays"), 6))
        await asyncio.to_thread(gate.wait_for, "read")
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        gate.let_go()
        finish(cache, await stays, keys)
        cache.release(match)
        await asyncio.to_thread(quiet, cache)
        assert not cache._engine._waiters  # each would keep its event loop
        stats = cache.stats()
        assert (stats["leases"], stats["matches"]) == (0, 0)
        assert stats["tiers"]["gpu"]["blocks_idle"] == 6
        assert stats["tiers"]["gpu"]["slots_free"] == 9
        assert cache.check() == []


async def test_a_reserve_cancelled_after_its_answer_is_released(tmp_path):
    """A lease that arrives while its task is being cancelled belongs to nobody."""
    config = config_for()
    keys = prompt(config, 1, 3)
    async with kvtier.open(config) as cache:
        task = asyncio.create_task(cache.reserve(cache.match(keys, owner="x"), 3))
        await asyncio.sleep(0)  # the question is asked and answered on the engine's thread
        cache.stats()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cache.stats()["leases"] == 0
        assert cache.stats()["tiers"]["gpu"]["slots_free"] == 15


async def test_a_hung_disk_does_not_keep_a_request_waiting(tmp_path):
    """No load deadline: requests wait for ever (LMCache RFC#4945)."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    await store(config, keys)
    async with kvtier.open(config) as cache:
        gate = Gate(tier(cache, 2))
        gate.hold("read")
        lease = await cache.reserve(cache.match(keys, owner="x"), 6, load_deadline_s=0.05)
        assert lease.tokens_ready == 0
        compute(cache, lease, keys)
        gate.let_go()
        await asyncio.to_thread(quiet, cache)
        cache.release(lease)
        lease = await aserve(cache, keys)
        assert lease.tokens_ready == 24
        assert cache.check() == []


async def test_shutdown_with_transfers_in_flight(tmp_path):
    """Closing hangs, or cuts a running write in half, or loses what flush had not written yet."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 10)
    cache = kvtier.open(config)
    await cache.__aenter__()
    gate = Gate(tier(cache, 2))
    gate.hold("write")
    await aserve(cache, keys)
    flushing = asyncio.create_task(cache.flush())
    await asyncio.to_thread(gate.wait_for, "write")
    closing = asyncio.create_task(cache.aclose())
    await asyncio.sleep(0)
    gate.let_go()
    assert await closing == 0
    assert (await flushing).failed == 0
    async with kvtier.open(config) as cache:
        assert cache.peek(keys).tiers["lmdb"] == 40


async def test_close_reports_what_it_could_not_save(tmp_path):
    """A close that ran out of time, or followed on a bug, claims that all is well."""
    config = config_for(tmp_path / "store")
    for broken in (False, True):
        cache = kvtier.open(config)
        await cache.__aenter__()
        disk = tier(cache, 2)
        disk.write = lambda batch: None
        disk.write_together = lambda batches: None
        await aserve(cache, prompt(config, 1, 5))
        if broken:
            with pytest.raises(InvariantError):
                cache._engine.call(lambda core, now_s: 1 / 0)
        assert await cache.aclose(flush_s=0.05) == 5
        assert await cache.aclose() == 0


async def test_a_close_that_ran_out_of_time_counts_what_a_slow_write_saved_after_all(tmp_path):
    """Blocks are reported as lost that the next process finds."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 5)
    cache = kvtier.open(config)
    await cache.__aenter__()
    gate = Gate(tier(cache, 2))
    gate.hold("write")
    await aserve(cache, keys)
    flushing = asyncio.create_task(cache.flush())
    await asyncio.to_thread(gate.wait_for, "write")  # before the time runs, which a busy machine would use up
    closing = asyncio.create_task(cache.aclose(flush_s=0.05))
    await asyncio.to_thread(closing_begins, cache)
    gate.let_go()
    lost = await closing
    await asyncio.gather(flushing, return_exceptions=True)
    async with kvtier.open(config) as cache:
        assert cache.peek(keys).tiers["lmdb"] == (5 - lost) * BLOCK_TOKENS


async def test_a_cancelled_close_does_not_wait_for_a_hung_disk(tmp_path, monkeypatch):
    """A task that closes over a hung disk cannot be cancelled; or its store stays locked after the disk is back."""
    monkeypatch.setattr("kvtier.engine.cache.CLOSING_S", 0.0)
    config = config_for(tmp_path / "store")
    cache = kvtier.open(config)
    await cache.__aenter__()
    gate = Gate(tier(cache, 2))
    gate.hold("write")
    await aserve(cache, prompt(config, 1, 5))
    closing = asyncio.create_task(cache.aclose())
    await asyncio.to_thread(gate.wait_for, "write")
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ClosedError):
        cache.stats()
    gate.let_go()
    await asyncio.to_thread(cache._running.close)  # it goes on by itself: this only waits
    async with kvtier.open(config) as cache:
        assert cache.check() == []


async def test_pending_calls_are_answered_when_the_cache_closes(tmp_path):
    """A waiting task hangs for ever after close."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 5)
    await store(config, keys)
    async with kvtier.open(config) as cache:
        gate = Gate(tier(cache, 2))
        gate.hold("read")
        task = asyncio.create_task(cache.reserve(cache.match(keys, owner="x"), 5, load_deadline_s=30))
        await asyncio.to_thread(gate.wait_for, "read")
        stopping = asyncio.create_task(asyncio.to_thread(cache._stop))
        with pytest.raises(ClosedError):
            await task  # at once, though the disk still hangs
        gate.let_go()
        await stopping


async def test_a_closed_cache_says_so():
    """A use after close hangs or crashes."""
    config = config_for()
    cache = kvtier.open(config)
    with pytest.raises(ClosedError, match="not open"):
        cache.match(prompt(config, 1, 1), owner="x")
    async with cache:
        with pytest.raises(UsageError, match="open already"):
            await cache.__aenter__()
    for verb in (
        lambda: cache.match(prompt(config, 1, 1), owner="x"),
        lambda: cache.stats(),
        lambda: cache.kv(),
        lambda: cache.prefetch(prompt(config, 1, 1)),
    ):
        with pytest.raises(ClosedError, match="closed"):
            verb()
    with pytest.raises(ClosedError):
        await cache.flush()


async def test_the_event_loop_is_never_blocked_by_a_slow_disk(tmp_path):
    """One slow disk stops every task of the process."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    await store(config, keys)
    async with kvtier.open(config) as cache:
        gate = Gate(tier(cache, 2))
        gate.hold("read")
        task = asyncio.create_task(cache.reserve(cache.match(keys, owner="x"), 6, load_deadline_s=30))
        await asyncio.to_thread(gate.wait_for, "read")
        other = prompt(config, 2, 3)
        lease = await aserve(cache, other)  # another request is served meanwhile
        assert isinstance(lease, Lease)
        gate.let_go()
        finish(cache, await task, keys)


async def test_reset_is_durable_when_it_returns(tmp_path):
    """A restart brings blocks of old weights back."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 6)
    async with kvtier.open(config) as cache:
        await aserve(cache, keys)
        await cache.flush()
        assert (await cache.reset()).durable
        assert cache.peek(keys).tokens == 0
    async with kvtier.open(config) as cache:
        assert cache.peek(keys).tokens == 0
        lease = await cache.reserve(cache.match(keys, owner="x"), 6)
        assert lease.tokens_ready == 0
        check_ready(cache, lease, keys)


def test_a_loop_that_dies_with_its_tasks_leaves_no_lease_behind(tmp_path):
    """Leases of coroutines that nobody will ever run again stay for good."""
    config = config_for(tmp_path / "store")
    keys = prompt(config, 1, 3)
    asyncio.run(store(config, keys))
    cache = kvtier.open(config)
    cache._start()
    gate = Gate(tier(cache, 2))
    gate.hold("read")
    for _ in range(5):
        loop = asyncio.new_event_loop()
        coroutine = cache.reserve(cache.match(keys, owner="x"), 3, load_deadline_s=30)
        task = loop.create_task(coroutine)
        loop.run_until_complete(asyncio.sleep(0))
        assert not task.done()
        task._log_destroy_pending = False  # that is what is tested
        loop.close()
        coroutine.close()
    gate.let_go()
    quiet(cache)
    assert cache.stats()["leases"] == 0
    cache._stop()
