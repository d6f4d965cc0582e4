"""What many readers of one prefix cost the disk, beside one reader: bytes read.

    python benchmarks/movement_readers.py [--readers 64] [--blocks 256] [--rounds 3] [--path DIR] [--json]

The prefix lies in the store only. Each round opens the cache twice, with nothing in memory: for one reader, and for
all of them at once, as tasks of one event loop that keep their leases until everybody has one. Bytes are counted twice:
by the store's tier, and by the kernel for this process, index included. Units: blocks of 737,280 bytes, MB.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import movement_program
import numpy as np

import kvtier
from kvtier.cache.leases import Lease
from kvtier.cli.bench import world
from kvtier.cli.bench.report import Cost, Report
from kvtier.cli.demo.ttft import device_bytes_read
from kvtier.config import Config
from kvtier.engine.sync import open_sync
from kvtier.errors import KvtierError

NAME = "movement: readers of one prefix"
TARGET = 1.2  # bytes read, by those of one reader


@dataclass(frozen=True, slots=True)
class Sizes:
    readers: int = field(default=64, metadata={"help": "at once"})
    blocks: int = field(default=256, metadata={"help": "of the prefix"})
    rounds: int = field(default=3, metadata={"help": "of one reader, then all of them"})


@dataclass(frozen=True, slots=True)
class Bytes:
    """Read during one opening of the cache."""

    tier: int
    kernel: int


def disk_bytes(sizes: Sizes) -> int:
    return 3 * sizes.blocks * world.LARGE_BYTES


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    config = world.config(world.LARGE, world.LARGE_BYTES, sizes.blocks, sizes.blocks, folder / "store", sizes.blocks)
    keys = world.prompt(config, 0, sizes.blocks)
    with open_sync(config) as cache:
        lease = world.reserved(cache, keys, sizes.blocks)
        world.fill(cache, lease, np.random.default_rng(0))
        world.commit_all(cache, lease, keys)
        cache.release(lease)
        world.flush(cache)
    found: dict[int, list[Bytes]] = {1: [], sizes.readers: []}
    for _ in range(sizes.rounds):
        for readers, rounds in found.items():
            rounds.append(asyncio.run(read_by(config, readers, sizes.blocks)))
    one, many = found[1], found[sizes.readers]
    named = f"{sizes.readers} readers"
    ratios = {
        "by the tier": [b.tier / a.tier for a, b in zip(one, many, strict=True)],
        "by the kernel": [b.kernel / max(1, a.kernel) for a, b in zip(one, many, strict=True)],
    }
    report.costs += [
        Cost("one reader, bytes read by the tier", "MB", [b.tier / 1e6 for b in one]),
        Cost("one reader, bytes read by the kernel", "MB", [b.kernel / 1e6 for b in one]),
        Cost(f"{named}, bytes read by the tier", "MB", [b.tier / 1e6 for b in many]),
        Cost(f"{named}, bytes read by the kernel", "MB", [b.kernel / 1e6 for b in many]),
        *(Cost(f"{named} / one, {how}", "x", values, TARGET) for how, values in ratios.items()),
    ]
    report.notes.append(f"the prefix has {sizes.blocks} blocks, {sizes.blocks * world.LARGE_BYTES / 1e6:.0f} MB")


async def read_by(config: Config, readers: int, blocks: int) -> Bytes:
    """Everybody gets the whole prefix, and nobody leaves before."""
    keys = world.prompt(config, 0, blocks)
    everybody = asyncio.Barrier(readers)
    async with kvtier.open(config) as cache:

        async def read(reader: int) -> None:
            lease = await cache.reserve(cache.match(keys, owner=f"reader {reader}"), blocks)
            if not isinstance(lease, Lease) or lease.tokens_ready != blocks * world.BLOCK_TOKENS:
                raise KvtierError(f"reader {reader} did not get the whole prefix: {lease!r}")
            await everybody.wait()
            cache.release(lease)

        kernel_bytes = device_bytes_read()
        async with asyncio.TaskGroup() as group:
            for reader in range(readers):
                group.create_task(read(reader))
        return Bytes(cache.stats()["tiers"]["lmdb"]["read_bytes"], device_bytes_read() - kernel_bytes)


if __name__ == "__main__":
    movement_program.main(__name__)
