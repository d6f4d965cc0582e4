"""Part `copies`: GB/s between pinned host memory and scattered slots, by block size and method, beside the link's peak.

Owns no state. Finds: bytes that do not survive the way down and up through poisoned destinations, by any method.
    batch    one `Streams.copy`, which is what the tier does      loop     one asynchronous copy per block
    kernel   gather and scatter kernels that read and write pinned memory themselves
Blocks of foreign caches, which lie there in fragments, are measured by `fragments`.
The peak is the best single copy of `copy_bytes` in this run. Times are the device's, from an idle stream's first order
to its last; methods take turns, and figures are medians. Units: GB/s (10**9 bytes), microseconds.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Addresses
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch import DeviceFragments, DevicePool, fragment_records
from kvtier.testing.gpu_check.card import Bytes, Card, Desk
from kvtier.testing.gpu_check.fragments import measure_fragments
from kvtier.testing.gpu_check.record import Record

MIB = 1 << 20
ON_DEVICE, ON_HOST = 0xA5, 0x5A  # poisons
SUBMIT_ROUNDS = 30
AIMED_BYTES = 64 << 10
UP, DOWN = "up", "down"
METHODS = ("batch", "loop", "kernel")


def measure(card: Card, record: Record) -> None:
    with ExitStack() as lent:
        host = lent.enter_context(card.pinned(card.scale.copy_bytes))
        device = lent.enter_context(card.memory(card.scale.copy_bytes))
        desk_bytes = 16 * card.scale.copy_pieces + MIB
        desk = lent.enter_context(card.memory(desk_bytes))
        host[:] = np.random.default_rng(0).integers(0, 256, len(host), np.uint8)
        peak = {way: max(_peak(card, host, device, way) for _ in range(card.scale.rounds + 1)) for way in (UP, DOWN)}
        speeds: dict[int, dict[str, float]] = {}
        for block_bytes in card.scale.block_bytes:
            blocks = Blocks(card, host, device, Desk(card, desk, desk_bytes), block_bytes)
            _round_trips(blocks, record)
            speeds[block_bytes] = _speeds(blocks, record)
        peak = {way: max(peak[way], _peak(card, host, device, way)) for way in (UP, DOWN)}
        for way in (UP, DOWN):
            record.measured(f"peak, {way}", peak[way], "GB/s")
        _submit(Blocks(card, host, device, Desk(card, desk, desk_bytes), AIMED_BYTES), record)
    measure_fragments(card, record)
    if not card.streams.has_batches:
        record.notes.append("this driver has no cuMemcpyBatchAsync (CUDA 12.8): `batch` is a loop inside kvtier")
    shares = {size: min(speed / peak[way] for way, speed in both.items()) for size, both in speeds.items()}
    for block_bytes, share in shares.items():
        record.measured(f"{block_bytes >> 10} KiB, batch, slower way, by the peak", share, "x")
    if max(shares) >= MIB:
        record.aims["copies_large"] = min(share for size, share in shares.items() if size >= MIB)
    if AIMED_BYTES in shares:
        record.aims["copies_64KiB"] = shares[AIMED_BYTES]


class Blocks:
    """Blocks in order on the host, and scattered in slots on the device."""

    def __init__(self, card: Card, host: Bytes, device: int, desk: Desk, block_bytes: int) -> None:
        self.card, self.host, self.device, self.block_bytes = card, host, device, block_bytes
        slots = len(host) // block_bytes
        self.count = min(slots, card.scale.copy_pieces)
        scattered = np.random.default_rng(1).permutation(slots)[: self.count]
        self.above: Addresses = device + scattered.astype(np.uint64) * np.uint64(block_bytes)
        self.below: Addresses = host.ctypes.data + np.arange(self.count, dtype=np.uint64) * np.uint64(block_bytes)
        self._lengths = np.full(self.count, block_bytes, np.uint64)
        seen_from_there = int(card.calls("cuMemHostGetDevicePointer", host.ctypes.data, 0))
        records = desk.put(fragment_records([seen_from_there], [block_bytes], [0]))
        self._fragments = DeviceFragments(records, 1, block_bytes, block_bytes)
        self._slots = desk.put(scattered.astype(np.int32))
        self._numbers = desk.put(np.arange(self.count, dtype=np.int32))

    def move(self, method: str, way: str) -> None:
        """Give all blocks to the card's stream."""
        getattr(self, f"_{method}")(way)

    def _batch(self, way: str) -> None:
        self.card.streams.copy(*self._ends(way), self._lengths, self.card.stream)

    def _loop(self, way: str) -> None:
        targets, sources = self._ends(way)
        calls, key, length = self.card.calls, self.card.stream.key, self.block_bytes
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            calls("cuMemcpyAsync", target, source, length, key)

    def _kernel(self, way: str) -> None:
        pool = DevicePool(self.device, self.block_bytes)
        move = (
            launch_blocks.gather(pool, self._slots, self._fragments, self._numbers, self.count)
            if way == UP
            else launch_blocks.scatter(pool, self._slots, self._fragments, self._numbers, self.count)
        )
        self.card.launcher.launch(move, self.card.stream.key)

    def _ends(self, way: str) -> tuple[Addresses, Addresses]:
        return (self.above, self.below) if way == UP else (self.below, self.above)

    @property
    def in_use(self) -> Bytes:
        """The blocks on the host."""
        return self.host[: self.count * self.block_bytes]


