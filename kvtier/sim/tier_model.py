"""A tier as the simulator has it: room for blocks and a speed, no bytes.

Owns: which places a modelled store has given away; the slots of memory are the production pools'. Always: sizes are
those that the real tiers make of the same configuration (strides, the null slot, extents, the index), so that the same
blocks fit; room changes when a batch ends, as it does there.
Units: bytes, seconds, bytes per second; places in pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.allocator.extents import ExtentAllocator
from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.coding import UNCODED, Codings
from kvtier.blocks.spec import BlockSpec
from kvtier.cache.level import Level, Room
from kvtier.config import GpuTierConfig, LmdbTierConfig, TierConfig
from kvtier.engine.gates import gate_of
from kvtier.errors import ConfigError
from kvtier.policies.gate import Gate
from kvtier.policies.wear import Written
from kvtier.sim.guarded import policy_of
from kvtier.tiers import arena_tier, gpu, host
from kvtier.tiers.base import TierTraits
from kvtier.tiers.lmdb import store
from kvtier.tiers.lmdb.budget import split
from kvtier.types import DONE, PAGE_BYTES, BatchDone, Outcome, Status, TransferBatch

OWNER = 1  # who holds a place does not matter here; 0 means nobody


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a tier is. The latency is that of a batch; batches of one direction follow one another."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


# The link of a device (PCIe 4 x16), memory that one thread copies, and one NVMe drive that writes all day.
SPEEDS = {"gpu": Speed(25e9, 25e9, 20e-6), "host": Speed(10e9, 10e9, 20e-6), "lmdb": Speed(3e9, 1.5e9, 200e-6)}


class MemoryModel:
    """A memory tier: every copy succeeds."""

    def __init__(self, name: str, traits: TierTraits, speed: Speed) -> None:
        self.name = name
        self.traits = traits
        self.speed = speed

    def write(self, batch: TransferBatch) -> BatchDone:
        """How a batch ends that this tier takes in."""
        return all_done(batch)


class StoreModel:
    """A store on disk: it chooses places, numbers what it writes, and may be full."""

    def __init__(
        self, name: str, traits: TierTraits, speed: Speed, extents: ExtentAllocator, codings: Codings = UNCODED
    ) -> None:
        self.name = name
        self.traits = traits
        self.speed = speed
        self._extents = extents
        self._codings = codings
        self._written = Written()
        self._generation = 0
        self._generations: dict[int, int] = {}  # place -> generation

    def room(self) -> Room:
        """What the deciding code may ask."""
        return Room(self._left, self._extents.extent_of, self._used_bytes, lambda: 0, written=lambda: self._written)

    def _used_bytes(self) -> int:
        return self._extents.used_pages * PAGE_BYTES

    def _left(self, length_bytes: int) -> int:
        extents, stride_pages = self._extents, self._codings.slot_bytes(length_bytes) // PAGE_BYTES
        unlent = max(0, extents.extents_max - extents.lent_extents)
        return extents.free_slots(stride_pages) + unlent * extents.slots_per_extent(stride_pages)

    def write(self, batch: TransferBatch) -> BatchDone:
        """How a batch ends that this tier takes in: places freed by its evictions are reused by later ones only."""
        written = [self._write(transfer.length_bytes) for transfer in batch.transfers]
        evicted = [self._evict(item.place, item.generation) for item in batch.evict]
        return BatchDone(batch.batch_id, (*written, *evicted, *[DONE] * bool(batch.sidecar)))

    def _write(self, length_bytes: int) -> Outcome:
        extents, stride_pages = self._extents, self._codings.slot_bytes(length_bytes) // PAGE_BYTES
        places = extents.take(stride_pages, 1)
        if not places and extents.lend(stride_pages) is not None:
            places = extents.take(stride_pages, 1)
        if not places:
            return Outcome(Status.NO_ROOM)
        extents.own({places[0]: OWNER})
        payload_bytes, slot_bytes = self._written.payload_bytes + length_bytes, stride_pages * PAGE_BYTES
        self._written = Written(payload_bytes, self._written.slot_bytes + slot_bytes)
        self._generation += 1
        self._generations[places[0]] = self._generation
        return Outcome(Status.DONE, places[0], self._generation)

    def _evict(self, place: int, generation: int) -> Outcome:
        if self._generations.get(place) != generation:
            return Outcome(Status.MISSING)
        del self._generations[place]
        self._extents.give_back([place])
        return DONE


TierModel = MemoryModel | StoreModel


def all_done(batch: TransferBatch) -> BatchDone:
    """Every item went well."""
    return BatchDone(batch.batch_id, (DONE,) * batch.outcomes)


def modelled(
    config: TierConfig,
    specs: Sequence[BlockSpec],
    policy: str | None = None,
    speed: Speed | None = None,
    codings: Codings = UNCODED,
) -> tuple[TierModel, Level]:
    """A tier and the deciding code's view of it, for blocks of these groups.

    policy: instead of the configuration's. codings: the tier's codec; all blocks become as long as it expects.
    Raises ConfigError for a capacity without room for a few blocks, UsageError for a policy that there is not.
    """
    stride_bytes = max(codings.slot_bytes(spec.block_bytes) for spec in specs)
    speed = speed or SPEEDS[config.type]
    model: TierModel
    if isinstance(config, LmdbTierConfig):
        raw_bytes_max = max(spec.block_bytes for spec in specs)
        budget = split(config.capacity_bytes, raw_bytes_max, f"tiers: {config.name}")
        extents = ExtentAllocator(budget.extent_bytes // PAGE_BYTES, budget.extents_max)
        payload_bytes = budget.extents_max * budget.extent_bytes
        traits = TierTraits(payload_bytes, 0, True, False, store.BATCH_BYTES, store.READERS)
        model = StoreModel(config.name, traits, speed, extents, codings)
    else:
        model = MemoryModel(config.name, _memory_traits(config, stride_bytes), speed)
    return model, _level(config, model, specs, stride_bytes, policy or config.policy, codings)


def _memory_traits(config: TierConfig, stride_bytes: int) -> TierTraits:
    on_device = isinstance(config, GpuTierConfig)
    granule_bytes = gpu.granule_for(config.capacity_bytes) if on_device else 1
    slots = config.capacity_bytes // granule_bytes * granule_bytes // stride_bytes
    if slots < host.SLOTS_MIN:
        raise ConfigError(
            f"tiers: {config.name}.capacity",
            f"{config.capacity_bytes} bytes hold {slots} blocks of {stride_bytes} bytes",
            f"Give at least {gpu.capacity_min(stride_bytes)} bytes",
        )
    batch_bytes = arena_tier.BATCH_BYTES if on_device else host.BATCH_BYTES
    return TierTraits((slots - on_device) * stride_bytes, slots, False, True, batch_bytes)


def _level(
    config: TierConfig,
    model: TierModel,
    specs: Sequence[BlockSpec],
    stride_bytes: int,
    policy: str,
    codings: Codings,
) -> Level:
    traits = model.traits
    if isinstance(model, StoreModel):
        stride_bytes = codings.slot_bytes_mean(specs)
    blocks = max(1, traits.capacity_bytes // stride_bytes)
    return Level(
        name=config.name,
        policy=policy_of(policy, blocks),
        policy_name=policy,
        policy_blocks=blocks,
        batch_bytes=traits.batch_bytes,
        capacity_bytes=traits.capacity_bytes,
        stride_bytes=0 if traits.persistent else stride_bytes,
        pool=None if traits.persistent else SlotPool(traits.slots, null_slot=isinstance(config, GpuTierConfig)),
        room=model.room() if isinstance(model, StoreModel) else None,
        codings=codings,
        host_addressable=traits.host_addressable,
        low_watermark=config.low_watermark,
        high_watermark=config.high_watermark,
        gate=_gate(config, blocks),
    )


def _gate(config: TierConfig, blocks: int) -> Gate | None:
    """Raises ConfigError for a budget that asks this machine's file system."""
    wear = config.wear if isinstance(config, LmdbTierConfig) else None
    if wear and wear.dwpd and not wear.drive_bytes:
        problem = "dwpd is of a drive whose size is not given, and a simulation looks at no disk"
        raise ConfigError(f"tiers: {config.name}.wear", problem, "Add `drive: 2TB` or the like")
    return gate_of(config, blocks)
