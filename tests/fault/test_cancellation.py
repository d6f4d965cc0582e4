"""Every place at which a caller waits, cancelled one after the other: nothing is held, lost or wrong afterwards."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

import kvtier
from tests.cache_bench import aserve, config_for, finish, prompt

WAITS_MAX = 200  # far more than any scenario here has


class CancelledAt:
    """Awaits a coroutine and cancels the task that does so when it waits for the `number`-th time (from 0)."""

    def __init__(self, coroutine, number):
        self._coroutine = coroutine
        self._number = number
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._coroutine.__await__()
        proceed = inner.__next__
        while True:
            try:
                waited_for = proceed()
            except StopIteration as end:
                return end.value
            if self.waits == self._number:
                asyncio.current_task().cancel()
            self.waits += 1
            try:
                value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - whatever is thrown in belongs to the coroutine
                proceed = lambda error=error: inner.throw(error)  # noqa: E731
            else:
                proceed = lambda value=value: inner.send(value)  # noqa: E731


async def whole_life(config, keys, opened):
    """Open, ask, store, resize, drop and close, each of which waits."""
    async with kvtier.open(config) as cache:
        opened.append(cache)
        await aserve(cache, keys[0])
        cache.prefetch(keys[1])
        await aserve(cache, keys[1])
        await cache.flush()
        await cache.resize("gpu", 32 << 10)
        await cache.sleep()
        await cache.wake()
        finish(cache, await cache.reserve(cache.match(keys[0], owner="again"), 4), keys[0])
        await cache.drop()


@pytest.mark.parametrize("host", ["128KiB", None])
def test_a_whole_life_cancelled_at_each_wait(tmp_path, host):
    """A cancelled caller leaves a store locked, a thread running, or a lease that nobody releases."""
    number, ended = 0, False
    while not ended and number < WAITS_MAX:
        config = config_for(tmp_path / str(number), host=host)
        keys = [prompt(config, n, 4) for n in range(2)]
        opened = []

        async def cancelled(number=number, config=config, keys=keys, opened=opened):
            await CancelledAt(whole_life(config, keys, opened), number)

        try:
            asyncio.run(cancelled())
            ended = True
        except asyncio.CancelledError:
            pass
        for cache in opened:
            assert cache._running.closed
        with kvtier.open_sync(config) as again:  # the lock is free, and what is there is right
            assert again.check() == []
            for each in keys:
                finish(again, again.reserve(again.match(each, owner="t"), 4), each)
        number += 1
    assert ended
    assert number > 8


async def waiting(coroutine, number):
    return await CancelledAt(coroutine, number)


def test_a_verb_cancelled_at_each_wait_leaves_the_cache_whole(tmp_path):
    """A verb that waits, cancelled, keeps slots, or breaks those that come after it."""
    config = config_for(tmp_path / "store")
    keys = [prompt(config, n, 4) for n in range(6)]

    async def scenario():
        async with kvtier.open(config) as cache:
            for each in keys:
                await aserve(cache, each)
            slots = cache.stats()["tiers"]["gpu"]["slots"]
            total = 0
            for verb in (
                lambda: cache.reserve(cache.match(keys[0], owner="gone"), 4),
                cache.flush,
                lambda: cache.resize("gpu", 32 << 10),
                lambda: cache.resize("gpu", 64 << 10),
                cache.sleep,
                cache.wake,
                cache.drop,
                cache.reset,
            ):
                for number in range(WAITS_MAX):
                    try:
                        answer = await asyncio.create_task(waiting(verb(), number))
                        if isinstance(answer, kvtier.Lease):
                            cache.release(answer)
                        break
                    except asyncio.CancelledError:
                        total += 1
                await cache.wake()
                await cache.resize("gpu", 64 << 10)
                await cache.flush()
                for each in keys:
                    await aserve(cache, each)
            stats = cache.stats()
            assert total >= 6
            assert (stats["leases"], stats["tiers"]["gpu"]["slots"]) == (0, slots)
            assert cache.check() == []

    asyncio.run(scenario())
