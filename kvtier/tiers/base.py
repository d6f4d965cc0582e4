"""What a tier is: a place that moves batches of blocks and answers for each one.

A tier holds bytes. It does not know order, refs, clean or dirty, and it is never asked where a block is: the
directory says so, and passes the place. All verbs block, are called from worker threads of the executor, and
report per block: half a batch may fail, and that is normal. They raise nothing but `InvariantError`.

Units: bytes. A tier's `index` in the tier list (0 is the fastest) is not known to itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvtier.allocator.vmm import Geometry
from kvtier.blocks.coding import Codings
from kvtier.policies.wear import Written
from kvtier.types import LayerPart, Outcome, ReadItem, Remap, StoredBlock, WriteBatch


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What a tier can do, as data, so that nobody finds out by trying.

    capacity_bytes: payload bytes it may hold. slots: number of slots of a memory tier, 0 for a persistent one.
    persistent: survives the process. host_addressable: its slots can be the buffer of another tier's I/O.
    batch_bytes: how much to move at once to be fast. readers: reads worth running side by side.
    codec: what a memory tier's slots hold, and what a persistent tier makes of a block that comes uncoded.
    """

    capacity_bytes: int
    slots: int
    persistent: bool
    host_addressable: bool
    batch_bytes: int
    readers: int = 1
    codec: str = "none"


class Tier(Protocol):
    """The verbs every tier has. `read` may run on several threads at once, `write` runs on one at a time."""

    name: str

    @property
    def traits(self) -> TierTraits: ...

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy blocks out of this tier into the items' views; one outcome per item, in order.

        Only DONE means that `into` holds the block; otherwise its content is undefined.
        """
        ...

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Keep the items and drop the evictions: one outcome per item, one per eviction, one for a sidecar with rows.

        When it returns, what is DONE is durable as the tier's durability mode promises.
        """
        ...

    def close(self) -> None:
        """Release every resource. Idempotent. No other verb is running."""
        ...


@runtime_checkable
class SupportsSlots(Protocol):
    """A memory tier: slots that exist for good, `traits.slots` of them, addressable as bytes or arrays."""

    stride_bytes: int

    def slot(self, index: int) -> memoryview:
        """The whole slot, writable, page aligned, `stride_bytes` long. Zero-copy."""
        ...


@runtime_checkable
class SupportsArray(Protocol):
    """The top tier: its slots seen as one array, which attention kernels read."""

    def array(self) -> Any:
        """uint8 array [slots, stride_bytes] over the whole reserved range; only mapped slots may be indexed."""
        ...


@runtime_checkable
class SupportsReading(Protocol):
    """A memory tier that kernels of the tier above read in place."""

    def memory(self) -> Any:
        """uint8 array [slots, stride_bytes], zero-copy; index only slots of a lease."""
        ...


@runtime_checkable
class SupportsRemap(Protocol):
    """A memory tier whose memory comes and goes while its addresses stay."""

    @property
    def geometry(self) -> Geometry:
        """How slots lie on granules, for as many slots as the tier may ever have."""
        ...

    @property
    def granules_mapped(self) -> frozenset[int]: ...

    def remap(self, remap: Remap) -> Outcome:
        """Map, unmap and make granules: DONE, or NO_ROOM or FAILED, and then nothing is mapped or unmapped.

        The outcome's place is how many granules are ready. Runs on the writer's thread.
        """
        ...


@runtime_checkable
class SupportsFences(Protocol):
    """A top tier on a device: what callers have given to their streams may still be using a slot."""

    def fence(self, after: Any) -> Any:
        """Marks the work before `after`, an event that the caller has recorded. Never waits. Any thread may call.

        Raises UsageError for what is no event.
        """
        ...

    def passed(self, fence: Any) -> None:
        """Block until that work is over; once for each fence. Raises DeviceLost if the device fails."""
        ...

    def settle(self) -> None:
        """Block until all work is over that anybody in this process has given to the device. Raises DeviceLost."""
        ...


