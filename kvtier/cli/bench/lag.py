"""How late an event loop wakes up while blocks move down to disk, beside an idle cache.

A task sleeps a millisecond again and again, and notes how much longer it took. In each round it does so beside a cache
that has nothing to do, and then while the cache brings `blocks` blocks from gpu through host to lmdb. The idle time
lasts as long as the demotion before it. Units: blocks of 737,280 bytes, milliseconds.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.cli.bench import world
from kvtier.engine.cache import TieredCache
from kvtier.errors import KvtierError

SLEEP_S = 0.001
IDLE_FIRST_S = 1.0
PERCENT = 99


@dataclass(slots=True)
class Lags:
    """By round: every lag of its two parts, and how fast the blocks went."""

    idle_ms: list[list[float]] = field(default_factory=list)
    moving_ms: list[list[float]] = field(default_factory=list)
    mb_per_s: list[float] = field(default_factory=list)

    @property
    def idle_p99_ms(self) -> list[float]:
        return [percentile(lags, PERCENT) for lags in self.idle_ms]

    @property
    def moving_p99_ms(self) -> list[float]:
        return [percentile(lags, PERCENT) for lags in self.moving_ms]

    @property
    def above_ms(self) -> list[float]:
        """By round: what moving adds."""
        return [moving - idle for idle, moving in zip(self.idle_p99_ms, self.moving_p99_ms, strict=True)]


def store_blocks(blocks: int) -> int:
    """The store's size: later rounds evict."""
    return 2 * blocks


async def measure(folder: Path, blocks: int, rounds: int) -> Lags:
    """One round is thrown away. Raises KvtierError if not every block moves."""
    config = world.config(world.LARGE, world.LARGE_BYTES, blocks, blocks, folder / "store", store_blocks(blocks))
    found, took_s = Lags(), IDLE_FIRST_S
    async with kvtier.open(config) as cache:
        for round_ in range(-1, rounds):
            await _commit(cache, world.prompt(config, round_ + 1, blocks), first=round_ < 0)
            idle = await lags_ms(asyncio.create_task(asyncio.sleep(took_s)))
            begun_s = time.perf_counter()
            moving = await lags_ms(asyncio.create_task(flush(cache, blocks)))
            took_s = time.perf_counter() - begun_s
            if round_ >= 0:
                found.idle_ms.append(idle)
                found.moving_ms.append(moving)
                found.mb_per_s.append(blocks * world.LARGE_BYTES / 1e6 / took_s)
    return found


def percentile(values: list[float], percent: int) -> float:
    """By the nearest rank."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


async def lags_ms(until: "asyncio.Task[None]") -> list[float]:
    """How much longer than asked each sleep took, until the task has ended."""
    lags = []
    while not until.done():
        begun_s = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        lags.append((time.perf_counter() - begun_s - SLEEP_S) * 1e3)
    await until
    return lags


async def flush(cache: TieredCache, blocks: int) -> None:
    """Bring everything down. Raises KvtierError unless it is `blocks` blocks."""
    flushed = await cache.flush()
    if flushed.failed or flushed.blocks != blocks:
        raise KvtierError(f"{flushed!r}, and {blocks} blocks were to be brought down")


async def _commit(cache: TieredCache, keys: Keys, first: bool) -> None:
    """Slots keep the bytes they had, so random ones are written only once."""
    blocks = len(keys.groups[0])
    lease = await cache.reserve(cache.match(keys, owner="bench"), blocks)
    if not isinstance(lease, Lease):
        raise KvtierError(f"the bench's own tiers are too small: {lease!r}")
    if first:
        world.fill(cache, lease, np.random.default_rng(0))
    cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
    cache.release(lease)