def _peak(card: Card, host: Bytes, device: int, way: str) -> float:
    ends = (device, host.ctypes.data) if way == UP else (host.ctypes.data, device)
    took_ms = card.milliseconds(lambda: card.calls("cuMemcpyAsync", *ends, len(host), card.stream.key))
    return len(host) / took_ms / 1e6


def _round_trips(blocks: Blocks, record: Record) -> None:
    card, wanted = blocks.card, blocks.in_use.copy()
    for method in METHODS:
        card.fill(blocks.device, ON_DEVICE, len(blocks.host))
        blocks.move(method, UP)
        card.streams.finish(card.stream)
        blocks.in_use[:] = ON_HOST
        blocks.move(method, DOWN)
        card.streams.finish(card.stream)
        exact = np.array_equal(blocks.in_use, wanted)
        record.expect(exact, f"{method}, blocks of {blocks.block_bytes} bytes: other bytes came back")
        blocks.in_use[:] = wanted


def _speeds(blocks: Blocks, record: Record) -> dict[str, float]:
    """Measure and keep all methods both ways; returns those of `batch`, by way."""
    of_batch = {}
    card = blocks.card
    turns = [(method, way) for method in METHODS for way in (UP, DOWN)]
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for _ in range(card.scale.rounds):
        for turn in turns:
            times[turn].append(card.milliseconds(_moving(blocks, *turn)))
    for (method, way), took_ms in times.items():
        speed = blocks.count * blocks.block_bytes / statistics.median(took_ms) / 1e6
        record.measured(f"{blocks.block_bytes >> 10} KiB x {blocks.count}, {method}, {way}", speed, "GB/s")
        if method == "batch":
            of_batch[way] = speed
    return of_batch


def _moving(blocks: Blocks, method: str, way: str) -> Callable[[], None]:
    return lambda: blocks.move(method, way)


def _submit(blocks: Blocks, record: Record) -> None:
    """How long the calling thread is busy with a batch, the stream being idle."""
    card = blocks.card
    count = min(card.scale.submit_pieces, blocks.count)
    lengths: NDArray[np.uint64] = np.full(count, blocks.block_bytes, np.uint64)
    worst = 0.0
    for way, (targets, sources) in {UP: (blocks.above, blocks.below), DOWN: (blocks.below, blocks.above)}.items():
        times = []
        for _ in range(SUBMIT_ROUNDS):
            start = time.perf_counter()
            card.streams.copy(targets[:count], sources[:count], lengths, card.stream)
            times.append((time.perf_counter() - start) * 1e6)
            card.streams.finish(card.stream)
        worst = max(worst, statistics.median(times))
        record.measured(f"submitting {count} blocks of 64 KiB, {way}", statistics.median(times), "us")
    if count == 1024:
        record.aims["submit_1024"] = worst
    else:
        record.notes.append(f"batches of {count} blocks were submitted, not of 1024")
