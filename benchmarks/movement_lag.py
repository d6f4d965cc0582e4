"""How late an event loop wakes up while blocks move down, beside an idle cache.

    python benchmarks/movement_lag.py [--blocks 1457] [--rounds 5] [--path DIR] [--json]

A task sleeps a millisecond again and again, and notes how much longer it took. In each round it does so beside a cache
that has nothing to do, and then while the cache brings `blocks` blocks (1457 are 1 GiB) from gpu through host to lmdb.
The idle time lasts as long as the demotion before it. Units: blocks of 737,280 bytes, milliseconds.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import movement_program
import numpy as np

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.cli.bench import world
from kvtier.cli.bench.report import Cost, Report
from kvtier.engine.cache import TieredCache
from kvtier.errors import KvtierError

NAME = "movement: lag of the event loop"
SLEEP_S = 0.001
IDLE_FIRST_S = 1.0
TARGET_MS = 5.0  # p99 above idle
PERCENT = 99


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int = field(default=1457, metadata={"help": "brought down per round"})
    rounds: int = field(default=5, metadata={"help": "idle, then demoting"})


def disk_bytes(sizes: Sizes) -> int:
    return 2 * _store_blocks(sizes) * world.LARGE_BYTES


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    asyncio.run(_measure(report, sizes, folder))


async def _measure(report: Report, sizes: Sizes, folder: Path) -> None:
    config = world.config(
        world.LARGE, world.LARGE_BYTES, sizes.blocks, sizes.blocks, folder / "store", _store_blocks(sizes)
    )
    idle_ms, moving_ms, took_s = [], [], IDLE_FIRST_S
    speeds = []
    async with kvtier.open(config) as cache:
        for round_ in range(-1, sizes.rounds):
            await _commit(cache, world.prompt(config, round_ + 1, sizes.blocks), first=round_ < 0)
            idle = await lags_ms(asyncio.create_task(asyncio.sleep(took_s)))
            begun_s = time.perf_counter()
            moving = await lags_ms(asyncio.create_task(_flush(cache, sizes.blocks)))
            took_s = time.perf_counter() - begun_s
            if round_ >= 0:
                idle_ms.append(idle)
                moving_ms.append(moving)
                speeds.append(sizes.blocks * world.LARGE_BYTES / 1e6 / took_s)
    idle_p99, moving_p99 = ([percentile(lags, PERCENT) for lags in rounds] for rounds in (idle_ms, moving_ms))
    above = [moving - idle for idle, moving in zip(idle_p99, moving_p99, strict=True)]
    report.costs += [
        Cost("p99 of the lag, idle", "ms", idle_p99),
        Cost("p99 of the lag, demoting", "ms", moving_p99),
        Cost("p99 of the lag, demoting - idle", "ms", above, TARGET_MS),
        Cost("longest lag, idle", "ms", [max(lags) for lags in idle_ms]),
        Cost("longest lag, demoting", "ms", [max(lags) for lags in moving_ms]),
    ]
    wakes = min(len(lags) for lags in moving_ms)
    report.notes.append(f"at {statistics.median(speeds):.0f} MB/s to the disk; at least {wakes} wakes per round")


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


def _store_blocks(sizes: Sizes) -> int:
    return 2 * sizes.blocks  # later rounds evict


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


async def _flush(cache: TieredCache, blocks: int) -> None:
    flushed = await cache.flush()
    if flushed.failed or flushed.blocks != blocks:
        raise KvtierError(f"{flushed!r}, and {blocks} blocks were to be brought down")


if __name__ == "__main__":
    movement_program.main(__name__)
