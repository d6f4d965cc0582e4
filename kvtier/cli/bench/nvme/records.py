"""What a put costs where a great many blocks are kept: CPU, and bytes that the disk writes beside the payload.

Two stores, of many blocks and of few, whose payload is pretended but for the batches that are written over afterwards;
their indexes are real, and so is all that the rounds write. Each batch carries a row of policy log and one of counters
as long as the engine's. Units: blocks, bytes.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.hollow import HollowFile
from kvtier.cli.bench.nvme.plan import MIB, Plan, Shape
from kvtier.cli.bench.nvme.process_io import process_bytes
from kvtier.cli.bench.nvme.store_ring import Kept, expect_done
from kvtier.cli.bench.nvme.volume import Volume
from kvtier.cli.bench.report import OURS, Race
from kvtier.cli.bench.timing import interleave, prepared
from kvtier.errors import KvtierError
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, WriteBatch, WriteItem, block_key, page_aligned, store_key

FEWER = 25  # times as many blocks in the large store
FILL_BATCHES = 32  # so many batches in one while filling
WARM_PUTS = 10  # until the slots that were free at first are used up
CREATED_BYTES = 256 * MIB  # the capacity at first; then as much as the pretended payload takes
LOG_ROW_BYTES = 12  # per block put and evicted: handle, place, and what CBOR adds
COUNTERS_BYTES = 400
FEW = "few blocks"


def measure(volume: Volume, folder: Path, plan: Plan) -> tuple[Race, dict[str, float]]:
    """Race the two stores for CPU; then put as many batches into the large one and ask the disk."""
    shape = plan.small
    with ExitStack() as undo:
        buffers = Buffers(shape, undo)
        few, many = (
            RecordStore(folder / name, plan, blocks, buffers, undo)
            for name, blocks in (("few", plan.records // FEWER), ("many", plan.records))
        )
        timed = interleave({OURS: prepared(many.put), FEW: prepared(few.put)}, plan.rounds)
        put_bytes = plan.rounds * shape.blocks * shape.block_bytes
        settle(folder)
        before = written_bytes(volume)
        for _ in range(plan.rounds):
            many.put()()
        settle(folder)
        given_bytes = written_bytes(volume) - before
    race = Race(f"put among {many.blocks:,}", shape.blocks, shape.block_bytes, timed)
    figures = {
        "cpu_vs_entries": timed[OURS].cpu_median_s / timed[FEW].cpu_median_s,
        "write_amplification": given_bytes / put_bytes,
    }
    return race, figures


class RecordStore:
    """A store of `blocks` blocks, full. Its oldest batches are really there; each put evicts the oldest."""

    def __init__(self, path: Path, plan: Plan, blocks: int, buffers: Buffers, undo: ExitStack) -> None:
        self._shape: Shape = plan.small
        self._buffers = buffers
        self._puts = count()
        self.blocks = 0
        namespaces = NamespaceTable()
        self._namespace = namespaces.id_of(os.urandom(32), b"")
        files: list[HollowFile] = []

        def opened(slab: Path) -> HollowFile:
            files.append(HollowFile.open_hollow(slab))
            return files[-1]

        self._tier = LmdbTier.open(
            path,
            name="lmdb",
            namespaces=namespaces,
            capacity_bytes=CREATED_BYTES,
            length_bytes_max=self._shape.block_bytes,
            min_free_bytes=0,
            durability=plan.durability,
            open_file=opened,
        )
        undo.callback(self._tier.close)
        self._oldest: deque[list[Kept]] = deque()
        self._fill(files[-1], plan, blocks)

    def _fill(self, file: HollowFile, plan: Plan, blocks: int) -> None:
        """The batches that rounds will write over come first, for they are the oldest."""
        real = WARM_PUTS + 2 * plan.rounds + 2
        wanted_bytes = (blocks + (real + FILL_BATCHES) * self._shape.blocks) * page_aligned(self._shape.block_bytes)
        grown = self._tier.change_capacity(CREATED_BYTES + wanted_bytes * 17 // 16)
        if not grown.done:
            raise KvtierError(f"a store for {blocks} blocks cannot be had: {grown.detail}")
        for _ in range(real):
            items = self._items(1)
            outcomes = expect_done(self._tier.write(WriteBatch(items)))
            self._oldest.append([Kept(item.key, outcome) for item, outcome in zip(items, outcomes, strict=True)])
        self.blocks = real * self._shape.blocks
        file.hollow = True
        while self.blocks < blocks:
            self.blocks += len(expect_done(self._tier.write(WriteBatch(self._items(FILL_BATCHES)))))
        file.hollow = False
        for _ in range(WARM_PUTS):
            self.put()()

    def put(self) -> Callable[[], object]:
        """One batch for the oldest one."""
        items = self._items(1)
        leaving = self._oldest.popleft()
        evict = [EvictItem(kept.key, kept.outcome.place, kept.outcome.generation) for kept in leaving]
        rows: dict[bytes, bytes | None] = {
            b"policy/log/%d" % next(self._puts): bytes(LOG_ROW_BYTES * (len(items) + len(evict))),
            b"counters": bytes(COUNTERS_BYTES),
        }
        return lambda: expect_done(self._tier.write(WriteBatch(items, evict, rows)))

    def _items(self, batches: int) -> list[WriteItem]:
        return [
            WriteItem(store_key(self._namespace, block_key(os.urandom(32), 0)), self._shape.block_bytes, view)
            for view in self._buffers.views() * batches
        ]


def written_bytes(volume: Volume) -> int:
    """By the device if nobody else writes to it, else by what the kernel counts for this process."""
    by_device = volume.written_bytes()
    return process_bytes("write_bytes") if by_device is None else by_device


def settle(folder: Path) -> None:
    """Let the filesystem write down what it still holds of its own."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
