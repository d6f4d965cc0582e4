"""HostPlaces: where blocks lie in slots of host memory that a device copies from and to.

A slot may hold several blocks side by side, its *parts*: vLLM's chunks are such slots, each rank with parts of its own.
Place p is part p % parts of slot p // parts. The memory is the caller's, and must stay as long as copies use it.
Units: bytes, slots, places; addresses as integers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Addresses
from kvtier.errors import UsageError
from kvtier.tiers.base import SupportsSlots, Tier
from kvtier.tiers.slots import address_of

Numbers = NDArray[np.int64]


class SlotTier(Tier, SupportsSlots, Protocol):
    """A tier with slots in host memory."""


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """`slots` slots from `address` on. In each, parts of `part_bytes` bytes start at `offset_bytes`.

    Bytes of a part beyond its block are zeroed after a store: they are ours. seen_at: where the device sees `address`,
    once the memory is registered.
    """

    address: int
    stride_bytes: int
    slots: int
    offset_bytes: int
    part_bytes: int
    parts: int = 1
    seen_at: int | None = None

    def __post_init__(self) -> None:
        need_bytes = self.offset_bytes + self.parts * self.part_bytes
        if self.parts < 1 or self.offset_bytes < 0 or not 0 < need_bytes <= self.stride_bytes:
            raise UsageError(
                f"{self.parts} parts of {self.part_bytes} bytes from byte {self.offset_bytes} on, in slots of "
                f"{self.stride_bytes}"
            )

    @classmethod
    def of_tier(cls, tier: SlotTier) -> "HostPlaces":
        """All slots of a memory tier, a block in each."""
        return cls(address_of(tier.slot(0)), tier.stride_bytes, tier.traits.slots, 0, tier.stride_bytes)

    @property
    def count(self) -> int:
        """How many places there are."""
        return self.slots * self.parts

    @property
    def length_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.stride_bytes

    def expect_room(self, block_bytes: int) -> None:
        """Raises UsageError if such blocks do not fit."""
        if block_bytes > self.part_bytes:
            raise UsageError(f"blocks of {block_bytes} bytes, and places of {self.part_bytes}")

    def addresses(self, places: Numbers) -> Addresses:
        """The address of each place."""
        slots, parts = np.divmod(places, self.parts)
        offsets = slots * self.stride_bytes + parts * self.part_bytes
        addresses: Addresses = offsets.astype(np.uint64) + np.uint64(self.address + self.offset_bytes)
        return addresses
