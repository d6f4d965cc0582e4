"""The device of the top tier fails for good: what lies below survives, nobody hangs, nothing false is served."""

import pytest

import kvtier
from kvtier.errors import DeviceLost, UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Outcome, Status
from tests.cache_bench import config_for
from tests.engine_bench import check_prefix, make_engine, prompt, serve, tiers_of


class Broken:
    """Stands for a device whose context is gone: every copy raises."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def read(self, items):
        raise DeviceLost("cuMemcpyAsync: an illegal memory access was encountered (700)")

    def write(self, batch):
        raise DeviceLost("cuMemcpyAsync: an illegal memory access was encountered (700)")


def broken(engine):
    engine.tiers[0] = Broken(engine.tiers[0])
    return engine


def stored(disk):
    engine = make_engine(gpu=8, host=16, disk=disk)
    for number in range(3):
        serve(engine, prompt(number, 2))
        engine.core.submit_flush()
        engine.run()
    return engine


def test_a_lost_device_is_noticed_by_a_copy_and_host_and_disk_survive():
    """The whole cache goes with its GPU, or slots of a dead device are leased."""
    disk = DictTier()
    engine = stored(disk)
    serve(engine, prompt(5, 2))  # only in gpu as yet
    lease = engine.reserve(engine.match(prompt(6, 1)), 1)
    gone, safe = prompt(5, 2), prompt(0, 2)
    assert tiers_of(engine, gone)["gpu"] == 8
    broken(engine)
    engine.core.submit_flush()
    waiting = engine.submit_reserve(engine.match(prompt(7, 4)), 4)  # answered before anything happens
    engine.release(engine.answers.pop(waiting))
    held_by_device = engine.core.stats()["tiers"]["gpu"]["blocks"]
    engine.run()
    assert engine.core.peek(gone).tokens == 0
    assert engine.core.peek(safe).tokens == 8
    assert tiers_of(engine, safe)["gpu"] == 0
    with pytest.raises(DeviceLost, match="gpu"):
        engine.submit_reserve(engine.match(safe), 2)
    with pytest.raises(DeviceLost):
        engine.core.commit(lease, [])
    engine.release(lease)
    engine.run()
    engine.check()
    stats = engine.core.stats()
    assert stats["leases"] == 0
    assert stats["tiers"]["gpu"]["blocks"] == 0
    assert stats["tiers"]["gpu"]["device_lost"] == held_by_device > 0
    fresh = make_engine(gpu=8, host=16, disk=disk)
    lease = serve(fresh, safe, keep=True)
    assert lease.tokens_ready == 8
    check_prefix(fresh, lease, safe)


def test_a_pending_reservation_hears_of_it():
    """A request waits for ever for slots that are gone."""
    engine = stored(DictTier())
    engine.core.lose_device()  # as an engine would that has seen the error first
    engine = make_engine(gpu=8, host=16, disk=engine.tiers[2])
    pending = engine.submit_reserve(engine.match(prompt(0, 2)), 2)
    broken(engine)
    engine.run()
    assert isinstance(engine.answers.pop(pending), DeviceLost)
    engine.check()
    assert engine.core.stats()["leases"] == 0


def test_what_host_memory_holds_is_still_saved():
    """Blocks that had left the device in time are lost with it."""
    disk = DictTier()
    engine = make_engine(gpu=4, host=16, disk=disk, watermarks=(0.5, 1.0))
    serve(engine, prompt(0, 4))
    for batch in [batch for batch in engine.plan() if batch.target == 1]:
        engine.finish(batch)  # now in host, not yet on disk
    saved = tiers_of(engine, prompt(0, 4))
    assert saved["gpu"] == 16
    in_host = engine.core.stats()["tiers"]["host"]["blocks"]
    assert in_host
    engine.core.lose_device()
    engine.core.submit_flush()
    engine.run()
    assert len(disk.rows) == in_host
    engine.check()


def test_the_faces_raise_it(tmp_path):
    """A user of the cache sees a bug of ours, or hangs."""
    with kvtier.open_sync(config_for(tmp_path)) as cache:
        keys = kvtier.hash_blocks(list(range(16)), cache.config.model)
        lease = cache.reserve(cache.match(keys, "a"), len(keys.groups[0]))
        cache.lose_device()
        with pytest.raises(DeviceLost, match="open the cache anew"):
            cache.reserve(cache.match(keys, "b"), 1)
        with pytest.raises(DeviceLost):
            cache.commit(lease, [(lease.slots()[0], keys.groups[0][0])])
        cache.release(lease)
        assert cache.check() == []
        assert cache.flush().failed == 0


def test_a_lost_device_has_no_size():
    """`resize` answers with the bytes of memory that is gone, and who asked believes to have it."""
    engine = make_engine(gpu=4, host=16, disk=DictTier(), gpu_max=12)
    engine.core.lose_device()
    for slots in (2, 4, 8):
        with pytest.raises(DeviceLost, match="tier gpu is lost: open the cache anew"):
            engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)
    engine.run()
    assert engine.answers == {}
    with pytest.raises(UsageError, match="cannot be resized"):  # nothing is wrong with the others
        engine.core.submit_resize("host", 8 * PAGE_BYTES)
    engine.check()


@pytest.mark.parametrize("slots", [2, 12])
@pytest.mark.parametrize("late", [False, True], ids=["waiting", "remapping"])
@pytest.mark.parametrize("outcome", [Status.DONE, Status.FAILED, Status.DEVICE_LOST], ids=lambda o: o.value)
def test_a_resize_under_way_hears_of_it_at_once(slots, late, outcome):
    """Who waits for memory waits until the dead device answers, which may be never; or the late answer is a bug."""
    engine = make_engine(gpu=6, host=16, disk=DictTier(), gpu_max=12, watermarks=(0.01, 0.02))
    serve(engine, prompt(0, 6))
    asked = engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)
    if late:
        while not any(batch.remap for batch in engine.held):
            for batch in engine.held[:]:
                engine.finish(batch)
            engine.plan()
    engine.core.lose_device()
    engine._collect()
    assert isinstance(engine.answers.pop(asked), DeviceLost)
    for batch in engine.held[:]:
        if batch.remap:
            engine.finish(batch, [Outcome(outcome)])
    engine.run()
    assert engine.answers == {}
    assert not engine.core.planner.demotions._evacuating.get(0)
    engine.core.submit_flush()
    engine.run()
    engine.check()


def test_resize_of_both_faces_raises_it(tmp_path):
    """A user is told a number of bytes that nobody can use."""
    with kvtier.open_sync(config_for(tmp_path)) as cache:
        cache.lose_device()
        with pytest.raises(DeviceLost, match="open the cache anew"):
            cache.resize("gpu", 32 << 10)
        assert cache.check() == []


async def test_resize_of_the_asyncio_face_raises_it(tmp_path):
    """The same, and the coroutine waits for ever."""
    async with kvtier.open(config_for(tmp_path)) as cache:
        cache.lose_device()
        with pytest.raises(DeviceLost, match="open the cache anew"):
            await cache.resize("gpu", 32 << 10)