@runtime_checkable
class SupportsStreaming(Protocol):
    """A top tier on a device, whose readers can wait on their own streams for what is still on its way."""

    def write_streamed(
        self, batch: WriteBatch, parts: Sequence[LayerPart], enqueued: Callable[[Any], None]
    ) -> list[Outcome]:
        """As `write`, part by part over all blocks; `enqueued` hears of an `Arrival` once nothing but the loss of the
        device can keep the blocks from coming. It is called once or never, before this returns.
        """
        ...


@runtime_checkable
class SupportsPinning(Protocol):
    """A top tier on a device, which reads host memory directly once that is registered."""

    def reads_host_addresses(self) -> bool:
        """Whether its kernels find registered memory where the CPU does."""
        ...

    def pin(self, address: int, length_bytes: int) -> None:
        """Register memory. Raises DriverError if the device does not take it: it is copied more slowly then."""
        ...

    def unpin(self) -> None:
        """Let go of all of it, before it is unmapped. No copy may be running. Idempotent."""
        ...


@runtime_checkable
class SupportsCoding(Protocol):
    """A top tier on a device that codes and decodes where its slots lie."""

    def code(self, codings: Codings) -> str:
        """From now on take items of this codec besides uncoded ones. Before the first verb. Returns why it cannot."""
        ...


@runtime_checkable
class SupportsScan(Protocol):
    """A persistent tier: knows what it kept, and how much more of a size it would take."""

    def scan(self) -> Iterable[StoredBlock]:
        """Everything kept, oldest write first, each key once (the newest). Called before the first read or write."""
        ...

    def room(self, length_bytes: int) -> int:
        """How many more blocks of this length a write would take now without evicting, and without `excess_bytes`
        coming of it: else blocks would leave and come back for ever. Thread-safe, no I/O."""
        ...

    def excess_bytes(self) -> int:
        """How many bytes the tier must give back to what it shares with others, as of its last batch (an empty one
        asks anew). Only emptied extents give anything; until it is 0 `room` is 0. Thread-safe, no I/O."""
        ...

    def neighbours(self, place: int) -> int:
        """The extent of a place: when all blocks of one extent are evicted, any size fits into it. Pure."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the blocks kept, strides included. Thread-safe, no I/O."""
        ...


@runtime_checkable
class SupportsGroups(Protocol):
    """A persistent tier that commits batches which wait together at the price of one."""

    def write_together(self, batches: Sequence[WriteBatch]) -> list[list[Outcome]]:
        """As `write` of one after the other, for each what that would have returned: what fails for one is not the
        others' failure, unless it may have been. Runs on the writer's thread."""
        ...


@runtime_checkable
class SupportsStrides(Protocol):
    """A persistent tier in which blocks of one length may take different room, as their coded forms do."""

    def stride_bytes_at(self, place: int) -> int:
        """What the block at this place takes, padding included; 0 where there is none. Thread-safe, no I/O."""
        ...


@runtime_checkable
class SupportsMeter(Protocol):
    """A persistent tier that counts what it gives its disk."""

    def written(self) -> Written:
        """Since it was opened, index included. Thread-safe, no I/O."""
        ...


@runtime_checkable
class SupportsSidecar(Protocol):
    """A persistent tier that keeps the rows of `WriteBatch.sidecar`."""

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        """The rows that batches left, in key order."""
        ...


@runtime_checkable
class SupportsScrub(Protocol):
    """A persistent tier whose blocks can be checked where they lie."""

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        """Read blocks for nobody: DONE if a block's bytes match its checksum, else as `read` would say.

        Any thread; waits for the disk.
        """
        ...


@runtime_checkable
class SupportsCapacity(Protocol):
    """A persistent tier whose capacity can change while it is open."""

    @property
    def capacity_bytes(self) -> int:
        """What it may take of its disk now, all included."""
        ...

    def change_capacity(self, capacity_bytes: int) -> Outcome:
        """Take so much from now on: DONE; or nothing changed. Runs on the writer's thread.

        Blocks that a smaller capacity has no room for stay until they are evicted: see `excess_bytes`.
        """
        ...


@runtime_checkable
class SupportsDrop(Protocol):
    """A persistent tier that can forget a namespace at once, however many blocks it has."""

    def drop(self, namespace: int) -> Outcome:
        """Forget every block of the namespace (engine-local id), durably, in one small transaction.

        Runs on the writer's thread. Places are reusable when it returns; the caller has no read in flight.
        """
        ...
