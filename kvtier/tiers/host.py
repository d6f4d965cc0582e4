"""HostTier: blocks in RAM, between the device and the disk.

Owns: one slab, taken at start. Slots are page aligned and can be the buffer of a disk tier's O_DIRECT.
Always:  the padding of a slot is zero; the memory never grows. Which slot holds what, the directory knows.
Units:   slots (index), bytes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.slab import HostSlab
from kvtier.blocks.coding import NONE
from kvtier.errors import ConfigError
from kvtier.tiers.base import TierTraits
from kvtier.tiers.slots import SlotCopies
from kvtier.types import Outcome, ReadItem, WriteBatch, page_aligned

SLOTS_MIN = 2  # one to fill while the other drains
BATCH_BYTES = 16 << 20


class HostTier:
    """A `Tier` with `SupportsSlots` and `SupportsReading`; `notes` says what ``auto`` came to."""

    def __init__(self, slab: HostSlab, codec: str = NONE) -> None:
        """Takes the slab over. codec: what its slots hold."""
        self.name = slab.name
        self.stride_bytes = slab.stride_bytes
        self.notes = slab.notes
        self._codec = codec
        self._slab = slab
        self._copies = SlotCopies(slab.name, lambda: slab.array, range(slab.slots))

    @classmethod
    def create(
        cls,
        *,
        name: str,
        capacity_bytes: int,
        length_bytes_max: int,
        pin: str = "auto",
        hugepages: str = "auto",
        codec: str = NONE,
    ) -> "HostTier":
        """A tier of as many slots for blocks of up to `length_bytes_max` as the capacity holds.

        codec: how what comes to it is coded, and `length_bytes_max` counts.
        Raises ConfigError if that is fewer than two, or the memory cannot be had as asked.
        """
        stride_bytes = page_aligned(length_bytes_max)
        slots = capacity_bytes // stride_bytes
        if slots < SLOTS_MIN:
            raise ConfigError(
                f"{name}.capacity",
                f"{capacity_bytes} bytes hold {slots} slots of {stride_bytes}",
                f"Use at least {SLOTS_MIN * stride_bytes}",
            )
        slab = HostSlab(name=name, slots=slots, stride_bytes=stride_bytes, pin=pin, hugepages=hugepages)
        return cls(slab, codec)

    @property
    def traits(self) -> TierTraits:
        return TierTraits(
            capacity_bytes=self._slab.slots * self.stride_bytes,
            slots=self._slab.slots,
            persistent=False,
            host_addressable=True,
            batch_bytes=BATCH_BYTES,
            codec=self._codec,
        )

    @property
    def fd(self) -> int:
        """The memory's descriptor, for other processes."""
        return self._slab.fd

    def memory(self) -> NDArray[np.uint8]:
        """See `SupportsReading.memory`."""
        return self._slab.array

    def slot(self, index: int) -> memoryview:
        """One whole slot, zero-copy. Raises IndexError if there is none such."""
        return self._slab.slot(index)

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy blocks out; raises InvariantError for a place that is no slot."""
        return self._copies.read(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Copy blocks in, each to its place; raises InvariantError for a place that is no slot."""
        return self._copies.write(batch)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._slab.close()
