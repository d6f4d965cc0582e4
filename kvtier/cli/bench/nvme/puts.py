"""Puts into full contestants: the store, its inline kind, a raw file, and one file per block.

Every contestant is filled first, so that all of them write over what was written before, and give up as many blocks
as they take. Units: blocks, bytes.
"""

from contextlib import ExitStack
from pathlib import Path

from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import Plan, Shape
from kvtier.cli.bench.nvme.rivals import FileRing, RawRing
from kvtier.cli.bench.nvme.store_ring import StoreRing
from kvtier.cli.bench.report import OURS, Race
from kvtier.cli.bench.timing import interleave, prepared, speed_ratio

RAW = "raw, 1 thread"
FILES = "files"
INLINE = "inline"


class Stand:
    """All contestants of one shape, filled. What they keep is there to be read afterwards."""

    def __init__(self, folder: Path, plan: Plan, shape: Shape, undo: ExitStack) -> None:
        batches = plan.ring_batches(shape)
        self.shape = shape
        self.batches = batches
        self.buffers = Buffers(shape, undo)
        self.store = StoreRing(folder / "slab", shape, batches, self.buffers, undo, durability=plan.durability)
        self.inline = StoreRing(
            folder / "inline", shape, batches, self.buffers, undo, durability=plan.durability, payload="inline"
        )
        self.raw = RawRing(folder / "raw", shape, batches, 1, self.buffers, undo)
        self.files = FileRing(folder / "files", shape, batches, self.buffers, undo)
        for ring in (self.store, self.inline, self.raw, self.files):
            ring.fill()

    def race(self, rounds: int) -> Race:
        """One batch into each."""
        contestants = {
            OURS: prepared(self.store.put),
            RAW: prepared(self.raw.put),
            FILES: prepared(self.files.put),
            INLINE: prepared(self.inline.put),
        }
        return Race("put", self.shape.blocks, self.shape.block_bytes, interleave(contestants, rounds))


def ratio(race: Race, rival: str) -> float:
    """Our speed by a rival's."""
    return speed_ratio(race.timed[OURS], race.timed[rival])
