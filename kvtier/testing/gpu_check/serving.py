"""Serving: a small engine over a cache on the card, whose KV follows from the keys, so that every byte can be judged.

Owns: the cache. Work goes to the card's stream, and every `commit` and `release` has an event behind it.
Always: blocks are lent by `leased` alone, and judged against `content`.
Units:  tokens, slots, bytes, seconds.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Event
from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.blocks.spec import block_specs
from kvtier.cache.leases import Lease
from kvtier.config import Config, load_config
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.errors import KvtierError
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS, POISON

DTYPE = "float16"
STORE_BYTES_MIN = 64 << 20
DEADLINE = "60s"  # of a load: here it shall come, however slow
FLUSH_S = 60.0


def model_of(card: Card, layers: int) -> dict[str, Any]:
    """A model's section of a configuration, with the scale's shape of heads."""
    return {
        "name": "gpu-check",
        "weights_epoch": "v1",
        "layers": layers,
        "kv_heads": card.scale.heads[1],
        "head_dim": card.scale.head_dims[0],
        "dtype": DTYPE,
        "block_tokens": BLOCK_TOKENS,
    }


@contextmanager
def configured(card: Card) -> Iterator[Config]:
    """gpu, host and a temporary lmdb tier: the device holds a third of all prompts' blocks, host memory all of them."""
    scale = card.scale
    model = model_of(card, scale.layers)
    block_bytes = scale.layers * 2 * BLOCK_TOKENS * scale.heads[1] * scale.head_dims[0] * 2
    blocks = scale.prompts * scale.prompt_blocks
    slots = max(blocks // 3, scale.prompt_blocks) + 2
    granule_bytes = card.driver.granule_bytes
    capacity_bytes = -(-slots * block_bytes // granule_bytes) * granule_bytes
    card.expect_room(capacity_bytes)
    below_bytes = max(2 * blocks * max(block_bytes, 4096), capacity_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-check-") as folder:
        tiers = [
            {"type": "gpu", "device": f"cuda:{card.number}", "capacity": capacity_bytes},
            {"type": "host", "capacity": below_bytes, "hugepages": "off"},
            {"type": "lmdb", "capacity": below_bytes + STORE_BYTES_MIN, "path": str(Path(folder) / "store")},
        ]
        yield load_config({"model": model, "tiers": tiers, "limits": {"load_deadline": DEADLINE}}, environ={})


class Serving:
    """Use with `with`; the cache is flushed and closed at the end."""

    def __init__(self, card: Card, config: Config) -> None:
        self.card = card
        self.config = config
        self.spec = block_specs(config.model)[0]
        self.cache: SyncCache = open_sync(config)
        try:
            self.stride_bytes = int(self.cache.kv(0, 0)["k"].strides[0])
            self.address = self.address_now()
        except BaseException:
            self.cache.close()
            raise
        self.restored_bytes = 0
        self.restoring_s = 0.0

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self.card.streams.finish(self.card.stream)
        self.cache.close()

    def address_now(self) -> int:
        """Where slot 0 begins; a block's first segment is layer 0's K."""
        view: Any = self.cache.kv(0, 0)["k"]
        return int(view.data.ptr)

    def prompt(self, number: int, blocks: int | None = None) -> Keys:
        """The keys of a prompt of its own."""
        count = (blocks or self.card.scale.prompt_blocks) * BLOCK_TOKENS
        return hash_blocks([(number * 1_000_003 + i) % 2**32 for i in range(count)], self.config.model)

    @contextmanager
    def leased(self, keys: Keys) -> Iterator[Lease]:
        """A lease over all blocks of a prompt, restored as far as it can be. At the end what the card's stream was
        given counts as written: the rest of the blocks is committed behind it, and the lease released.
        """
        blocks = len(keys.groups[0])
        start = time.perf_counter()
        lease = self.cache.reserve(self.cache.match(keys, owner="gpu-check"), blocks)
        took_s = time.perf_counter() - start
        if not isinstance(lease, Lease):
            raise KvtierError(f"the check's own tiers are too small: {lease!r}")
        ready = lease.tokens_ready // BLOCK_TOKENS
        if ready:
            self.restored_bytes += ready * self.spec.block_bytes
            self.restoring_s += took_s
        yield lease
        after = self.event()
        self.cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[ready:], after=after)
        self.cache.release(lease, after=after)
        self.card.streams.drop_event(after)

    def event(self) -> Event:
        """Behind all that the card's stream was given."""
        event = self.card.streams.make_event()
        self.card.streams.record(event, self.card.stream)
        return event

    def compute(self, lease: Lease, keys: Keys) -> None:
        """Write what is not restored."""
        first = lease.tokens_ready // BLOCK_TOKENS
        for slot, key in list(zip(lease.slots(), keys.groups[0], strict=True))[first:]:
            self.card.put(self.address + slot * self.stride_bytes, self.content(key))

    def wrong(self, lease: Lease, keys: Keys) -> int:
        """How many of the restored blocks have other bytes than they should."""
        found = np.empty(self.spec.block_bytes, np.uint8)
        wrong = 0
        for slot, key in list(zip(lease.slots(), keys.groups[0], strict=True))[: lease.tokens_ready // BLOCK_TOKENS]:
            self.card.get(self.address + slot * self.stride_bytes, found)
            wrong += not np.array_equal(found, self.content(key).view(np.uint8))
        return wrong

    def content(self, key: bytes) -> NDArray[np.float16]:
        """What a block holds: float16 [values of all layers]."""
        rng = np.random.default_rng(int.from_bytes(key[:8], "big"))
        return rng.standard_normal(self.spec.block_bytes // 2, np.float32).astype(np.float16)

    def poison(self) -> None:
        """Fill every slot of the device with what no block holds; whatever lay there is only below from now on."""
        self.flush()
        with self._all_slots() as slots:
            for slot in slots:
                self.card.fill(self.address + slot * self.stride_bytes, POISON, self.stride_bytes)
        self.flush()

    def flush(self) -> None:
        """Wait for all events behind which something was committed or released, and bring all blocks down."""
        flushed = self.cache.flush(FLUSH_S)
        if flushed.failed:
            raise KvtierError(f"{flushed.failed} of {flushed.blocks} blocks did not reach the store")

    @contextmanager
    def _all_slots(self) -> Iterator[Sequence[int]]:
        usable = self.config.tiers[0].capacity_bytes // self.stride_bytes - 1  # without the null block
        keys = self.prompt(999_983, usable)
        lease = self.cache.reserve(self.cache.match(keys, owner="gpu-check"), usable)
        if not isinstance(lease, Lease):
            raise KvtierError(f"not all {usable} slots of the device can be had at once: {lease!r}")
        yield lease.slots()
        after = self.event()
        self.cache.release(lease, after=after)
        self.card.streams.drop_event(after)
