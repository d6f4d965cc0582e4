"""How late an event loop wakes up while blocks move down, beside an idle cache.

    python benchmarks/movement_lag.py [--blocks 1457] [--rounds 5] [--path DIR] [--json]

kvtier/cli/bench/lag.py does the measuring, and says how; 1457 blocks are 1 GiB. Units: blocks of 737,280 bytes,
milliseconds.
"""

import asyncio
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import movement_program

from kvtier.cli.bench import lag, world
from kvtier.cli.bench.report import Cost, Report

NAME = "movement: lag of the event loop"
TARGET_MS = 5.0  # p99 above idle


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int = field(default=1457, metadata={"help": "brought down per round"})
    rounds: int = field(default=5, metadata={"help": "idle, then demoting"})


def disk_bytes(sizes: Sizes) -> int:
    return 2 * lag.store_blocks(sizes.blocks) * world.LARGE_BYTES


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    lags = asyncio.run(lag.measure(folder, sizes.blocks, sizes.rounds))
    report.costs += [
        Cost("p99 of the lag, idle", "ms", lags.idle_p99_ms),
        Cost("p99 of the lag, demoting", "ms", lags.moving_p99_ms),
        Cost("p99 of the lag, demoting - idle", "ms", lags.above_ms, TARGET_MS),
        Cost("longest lag, idle", "ms", [max(found) for found in lags.idle_ms]),
        Cost("longest lag, demoting", "ms", [max(found) for found in lags.moving_ms]),
    ]
    wakes = min(len(found) for found in lags.moving_ms)
    report.notes.append(f"at {statistics.median(lags.mb_per_s):.0f} MB/s to the disk; at least {wakes} wakes per round")


if __name__ == "__main__":
    movement_program.main(__name__)
