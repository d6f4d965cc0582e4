"""What a store becomes when it has been written over and over: its speed, its CPU, and its size on disk.

Two stores of one capacity are full. One was filled once; the other has since taken five times its capacity, in requests
of uneven length that left in random order, so that its free slots lie all over. Then both take the same batches in
turns. Units: blocks, bytes.
"""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import Plan, Shape
from kvtier.cli.bench.nvme.store_ring import Kept, expect_done
from kvtier.cli.bench.report import OURS, Race
from kvtier.cli.bench.timing import interleave, prepared, speed_ratio
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, WriteBatch, WriteItem, block_key, store_key

YOUNG = "filled once"
REQUEST_SHARE_MIN = 0.25  # the shortest request, of a batch
SECTOR_BYTES = 512  # the unit of st_blocks


def measure(folder: Path, plan: Plan) -> tuple[Race, dict[str, float]]:
    """Race the two, and size the old one."""
    shape = plan.small
    with ExitStack() as undo:
        buffers = Buffers(shape, undo)
        young, old = (FullStore(folder / name, plan, buffers, undo) for name in ("young", "old"))
        largest_bytes = old.churn(plan.churn_turns * plan.churn_bytes)
        timed = interleave({OURS: prepared(old.put), YOUNG: prepared(young.put)}, plan.rounds)
        largest_bytes = max(largest_bytes, old.disk_bytes())
    race = Race(f"put after {plan.churn_turns}x churn", shape.blocks, shape.block_bytes, timed)
    figures = {
        "churn_cpu_ratio": timed[OURS].cpu_median_s / timed[YOUNG].cpu_median_s,
        "churn_throughput_ratio": speed_ratio(timed[OURS], timed[YOUNG]),
        "disk_vs_cap": largest_bytes / plan.churn_bytes,
    }
    return race, figures


class FullStore:
    """A store at its capacity: each put evicts as many blocks as it brings, request by request."""

    def __init__(self, path: Path, plan: Plan, buffers: Buffers, undo: ExitStack) -> None:
        self._path = path
        self._shape: Shape = plan.small
        self._buffers = buffers
        self._random = random.Random(0)
        namespaces = NamespaceTable()
        self._namespace = namespaces.id_of(os.urandom(32), b"")
        self._tier = LmdbTier.open(
            path,
            name="lmdb",
            namespaces=namespaces,
            capacity_bytes=plan.churn_bytes,
            length_bytes_max=self._shape.block_bytes,
            min_free_bytes=0,
            durability=plan.durability,
        )
        undo.callback(self._tier.close)
        self._requests: list[list[Kept]] = []  # in the order in which they will leave
        while self._lacking(self._shape.blocks) <= 0:
            self.put()()

    def churn(self, payload_bytes: int) -> int:
        """Write so much, requests of uneven length in place of random ones; returns the folder's largest size."""
        largest_bytes = written_bytes = 0
        while written_bytes < payload_bytes:
            blocks = max(1, int(self._shape.blocks * self._random.uniform(REQUEST_SHARE_MIN, 1)))
            self._random.shuffle(self._requests)
            self._put(blocks)()
            written_bytes += blocks * self._shape.block_bytes
            largest_bytes = max(largest_bytes, self.disk_bytes())
        return largest_bytes

    def put(self) -> Callable[[], object]:
        return self._put(self._shape.blocks)

    def disk_bytes(self) -> int:
        """What the folder takes of the disk."""
        return sum(entry.lstat().st_blocks for entry in (self._path, *self._path.rglob("*"))) * SECTOR_BYTES

    def _put(self, blocks: int) -> Callable[[], object]:
        length = self._shape.block_bytes
        keys = [store_key(self._namespace, block_key(os.urandom(32), 0)) for _ in range(blocks)]
        views = self._buffers.views()[:blocks]
        items = [WriteItem(key, length, view) for key, view in zip(keys, views, strict=True)]
        evict = [EvictItem(kept.key, kept.outcome.place, kept.outcome.generation) for kept in self._leaving(blocks)]

        def move() -> None:
            outcomes = expect_done(self._tier.write(WriteBatch(items, evict)))
            self._requests.append([Kept(*pair) for pair in zip(keys, outcomes, strict=False)])

        return move

    def _leaving(self, blocks: int) -> list[Kept]:
        lacking = self._lacking(blocks)
        leaving: list[Kept] = []
        while len(leaving) < lacking:
            request = self._requests.pop(0)
            taken = lacking - len(leaving)
            leaving += request[-taken:]  # a request's tail leaves first
            if len(request) > taken:
                self._requests.insert(0, request[:-taken])
        return leaving

    def _lacking(self, blocks: int) -> int:
        """How many must leave when so many come. Two batches stay free: what a batch evicts it cannot use itself."""
        return blocks + 2 * self._shape.blocks - self._tier.room(self._shape.block_bytes)
