"""Engines in which a prompt lies where a test wants it, and disks that refuse what a test wants refused.

Everything is the polled engine of `tests/engine_bench.py`: nothing moves before the test says so.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.polled import PolledEngine
from kvtier.types import BlockKey, GroupSpec, ModelSpec, Outcome, Status, TransferBatch, WriteBatch
from tests.engine_bench import BLOCK_BYTES, content_of, make_engine, prompt, serve

TIERS = ("gpu", "host", "lmdb")
OTHERS = 5000  # prompts from here on are other people's


def mixed_model() -> ModelSpec:
    """Two groups whose blocks have equal bytes: of 4 tokens and of 8."""
    fine, coarse = (GroupSpec("full", (i,), 8 // size, 32, "float32", size) for i, size in enumerate((4, 8)))
    return ModelSpec("mixed", "v1", (fine, coarse))


def prefix_in(
    tier: str, blocks: int = 4, gpu: int = 8, host: int | None = 16, disk: DictTier | None = None
) -> tuple[PolledEngine, Keys]:
    """An engine, and the keys of a prompt whose fastest copy lies in `tier`."""
    disk, keys = disk or DictTier(), prompt(1, blocks)
    if tier == "lmdb":
        store_alone(disk, [keys], gpu=max(gpu, blocks))
        return make_engine(gpu=gpu, host=host, disk=disk), keys
    engine = make_engine(gpu=gpu, host=host, disk=disk, watermarks=(0.5, 0.8) if tier == "host" else (0.25, 0.5))
    serve(engine, keys)
    if tier == "host":
        serve(engine, prompt(OTHERS, gpu // 2 - blocks + 1))  # now less than half is free, and the oldest goes down
        engine.run()
        empty_gpu(engine, gpu)
        assert not disk.rows
    assert engine.core.peek(keys).tiers[tier] == keys.tokens
    return engine, keys


def store_alone(disk: DictTier, prompts: Collection[Keys], gpu: int = 8, model: ModelSpec | None = None) -> None:
    """Let an engine that ends afterwards leave these prompts on a disk."""
    writer = make_engine(gpu=gpu, host=None, disk=disk, model=model)
    for keys in prompts:
        writer.release(serve_any(writer, keys))
        writer.core.submit_flush()
        writer.run()
    writer.close()


def empty_gpu(engine: PolledEngine, slots: int) -> None:
    """Make every idle block leave the gpu tier: somebody takes all slots and gives them back unused."""
    lease = engine.reserve_now(engine.match(prompt(OTHERS + 1, slots)), slots)
    assert isinstance(lease, Lease)
    engine.release(lease)


def serve_any(engine: PolledEngine, keys: Keys) -> Lease:
    """One request of any model up to its commit: what is restored is compared, the rest computed. Still leased."""
    lease = engine.reserve(engine.match(keys), len(keys.groups[0]))
    assert isinstance(lease, Lease), lease
    compute_any(engine, lease, keys)
    return lease


def compute_any(engine: PolledEngine, lease: Lease, keys: Keys) -> None:
    """Compare every restored block with its key's bytes, then write and commit the others."""
    for group, (row, size) in enumerate(zip(keys.groups, keys.block_tokens, strict=True)):
        ready = lease.tokens_ready // size
        pairs = list(zip(lease.slots(group), row, strict=False))
        for slot, key in pairs[:ready]:
            assert bytes_in(engine, 0, slot) == content_of(key, BLOCK_BYTES), (group, slot)
        for slot, key in pairs[ready:]:
            engine.tiers[0].slot(slot)[:BLOCK_BYTES] = content_of(key, BLOCK_BYTES)
        engine.core.commit(lease, pairs[ready:])


def bytes_in(engine: PolledEngine, tier: int, slot: int) -> bytes:
    return bytes(engine.tiers[tier].slot(slot)[:BLOCK_BYTES])


def run_but(engine: PolledEngine, kept: Collection[TransferBatch], turns: int = 200) -> None:
    """Plan and finish everything except these batches, until nothing else moves."""
    for _ in range(turns):
        engine.plan()
        free = [batch for batch in engine.held if batch not in kept]
        if not free:
            return
        engine.finish(free[0])
    raise AssertionError("still moving")


def at_rest(engine: PolledEngine, seconds: float = 60.0) -> dict:
    """Let time pass until nothing is owed any more; returns the numbers of then."""
    for _ in range(3):
        engine.clock.advance(seconds)
        engine.run()
    engine.check()
    return engine.core.stats()


def refuse(disk: DictTier, keys: Collection[BlockKey], status: Status) -> Callable[[], None]:
    """The disk stores everything but these blocks. Returns how to mend it."""
    write = disk.write

    def refusing(batch: WriteBatch) -> list[Outcome]:
        taken = [item for item in batch.items if item.key[4:] not in keys]
        outcomes = iter(write(replace(batch, items=taken)))
        items = [Outcome(status) if item.key[4:] in keys else next(outcomes) for item in batch.items]
        return items + list(outcomes)

    def mend() -> None:
        disk.write = write

    disk.write = refusing
    return mend


def unreadable(disk: DictTier, keys: Collection[BlockKey], status: Status) -> Callable[[], None]:
    """The disk reads everything but these blocks, and leaves garbage where they should be. Returns how to mend it."""
    read = disk.read

    def refusing(items):
        outcomes = read(items)
        for index, item in enumerate(items):
            if item.key[4:] in keys:
                item.into[:BLOCK_BYTES] = b"\xee" * BLOCK_BYTES
                outcomes[index] = Outcome(status)
        return outcomes

    def mend() -> None:
        disk.read = read

    disk.read = refusing
    return mend
