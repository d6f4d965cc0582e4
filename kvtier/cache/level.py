"""One tier as the deciding code sees it: its slots or its room, its order, and how it is doing.

Owns a `SlotPool` (memory tiers) and a policy; holds no bytes. Units: slots, bytes, seconds of the engine's clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.allocator.slot_pool import SlotPool
from kvtier.allocator.vmm import Geometry
from kvtier.blocks.coding import UNCODED, Codings
from kvtier.errors import Asleep, DeviceLost
from kvtier.policies.base import Policy
from kvtier.policies.gate import Gate
from kvtier.policies.wear import Written


@dataclass(frozen=True, slots=True)
class Room:
    """What a persistent tier tells about its space; all answer from memory."""

    blocks: Callable[[int], int]  # bytes of a block -> how many more would fit
    extent: Callable[[int], int]  # place -> extent: emptied as a whole, it serves any size
    used_bytes: Callable[[], int]
    excess_bytes: Callable[[], int]  # to be given back: the disk has less free than it should, or the capacity shrank
    capacities: Callable[[], tuple[int, int]] | None = (
        None  # what it may take, and of that for payload, if that changes
    )
    stride_bytes_at: Callable[[int], int] | None = None  # place -> what its block takes; None: as its length says
    written: Callable[[], Written] | None = None  # since it was opened; None: it keeps no account


@dataclass(slots=True)
class Level:
    """A tier's bookkeeping. Exactly one of `pool` (memory) and `room` (persistent) is there."""

    name: str
    policy: Policy
    policy_name: str
    policy_blocks: int
    batch_bytes: int
    capacity_bytes: int
    stride_bytes: int
    pool: SlotPool | None = None
    room: Room | None = None
    codings: Codings = UNCODED
    host_addressable: bool = True
    reads_below: bool = False  # its readers read what lies in the tier below where it is
    low_watermark: float = 0.1
    high_watermark: float = 0.2
    demoting: bool = False  # between low and high watermark: hysteresis
    blocked_until_s: float = 0.0  # no writes before, after a failure
    geometry: Geometry | None = None  # of a memory tier whose memory comes and goes
    granules: set[int] = field(default_factory=set)  # that have memory now
    asleep: bool = False  # its memory is with the machine, or goes there: it gives no slot
    lost: bool = False  # its device is gone: it gives no slot any more
    failures: int = 0  # in a row
    setbacks: int = 0  # stores that failed or found no room, ever
    refused: bool = False  # nothing fits and nothing may leave; until a store succeeds again
    scrub_bytes_per_s: int = 0  # how fast stored blocks are checked when nobody asked for them; 0: they are not
    starved_until_s: float = 0.0  # a write was just refused for room: evict before the next
    gate: Gate | None = None  # who is copied down into it; None: everybody

    def expect_device(self) -> None:
        """Raises DeviceLost when it has no slots any more."""
        if self.lost:
            raise self.device_lost()

    def expect_awake(self) -> None:
        """Raises Asleep when its memory is with the machine, or goes there; DeviceLost when its device is gone."""
        self.expect_device()
        if self.asleep:
            raise Asleep(f"tier {self.name} sleeps and has no slots: wake the cache first")

    def device_lost(self) -> DeviceLost:
        """What those hear who want something of it once its device is gone."""
        return DeviceLost(f"the device of tier {self.name} is lost: open the cache anew; what lies below is kept")

    @property
    def persistent(self) -> bool:
        return self.pool is None

    @property
    def slots(self) -> SlotPool:
        """The pool of a memory tier."""
        assert self.pool is not None, f"tier {self.name} has no slots"
        return self.pool

    @property
    def slots_usable(self) -> int:
        """Slots that may hold a block: all but the null slot."""
        return self.capacity_bytes // self.stride_bytes

    @property
    def sizes_vary(self) -> bool:
        """Whether it shows only when a block is written what it takes."""
        return self.codings.codec == "exp4"

    def size_class(self, length_bytes: int) -> int:
        """The bytes that a block of a length, as attention reads it, is expected to take here."""
        return self.codings.slot_bytes(length_bytes)

    def size_class_at(self, place: int, length_bytes: int) -> int:
        """What the copy at a place does take: a tier may have coded it better or worse than expected, or not at all."""
        if self.room is None or self.room.stride_bytes_at is None:
            return self.size_class(length_bytes)
        return self.room.stride_bytes_at(place)

    @property
    def blocks_max(self) -> int:
        """About how many blocks it holds when it is full."""
        return self.slots_usable if self.pool is not None else self.policy_blocks

    def batch_blocks(self, length_bytes: int) -> int:
        """How many blocks of a length make a batch that is worth its overhead."""
        return max(1, self.batch_bytes // max(1, length_bytes))
