"""CudaTier: the top tier in the memory of a CUDA device, on a range of virtual addresses whose pages come and go.

Owns: the driver's hold on the device, the arena, and streams of its own for copies and for fences. Always: a slot's
bytes are used only by who holds it, and by us only when the fence behind the caller's last work has passed.
Units:   slots (index), bytes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.streams import Event
from kvtier.allocator.vmm import Arena
from kvtier.blocks.coding import NONE, Codings
from kvtier.errors import (
    ConfigError,
    DeviceLost,
    DriverError,
    InvariantError,
    KvtierError,
    OutOfMemory,
    UsageError,
)
from kvtier.kernels.launch import DevicePool
from kvtier.tiers.arena_tier import ArenaTier, BlockSlots, expect_slots, expect_whole_granules, map_what_there_is
from kvtier.tiers.arrivals import Arrival
from kvtier.tiers.device_coding import DeviceCoding
from kvtier.tiers.device_copies import DeviceCopies
from kvtier.tiers.fences import Fences
from kvtier.types import DONE, LayerPart, Outcome, ReadItem, Remap, WriteBatch, WriteItem

ALIGNMENT_BYTES = 512  # of a slot: what the widest loads of a warp want


class CudaTier(ArenaTier):
    """An `ArenaTier` with `SupportsFences`, `SupportsStreaming`, `SupportsPinning` and `SupportsCoding`."""

    host_addressable = False

    def __init__(self, name: str, driver: CudaDriver, arena: Arena, notes: tuple[str, ...] = ()) -> None:
        """Takes driver and arena over."""
        streams, stride_bytes = driver.streams, arena.geometry.stride_bytes
        self._usable = BlockSlots(arena)
        self._moves = DeviceCopies(name, streams, arena.address, stride_bytes, self._usable)
        self._fences = Fences(streams)
        self._cuda = driver
        self._pinned: list[int] = []
        self._coding: DeviceCoding | None = None
        super().__init__(name, driver, arena, self._moves, lambda: driver.memory_info().free_bytes, notes)

    @classmethod
    def create(
        cls,
        *,
        name: str,
        device: int,
        capacity_bytes: int,
        length_bytes_max: int,
        capacity_max_bytes: int = 0,
        sequence_views: bool = False,
    ) -> "CudaTier":
        """A tier of as many slots for blocks of up to `length_bytes_max` as the capacity holds, all mapped.

        capacity_max_bytes: how far `remap` may let it grow; at least the capacity. Where the device has less memory
        left the tier is smaller, and says so. sequence_views: slots can be shown one behind the other. Raises
        ConfigError if not even two slots fit, there is no such device, or blocks are not whole granules of the device
        and are to be shown.
        """
        try:
            driver = CudaDriver(device)
        except ConfigError as error:
            raise ConfigError(f"{name}.device", error.problem, error.remedy) from error
        try:
            if sequence_views:
                expect_whole_granules(name, length_bytes_max, driver.granule_bytes)
            stride_bytes = -(-length_bytes_max // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            slots = capacity_bytes // driver.granule_bytes * driver.granule_bytes // stride_bytes
            reserved = max(slots, capacity_max_bytes // driver.granule_bytes * driver.granule_bytes // stride_bytes)
            expect_slots(name, slots, f"{capacity_bytes} bytes", stride_bytes, "Use a larger capacity")
            arena = Arena(driver, stride_bytes=stride_bytes, slots_reserved=reserved)
            notes = map_what_there_is(arena, name, slots, "End what else uses the device, or choose another one")
            tier = cls(name, driver, arena, notes)
            if sequence_views:
                tier.allow_sequences(None)
            return tier
        except ConfigError:
            driver.close()
            raise
        except KvtierError as error:
            driver.close()
            raise ConfigError(f"{name}.capacity", str(error), "Choose a smaller capacity") from error

    def remap(self, remap: Remap) -> Outcome:
        """See `SupportsRemap.remap`."""
        self._cuda.streams.bind_thread()
        return super().remap(remap)

    # ------------------------------------------------------------ codecs

    def code(self, codings: Codings) -> str:
        """See `SupportsCoding.code`."""
        pool = DevicePool(self._arena.address, self.stride_bytes)
        try:
            self._coding = DeviceCoding(self._cuda, pool, codings)
        except (ConfigError, UsageError, DriverError, OutOfMemory) as error:
            return str(error)
        return ""

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """As `ArenaTier.read`; all items of a batch want one codec."""
        if items and items[0].codec != NONE:
            return self._coder(items).read(items)
        return super().read(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """As `ArenaTier.write`; all items of a batch come in one codec."""
        items = batch.items
        if items and items[0].codec != NONE:
            others = len(batch.evict) + bool(batch.sidecar)
            return self._coder(items).write(items) + [DONE] * others
        return super().write(batch)

    def _coder(self, items: Sequence[ReadItem | WriteItem]) -> DeviceCoding:
        self._lifetime.expect()
        if self._coding is None:
            raise InvariantError(f"tier {self.name} was not prepared to code")
        for item in items:
            if item.place not in self._usable:
                raise InvariantError(f"tier {self.name}: slot {item.place} is none that holds blocks")
        self._cuda.streams.bind_thread()
        return self._coding

    def write_streamed(
        self, batch: WriteBatch, parts: Sequence[LayerPart], enqueued: Callable[[Arrival], None]
    ) -> list[Outcome]:
        """See `SupportsStreaming.write_streamed`."""
        return self._moves.write_streamed(batch, parts, enqueued)

    # ------------------------------------------------------------ fences

    def fence(self, after: Any) -> Event:
        """See `SupportsFences.fence`."""
        self._lifetime.expect()
        return self._fences.fence(after)

    def passed(self, fence: Event) -> None:
        """See `SupportsFences.passed`."""
        self._fences.passed(fence)

    def settle(self) -> None:
        """See `SupportsFences.settle`."""
        self._lifetime.expect()
        self._cuda.streams.finish_all()

    # ------------------------------------------------------------ host memory

    def reads_host_addresses(self) -> bool:
        """See `SupportsPinning.reads_host_addresses`."""
        return self._cuda.reads_host_addresses

    def pin(self, address: int, length_bytes: int) -> None:
        """Register host memory that blocks are copied from and to, until `unpin`. Raises DriverError."""
        self._cuda.register(address, length_bytes)
        self._pinned.append(address)

    def unpin(self) -> None:
        """Let all of it go: it may be unmapped from now on. No copy may be running."""
        if not self._pinned:
            return
        with suppress(DeviceLost):  # then it reads nothing any more
            self._cuda.streams.bind_thread()
            while self._pinned:
                self._cuda.unregister(self._pinned.pop())

    def _bind_thread(self) -> None:
        self._cuda.streams.bind_thread()

    def _let_go(self) -> None:
        with suppress(DeviceLost):
            self._cuda.streams.bind_thread()
        for part in (self._coding, self._moves, self._fences):
            with suppress(KvtierError):  # the driver's own close undoes what is left
                if part is not None:
                    part.close()
        self.unpin()  # now that nothing can be copying
