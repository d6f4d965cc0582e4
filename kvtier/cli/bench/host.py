"""How fast blocks move between the gpu tier (on host memory) and the host tier, against a plain copy of the same bytes.

The rival is torch's `copy_` on one thread where torch is installed, else C's memmove; it copies between the same
slots. Slots are scattered at random, fresh ones every call, or consecutive ("runs").
Owns the two tiers while it measures. Units: slots, bytes.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from kvtier.allocator import host_memory
from kvtier.cli.bench.report import OURS, Race, Report
from kvtier.cli.bench.timing import Contestant, interleave, prepared
from kvtier.errors import UsageError
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.host import HostTier
from kvtier.types import ReadItem, StoreKey, WriteBatch, WriteItem, page_aligned

KEY = StoreKey(b"benchmark")
POOL_BATCHES = 12  # so many batches of slots in each tier, to leave the processor's caches behind
TARGET = 0.8

Pairs = Sequence[tuple[int, int]]  # (gpu slot, host slot)
Move = Callable[[Pairs], object]


def measure(block_bytes: int, blocks: int, rounds: int, *, with_torch: bool = True) -> Report:
    """Race both directions, scattered and in runs; against C's memmove if not `with_torch`.

    Raises UsageError if the memory for it cannot be had."""
    report = Report("host", {"block_bytes": block_bytes, "blocks": blocks, "rounds": rounds})
    capacity_bytes = page_aligned(block_bytes) * blocks * POOL_BATCHES * 65 // 64
    available_bytes = host_memory.available_bytes()
    if 2 * capacity_bytes > available_bytes:
        raise UsageError(
            f"--blocks {blocks} of --block-bytes {block_bytes}: two tiers of {POOL_BATCHES} such batches take "
            f"{2 * capacity_bytes} bytes of RAM, and {available_bytes} are available; use less"
        )
    sizes: dict[str, Any] = {"capacity_bytes": capacity_bytes, "length_bytes_max": block_bytes}
    with ExitStack() as undo:
        gpu = GpuTier.create(name="gpu", **sizes)
        undo.callback(gpu.close)
        host = HostTier.create(name="host", hugepages="off", pin="off", **sizes)
        undo.callback(host.close)
        gpu.array()[1:] = 3
        rival, moves = _moves(gpu, host, block_bytes, with_torch and find_spec("torch") is not None)
        for scattered in (True, False):
            for direction, (ours, theirs) in moves.items():
                source = random.Random(0)

                def pick(source: random.Random = source, scattered: bool = scattered) -> Pairs:
                    return _pick(source, blocks, gpu.traits.slots, host.traits.slots, scattered)

                contestants = {OURS: _moving(ours, pick), rival: _moving(theirs, pick)}
                what = f"{direction}, {'scattered' if scattered else 'runs'}"
                report.races.append(Race(what, blocks, block_bytes, interleave(contestants, rounds), TARGET))
    if with_torch and rival == "memmove":
        report.notes.append("torch is not installed: compared with C's memmove instead of its copy_")
    return report


def _moving(move: Move, pick: Callable[[], Pairs]) -> Contestant:
    def prepare() -> Callable[[], object]:
        pairs = pick()
        return lambda: move(pairs)

    return prepared(prepare)


def _moves(
    gpu: GpuTier, host: HostTier, block_bytes: int, with_torch: bool
) -> tuple[str, dict[str, tuple[Move, Move]]]:
    """The rival's name, and by direction our move and its."""

    def demote(pairs: Pairs) -> None:
        host.write(WriteBatch([WriteItem(KEY, block_bytes, gpu.slot(g), h) for g, h in pairs]))

    def promote(pairs: Pairs) -> None:
        host.read([ReadItem(KEY, h, 0, block_bytes, gpu.slot(g)) for g, h in pairs])

    rival, down, up = _torch(gpu, host, block_bytes) if with_torch else _memmove(gpu, host, block_bytes)
    return rival, {"gpu -> host": (demote, down), "host -> gpu": (promote, up)}


def _torch(gpu: GpuTier, host: HostTier, block_bytes: int) -> tuple[str, Move, Move]:
    import torch

    torch.set_num_threads(1)
    gpu_slots = torch.from_numpy(gpu.array())[:, :block_bytes]
    host_slots = [torch.frombuffer(host.slot(i), dtype=torch.uint8)[:block_bytes] for i in range(host.traits.slots)]

    def down(pairs: Pairs) -> None:
        for g, h in pairs:
            host_slots[h].copy_(gpu_slots[g])

    def up(pairs: Pairs) -> None:
        for g, h in pairs:
            gpu_slots[g].copy_(host_slots[h])

    return "torch copy_", down, up


def _memmove(gpu: GpuTier, host: HostTier, block_bytes: int) -> tuple[str, Move, Move]:
    gpu_base, host_base = gpu.array().ctypes.data, ctypes.addressof(ctypes.c_char.from_buffer(host.slot(0)))

    def down(pairs: Pairs) -> None:
        for g, h in pairs:
            ctypes.memmove(host_base + h * host.stride_bytes, gpu_base + g * gpu.stride_bytes, block_bytes)

    def up(pairs: Pairs) -> None:
        for g, h in pairs:
            ctypes.memmove(gpu_base + g * gpu.stride_bytes, host_base + h * host.stride_bytes, block_bytes)

    return "memmove", down, up


def _pick(source: random.Random, blocks: int, gpu_slots: int, host_slots: int, scattered: bool) -> Pairs:
    """Slot 0 of the gpu tier is the null block."""
    if scattered:
        pairs = zip(source.sample(range(1, gpu_slots), blocks), source.sample(range(host_slots), blocks), strict=True)
        return list(pairs)
    gpu_first, host_first = source.randrange(1, gpu_slots - blocks + 1), source.randrange(host_slots - blocks + 1)
    return [(gpu_first + at, host_first + at) for at in range(blocks)]
