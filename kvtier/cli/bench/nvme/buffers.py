"""Memory that blocks of a bench come from and go to: random bytes in page-aligned slots, as in the host tier.

Owns the slots. Units: slots, bytes.
"""

import os
import random
from contextlib import ExitStack

from kvtier.cli.bench.nvme.plan import Shape
from kvtier.tiers.host import HostTier
from kvtier.types import page_aligned

BATCHES = 4  # so many batches of slots


class Buffers:
    """Slots for batches of one shape."""

    def __init__(self, shape: Shape, undo: ExitStack, batches: int = BATCHES) -> None:
        self._blocks = shape.blocks
        self._random = random.Random(0)
        self._tier = HostTier.create(
            name="buffers",
            capacity_bytes=batches * shape.blocks * page_aligned(shape.block_bytes),
            length_bytes_max=shape.block_bytes,
            hugepages="off",
            pin="off",
        )
        undo.callback(self._tier.close)
        for slot in range(self._tier.traits.slots):
            self._tier.slot(slot)[: shape.block_bytes] = os.urandom(shape.block_bytes)

    def views(self, batches: int = 1) -> list[memoryview]:
        """Slots of as many batches, scattered as in a running cache."""
        slots = self._random.sample(range(self._tier.traits.slots), batches * self._blocks)
        return [self._tier.slot(slot) for slot in slots]
