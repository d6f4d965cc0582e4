"""Builds small polled engines for the tests of cache/ and engine/: tiny blocks whose content follows from their key."""

import hashlib
from collections.abc import Sequence

from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.cache.leases import Lease
from kvtier.cache.level import Level, Room
from kvtier.policies import POLICIES
from kvtier.policies.gate import Gate
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.polled import PolledEngine
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.host import HostTier
from kvtier.types import PAGE_BYTES, BlockKey, GroupSpec, ModelSpec

BLOCK_TOKENS = 4
BLOCK_BYTES = 2048  # 2 layers x K and V x 4 tokens x 2 heads x 16 x 4 bytes


def tiny_model(name: str = "tiny", groups: int = 1, heads: int = 2) -> ModelSpec:
    """Blocks of 2 KiB and slots of one page."""
    rows = tuple(GroupSpec("full", (0, 1), heads, 16, "float32", BLOCK_TOKENS) for _ in range(groups))
    return ModelSpec(name, "v1", rows)


def content_of(key: BlockKey, length_bytes: int) -> bytes:
    """What a block with this key holds: every key has its own bytes."""
    seed = hashlib.blake2b(key).digest()
    return (seed * (length_bytes // len(seed) + 1))[:length_bytes]


def make_engine(
    gpu: int = 8,
    host: int | None = 16,
    disk: DictTier | None = None,
    model: ModelSpec | None = None,
    watermarks: tuple[float, float] = (0.25, 0.5),
    policies: Sequence[str] = ("lru", "lru", "lru"),
    gpu_max: int = 0,
    device: bool = False,
    in_place: bool = False,
    scrub_bytes_per_s: int = 0,
    gate: Gate | None = None,
) -> PolledEngine:
    """An engine with `gpu` usable slots, `host` slots (None: no such tier) and a disk tier if one is given.

    A slot of the gpu tier is a granule; it may grow to `gpu_max` usable ones. device: the core takes it for one on a
    device, which no disk reads into, and which has streams. in_place: host memory is read where it is.
    gate: of the lowest tier.
    """
    model = model or tiny_model()
    low, high = watermarks
    tiers: list = [
        GpuTier.create(
            name="gpu",
            capacity_bytes=(gpu + 1) * PAGE_BYTES,
            capacity_max_bytes=(gpu_max + 1) * PAGE_BYTES,
            length_bytes_max=BLOCK_BYTES,
        )
    ]
    if host is not None:
        tiers.append(
            HostTier.create(
                name="host", capacity_bytes=host * PAGE_BYTES, length_bytes_max=BLOCK_BYTES, pin="off", hugepages="off"
            )
        )
    if disk is not None:
        tiers.append(disk)
    levels = []
    for index, tier in enumerate(tiers):
        disk_tier = tier if isinstance(tier, DictTier) else None
        blocks = disk_tier.blocks_max if disk_tier else tier.traits.capacity_bytes // PAGE_BYTES
        levels.append(
            Level(
                name=tier.name,
                policy=POLICIES.get(policies[index])(blocks),
                policy_name=policies[index],
                policy_blocks=blocks,
                batch_bytes=4 * PAGE_BYTES,
                capacity_bytes=disk_tier.blocks_max * PAGE_BYTES if disk_tier else tier.traits.capacity_bytes,
                stride_bytes=0 if disk_tier else tier.stride_bytes,
                pool=None if disk_tier else SlotPool(tier.traits.slots, null_slot=index == 0),
                room=Room(disk_tier.room, disk_tier.neighbours, disk_tier.used_bytes, disk_tier.excess_bytes)
                if disk_tier
                else None,
                low_watermark=low,
                high_watermark=high,
                host_addressable=not (device and index == 0),
                reads_below=in_place and index == 0,
                scrub_bytes_per_s=scrub_bytes_per_s if disk_tier else 0,
                geometry=tier.geometry if index == 0 else None,
                granules=set(tier.granules_mapped) if index == 0 else set(),
            )
        )
    levels[-1].gate = gate
    levels[0].slots.withdraw(range(gpu + 1, tiers[0].geometry.slots))
    engine = PolledEngine(model, tiers, levels)
    assert engine.core.residency.levels[0].slots.slots_free == gpu
    return engine


def prompt(number: int, blocks: int, model: ModelSpec | None = None) -> Keys:
    """The keys of a prompt of its own."""
    tokens = [number * 1000 + i for i in range(blocks * BLOCK_TOKENS)]
    return hash_blocks(tokens, model or tiny_model())


def check_prefix(engine: PolledEngine, lease: Lease, keys: Keys) -> None:
    """Assert that every restored block of a lease holds exactly its key's bytes."""
    for group, row in enumerate(keys.groups):
        for slot, key in list(zip(lease.slots(group), row, strict=False))[: lease.tokens_ready // BLOCK_TOKENS]:
            assert bytes(engine.tiers[0].slot(slot)[:BLOCK_BYTES]) == content_of(key, BLOCK_BYTES), (slot, key)


def fill(engine: PolledEngine, lease: Lease, keys: Keys) -> None:
    """Compute what is not restored: write every block's bytes into its slot and commit it."""
    for group, row in enumerate(keys.groups):
        ready = lease.tokens_ready // BLOCK_TOKENS
        pairs = list(zip(lease.slots(group), row, strict=False))[ready:]
        for slot, key in pairs:
            engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
        engine.core.commit(lease, pairs)


def serve(engine: PolledEngine, keys: Keys, keep: bool = False) -> Lease:
    """One request from lookup to release: check what is restored, compute the rest."""
    match = engine.match(keys)
    lease = engine.reserve(match, len(keys.groups[0]))
    assert isinstance(lease, Lease), lease
    check_prefix(engine, lease, keys)
    fill(engine, lease, keys)
    if not keep:
        engine.release(lease)
    return lease


def tiers_of(engine, keys):
    """Where the fastest copies of a prefix lie."""
    return engine.core.peek(keys).tiers


def fill_and_push_down(disk=None, blocks=4):
    """A prompt that lies on disk only, and the engine it does so in."""
    disk = disk or DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk)
    keys = prompt(1, blocks)
    serve(engine, keys)
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=8, host=16, disk=disk)
    assert tiers_of(fresh, keys) == {"gpu": 0, "host": 0, "lmdb": blocks * BLOCK_TOKENS}
    return fresh, keys
