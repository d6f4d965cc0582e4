"""A store that the bench drives as the engine does: batches of blocks in, the oldest out, and back into memory.

Owns: an open lmdb tier and what it keeps. Always: a move that fails raises, for a failed move would be a fast one.
Units: blocks, bytes.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import MIB, Shape
from kvtier.tiers.lmdb.settings import Settings
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, Outcome, ReadItem, StoreKey, WriteBatch, WriteItem, block_key
from kvtier.types import store_key as qualified

Move = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Kept:
    """One block in the store."""

    key: StoreKey
    outcome: Outcome


class StoreRing:
    """`batches` batches of one shape in a store at `path`; each put beyond that evicts the oldest."""

    def __init__(
        self,
        path: Path,
        shape: Shape,
        batches: int,
        buffers: Buffers,
        undo: ExitStack,
        *,
        durability: str,
        payload: str = "slab",
        verify: bool = True,
    ) -> None:
        self._shape = shape
        self._batches = batches
        self._buffers = buffers
        self._path = path
        self._options = {"durability": durability, "payload": payload, "verify": verify}
        self._random = random.Random(0)
        self._namespaces = NamespaceTable()
        self._namespace = self._namespaces.id_of(os.urandom(32), b"")
        self._kept: deque[tuple[list[StoreKey], list[Outcome]]] = deque()  # what pairs them is none of the store's CPU
        self._readers = ThreadPoolExecutor(1)
        undo.callback(self._readers.shutdown)
        self.tier = self._open()
        undo.callback(lambda: self.tier.close())

    def _open(self) -> LmdbTier:
        return LmdbTier.open(
            self._path,
            name="lmdb",
            namespaces=self._namespaces,
            capacity_bytes=capacity_bytes(self._shape, self._batches, str(self._options["payload"])),
            length_bytes_max=self._shape.block_bytes,
            min_free_bytes=0,
            **self._options,  # type: ignore[arg-type]
        )

    def fill(self) -> None:
        """Until a put evicts, and once more: later rounds write over what was written before."""
        for _ in range(self._batches + 1):
            self.put()()

    # ------------------------------------------------------------ prepared moves

    def put(self) -> Move:
        """Blocks with keys of their own, for the oldest batch's."""
        blocks = self._shape.blocks
        keys = [qualified(self._namespace, block_key(os.urandom(32), 0)) for _ in range(blocks)]
        oldest = _pairs(self._kept.popleft()) if len(self._kept) == self._batches else []
        evict = [EvictItem(kept.key, kept.outcome.place, kept.outcome.generation) for kept in oldest]
        views = self._buffers.views()
        items = [WriteItem(key, self._shape.block_bytes, view) for key, view in zip(keys, views, strict=True)]

        def move() -> None:
            outcomes = expect_done(self.tier.write(WriteBatch(items, evict)))
            self._kept.append((keys, outcomes))

        return move

    def get(self) -> Move:
        """One batch that was put together."""
        return self._reading([_pairs(self._random.choice(self._kept))])

    def get_at_once(self, batches: int) -> Move:
        """Several such batches, each read by a thread of its own, as the engine's readers do."""
        items = self._items([_pairs(batch) for batch in self._random.sample(self._kept, batches)])
        step = self._shape.blocks
        parts = [items[first : first + step] for first in range(0, len(items), step)]
        self._readers.shutdown()
        self._readers = ThreadPoolExecutor(batches, thread_name_prefix="reader")
        list(self._readers.map(lambda _: None, range(batches)))  # its threads are no part of the get
        return lambda: [expect_done(done) for done in self._readers.map(self.tier.read, parts)]

    def get_scattered(self) -> Move:
        """As many blocks as a batch has, from all over the store."""
        every = [kept for batch in self._kept for kept in _pairs(batch)]
        return self._reading([self._random.sample(every, self._shape.blocks)])

    def get_scattered_cold(self) -> Move:
        """The same with nothing of the store in the page cache: that takes closing it, for mapped pages stay."""
        self.tier.close()
        for file in self._path.rglob("*"):
            if file.is_file():
                forget_cached(file)
        self.tier = self._open()
        return self.get_scattered()

    def _reading(self, batches: Sequence[Iterable[Kept]]) -> Move:
        items = self._items(batches)
        return lambda: expect_done(self.tier.read(items))

    def _items(self, batches: Sequence[Iterable[Kept]]) -> list[ReadItem]:
        wanted = [kept for batch in batches for kept in batch]
        return [
            ReadItem(kept.key, kept.outcome.place, kept.outcome.generation, self._shape.block_bytes, view)
            for kept, view in zip(wanted, self._buffers.views(len(batches)), strict=True)
        ]


def _pairs(batch: tuple[list[StoreKey], list[Outcome]]) -> list[Kept]:
    return [Kept(*pair) for pair in zip(*batch, strict=False)]  # behind the items' outcomes are the evictions'


def capacity_bytes(shape: Shape, batches: int, payload: str) -> int:
    """More than the ring: extents are not all of one piece, and an evicted slot is free one batch later."""
    slots_bytes = (batches + 2) * shape.batch_bytes * 3 // 2 + 16 * MIB
    part, whole = Settings("", slots_bytes, shape.block_bytes, 0, "batch", 1, payload).share
    return slots_bytes * whole // part


def forget_cached(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def expect_done(outcomes: list[Outcome]) -> list[Outcome]:
    """Raises OSError for the first that is not."""
    for outcome in outcomes:
        if not outcome.done:
            raise OSError(f"the store did not move a block: {outcome.status.value} {outcome.detail}")
    return outcomes
