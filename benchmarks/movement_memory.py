"""Whether RAM stays within its budget while blocks churn for an hour, compressed.

    python benchmarks/movement_memory.py [--blocks 976500] [--path DIR] [--json]

What may leak does so by block and by request, not by byte: an hour of demotion at 200 MB/s in blocks of 737,280 bytes
is 976,500 blocks, and as many of one page are brought to the disk here, as fast as it goes, through small tiers over a
store that keeps evicting. Half of the requests are for new prompts; the others come back to a prompt of a while ago,
most of which are on the disk only. The budget is what the configuration gives the memory tiers. Resident bytes are
those of the whole process, interpreter and imports included. Units: blocks of 4,096 bytes, MB.
"""

import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import movement_program

from kvtier.cli.bench import world
from kvtier.cli.bench.memory import resident
from kvtier.cli.bench.report import Cost, Report
from kvtier.config import Config, load_config
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.types import PAGE_BYTES

NAME = "movement: RAM over an hour's churn"
TARGET_MB = 100.0  # above the budget
PROMPT_BLOCKS = 64
RECENT_PROMPTS = 400  # that requests come back to; the memory tiers hold 80
GPU_SLOTS, HOST_SLOTS, STORE_BLOCKS = 1024, 4096, 32_768
EAGER = {"low_watermark": 0.5, "high_watermark": 0.8}
SAMPLES = 200
HOUR_MB_PER_S = 200


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int = field(
        default=HOUR_MB_PER_S * 3600 * 10**6 // world.LARGE_BYTES // 100 * 100, metadata={"help": "brought to the disk"}
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """The process when so many blocks had been written to the disk."""

    blocks: int
    resident_bytes: int


def disk_bytes(sizes: Sizes) -> int:
    return 3 * STORE_BLOCKS * PAGE_BYTES


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    config = churning(folder / "store")
    budget_mb = sum(tier.capacity_bytes for tier in config.tiers[:-1]) / 1e6
    begun_s = time.perf_counter()
    with open_sync(config) as cache:
        samples = churn(cache, config, sizes.blocks)
        took_s = time.perf_counter() - begun_s
        tiers = cache.stats()["tiers"]
        store = tiers["lmdb"]
    marks = [samples[-1].blocks * quarter // 4 for quarter in range(5)]
    nearest = [min(samples, key=lambda sample, mark=mark: abs(sample.blocks - mark)) for mark in marks]
    for name, sample in zip(("start", "1/4", "2/4", "3/4", "end"), nearest, strict=True):
        report.costs.append(Cost(f"RAM at the {name}", "MB", [sample.resident_bytes / 1e6]))
    most_mb = max(sample.resident_bytes for sample in samples) / 1e6
    report.costs.append(Cost("most RAM - budget", "MB", [most_mb - budget_mb], TARGET_MB))
    late = [sample for sample in samples if sample.blocks >= marks[2]]
    report.costs.append(Cost("growth in the second half, by its line", "MB", [_growth_mb(late)]))
    report.notes += [
        f"budget {budget_mb:.0f} MB in gpu and host; {store['written_blocks']:,} blocks brought to the disk, "
        f"{store['read_blocks']:,} read back, {store['evicted']:,} evicted, in {took_s:.0f} s",
        f"an hour at {HOUR_MB_PER_S} MB/s has as many blocks of {world.LARGE_BYTES:,} bytes as were brought down"
        if sizes == Sizes()
        else "fewer blocks than an hour has",
    ]


def churning(store: Path) -> Config:
    """Tiers that move blocks down as soon as half of their slots are used."""
    tree = {
        "model": {"name": "bench", "weights_epoch": "v1", "dtype": "float32", "block_tokens": 16, **world.SMALL},
        "tiers": [
            {"type": "gpu", "capacity": GPU_SLOTS * PAGE_BYTES, "device": "host", **EAGER},
            {"type": "host", "capacity": HOST_SLOTS * PAGE_BYTES, "pin": "off", "hugepages": "off", **EAGER},
            {"type": "lmdb", "capacity": STORE_BLOCKS * PAGE_BYTES, "path": str(store.absolute())},
        ],
        "limits": {"load_deadline": "60s"},
    }
    return load_config(tree, environ={})


def churn(cache: SyncCache, config: Config, blocks: int) -> list[Sample]:
    """Requests until so many blocks were written to the disk; the first sample is of the cache before any."""
    source = random.Random(0)
    samples = [Sample(0, resident()[0])]
    prompts = 0
    written = 0
    while written < blocks:
        returning = prompts > 0 and source.random() < 0.5
        number = source.randrange(max(0, prompts - RECENT_PROMPTS), prompts) if returning else prompts
        prompts += not returning
        _serve(cache, config, number)
        written = cache.stats()["tiers"]["lmdb"]["written_blocks"]
        if written >= blocks * len(samples) / SAMPLES:
            samples.append(Sample(written, resident()[0]))
    return samples


def _serve(cache: SyncCache, config: Config, number: int) -> None:
    """One request; what the store no longer has is computed anew, as far as a bench computes."""
    keys = world.prompt(config, number, PROMPT_BLOCKS)
    lease = world.reserved(cache, keys, PROMPT_BLOCKS)
    ready = lease.tokens_ready // world.BLOCK_TOKENS
    cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[ready:])
    cache.release(lease)


def _growth_mb(samples: list[Sample]) -> float:
    """What the line through the samples rises by from the first to the last."""
    if len(samples) < 2:
        return 0.0
    slope = statistics.linear_regression([s.blocks for s in samples], [s.resident_bytes for s in samples]).slope
    return slope * (samples[-1].blocks - samples[0].blocks) / 1e6


if __name__ == "__main__":
    movement_program.main(__name__)
