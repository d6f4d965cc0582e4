"""How fast blocks move between the gpu tier (on host memory) and the host tier, against torch's `copy_`.

    python benchmarks/host_copy.py [--block-bytes 737280] [--blocks 16] [--rounds 41]

Each round moves one batch with each contestant, in turns, so that the machine's moods hit all of them alike. torch
copies the same bytes between the same slots on one thread. Slots are scattered at random, fresh ones every round;
"run" rounds use consecutive slots. Prints medians, and their ratio (above 1: kvtier is faster).
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.host import HostTier
from kvtier.types import ReadItem, StoreKey, WriteBatch, WriteItem

KEY = StoreKey(b"benchmark")
POOL_BATCHES = 12  # so many batches of slots in each tier, to leave the processor's caches behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    capacity_bytes = options.block_bytes * options.blocks * POOL_BATCHES * 65 // 64
    gpu = GpuTier.create(name="gpu", device="host", capacity_bytes=capacity_bytes, length_bytes_max=options.block_bytes)
    host = HostTier.create(name="host", capacity_bytes=capacity_bytes, length_bytes_max=options.block_bytes)
    gpu.array()[1:] = 3
    print(f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__} on one thread")
    print(f"python {' '.join(sys.argv)}")
    print(f"{options.blocks} blocks of {options.block_bytes} bytes, median of {options.rounds} rounds, GB/s")
    for scattered in (True, False):
        for name, ours, theirs in contests(gpu, host, options.block_bytes):
            measure(name, ours, theirs, options, gpu, host, scattered)
    gpu.close()
    host.close()


Move = Callable[[list[tuple[int, int]]], object]  # pairs of (gpu slot, host slot)


def contests(gpu: GpuTier, host: HostTier, block_bytes: int) -> list[tuple[str, Move, Move]]:
    """Both directions, each as the executor would do it and as torch would."""
    gpu_slots, host_slots = (
        torch.from_numpy(gpu.array()),
        [torch.frombuffer(host.slot(i), dtype=torch.uint8) for i in range(host.traits.slots)],
    )

    def demote(pairs: list[tuple[int, int]]) -> None:
        host.write(WriteBatch([WriteItem(KEY, block_bytes, gpu.slot(g), h) for g, h in pairs]))

    def promote(pairs: list[tuple[int, int]]) -> None:
        host.read([ReadItem(KEY, h, 0, block_bytes, gpu.slot(g)) for g, h in pairs])

    def demote_torch(pairs: list[tuple[int, int]]) -> None:
        for g, h in pairs:
            host_slots[h].copy_(gpu_slots[g])

    def promote_torch(pairs: list[tuple[int, int]]) -> None:
        for g, h in pairs:
            gpu_slots[g].copy_(host_slots[h])

    return [("gpu -> host", demote, demote_torch), ("host -> gpu", promote, promote_torch)]


def measure(
    name: str,
    ours: Move,
    theirs: Move,
    options: argparse.Namespace,
    gpu: GpuTier,
    host: HostTier,
    scattered: bool,
) -> None:
    """Interleave the two, and print one line."""
    seconds: dict[Move, list[float]] = {ours: [], theirs: []}
    source = random.Random(0)
    for round_ in range(options.rounds):
        for move in (ours, theirs) if round_ % 2 else (theirs, ours):
            pairs = pick(source, options.blocks, gpu.traits.slots, host.traits.slots, scattered)
            began = time.perf_counter()
            move(pairs)
            seconds[move].append(time.perf_counter() - began)
    giga = options.blocks * options.block_bytes / 1e9
    kvtier_gbs, torch_gbs = (giga / statistics.median(seconds[move]) for move in (ours, theirs))
    kind = "scattered" if scattered else "runs"
    print(f"{name}, {kind:9}  kvtier {kvtier_gbs:6.2f}  torch {torch_gbs:6.2f}  ratio {kvtier_gbs / torch_gbs:.2f}")


def pick(source: random.Random, blocks: int, gpu_slots: int, host_slots: int, scattered: bool) -> list[tuple[int, int]]:
    if scattered:
        return list(
            zip(source.sample(range(1, gpu_slots), blocks), source.sample(range(host_slots), blocks), strict=True)
        )
    gpu_first, host_first = source.randrange(1, gpu_slots - blocks + 1), source.randrange(host_slots - blocks + 1)
    return [(gpu_first + at, host_first + at) for at in range(blocks)]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
