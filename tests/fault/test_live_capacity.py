"""The capacity of a store changes while a cache serves requests over it."""

import random
from pathlib import Path

from kvtier.cli.bench import world
from kvtier.engine.sync import SyncCache, open_sync
from tests.fault.order_writer import configured


def serve(cache: SyncCache, path: Path, requests: int, seed: int) -> None:
    chance = random.Random(seed)
    config = configured(path, "none")
    for _ in range(requests):
        keys = world.prompt(config, chance.randrange(60), chance.randint(1, 24))
        lease = world.reserved(cache, keys, len(keys.groups[0]))
        done = lease.tokens_ready // world.BLOCK_TOKENS
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[done:])
        cache.release(lease)
        cache.flush()


def blocks(cache: SyncCache) -> int:
    count = cache.stats()["tiers"]["lmdb"]["blocks"]
    assert isinstance(count, int)
    return count


def test_a_cache_takes_less_and_more_of_its_disk(tmp_path: Path) -> None:
    """An operator who needs the disk has to stop the server, or blocks that were kept are lost all at once."""
    path = tmp_path / "s"
    with open_sync(configured(path, "none")) as cache:
        serve(cache, path, 60, seed=0)
        full, level = blocks(cache), cache._engine._core.residency.levels[1]
        before = level.capacity_bytes, level.policy_blocks
        assert cache.resize("lmdb", 1536 << 10) == 1536 << 10
        serve(cache, path, 20, seed=1)
        less = blocks(cache)
        assert level.capacity_bytes < before[0]
        assert level.policy_blocks < before[1]
        assert cache.stats()["tiers"]["lmdb"]["capacity_bytes"] == level.capacity_bytes <= 1536 << 10
        assert 50 < less < full * 0.8
        used = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
        assert used <= 1536 << 10
        assert cache.stats()["tiers"]["lmdb"]["gave_way"] > 0
        assert cache.resize("lmdb", 4 << 20) == 4 << 20
        serve(cache, path, 80, seed=2)
        assert blocks(cache) > full
        assert cache.resize("lmdb", 50_000) == 4 << 20  # too little for a store: nothing changes
        assert cache._engine._core.check() == []
