"""How fast batches of blocks go to an lmdb tier and come back, against the raw limits of the same disk.

    put, fresh       into an empty store; the raw file is preallocated and was never written
    put, full        one old block evicted per block put, oldest first; the raw file is written over
    get, one batch   blocks that were put together, cold
    get, scattered   the same number of blocks from all over the store, cold

The rivals move the same bytes at the same kind of offsets in the same rounds: pwritev and one fdatasync, or preadv,
with O_DIRECT, on one thread and on four. kvtier also checksums, verifies and commits its index.
Units: blocks, bytes.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.namespace import NamespaceTable
from kvtier.cli.bench.folder import scratch
from kvtier.cli.bench.rawfile import Item, RawFile
from kvtier.cli.bench.report import OURS, Race, Report
from kvtier.cli.bench.timing import Contestant, interleave, prepared
from kvtier.tiers.host import HostTier
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, Outcome, ReadItem, StoreKey, WriteBatch, WriteItem, block_key, page_aligned
from kvtier.types import store_key as qualified

SHAPES = ((737_280, 16), (65_536, 128))  # block bytes, blocks
RAW_THREADS = (1, 4)
BUFFER_BATCHES = 4  # batches of host slots that blocks come from and go to
TARGET = 0.8

Shape = tuple[int, int]


def measure(path: Path | None, shapes: Sequence[Shape], rounds: int, durability: str) -> Report:
    """Run all races. Raises UsageError if the disk cannot be measured. The folder that it uses is gone afterwards."""
    settings = {"shapes": [list(shape) for shape in shapes], "rounds": rounds, "durability": durability}
    report = Report("nvme", settings, path or Path.cwd())
    with scratch(path, max(_disk_bytes(shape, rounds) for shape in shapes)) as folder:
        for number, shape in enumerate(shapes):
            place = folder / str(number)
            place.mkdir()
            with ExitStack() as undo:
                report.races += Course(place, shape, rounds, durability, undo).races()
            for file in place.glob("raw*"):
                file.unlink()
    report.notes.append(
        f"durability {durability}; the ratio to each rival stands in its line, and the target beside the fastest"
    )
    return report


def _disk_bytes(shape: Shape, rounds: int) -> int:
    """A store and two raw files, each with one batch for every round."""
    block_bytes, blocks = shape
    ring_bytes = page_aligned(block_bytes) * blocks * (rounds + 1)
    return len(RAW_THREADS) * ring_bytes + _capacity_bytes(ring_bytes)


def _capacity_bytes(ring_bytes: int) -> int:
    """More than the ring: extents are not all of one piece, and an evicted slot is free one batch later."""
    return ring_bytes * 3 // 2 + (64 << 20)


@dataclass(frozen=True, slots=True)
class _Kept:
    key: StoreKey
    outcome: Outcome


class Course:
    """One shape of batch: a store, raw files of the same size, and the memory that blocks move from and to."""

    def __init__(self, folder: Path, shape: Shape, rounds: int, durability: str, undo: ExitStack) -> None:
        self._block_bytes, self._blocks = shape
        self._rounds = rounds
        self._ring_batches = rounds + 1  # a round that is thrown away comes first
        self._sync = durability != "none"
        self._random = random.Random(0)
        stride_bytes = page_aligned(self._block_bytes)
        slots = self._ring_batches * self._blocks
        self._buffers = HostTier.create(
            name="buffers",
            capacity_bytes=BUFFER_BATCHES * self._blocks * stride_bytes,
            length_bytes_max=self._block_bytes,
            hugepages="off",
            pin="off",
        )
        undo.callback(self._buffers.close)
        for slot in range(self._buffers.traits.slots):
            self._buffers.slot(slot)[: self._block_bytes] = os.urandom(self._block_bytes)
        self._raw = {}
        for threads in RAW_THREADS:
            name = f"raw, {threads} thread{'s' * (threads > 1)}"
            self._raw[name] = RawFile(folder / f"raw{threads}", stride_bytes, slots, threads)
            undo.callback(self._raw[name].close)
        self._raw_next = dict.fromkeys(self._raw, 0)  # the batch of the ring that is written next
        namespaces = NamespaceTable()
        self._namespace = namespaces.id_of(os.urandom(32), b"")
        self._tier = LmdbTier.open(
            folder / "store",
            name="lmdb",
            namespaces=namespaces,
            capacity_bytes=_capacity_bytes(slots * stride_bytes),
            length_bytes_max=self._block_bytes,
            min_free_bytes=0,
            durability=durability,
        )
        undo.callback(self._tier.close)
        assert self._tier.direct, "the folder was tried before"
        self._kept: deque[list[_Kept]] = deque()

    def races(self) -> list[Race]:
        """In the order in which the store fills and is read."""
        return [
            self._race("put, fresh", self._prepare_put, self._prepare_raw_write),
            self._race("put, full", self._prepare_put, self._prepare_raw_write),
            self._race("get, one batch", self._prepare_get_batch, self._prepare_raw_read_batch),
            self._race("get, scattered", self._prepare_get_scattered, self._prepare_raw_read_scattered),
        ]

    def _race(
        self, what: str, ours: Callable[[], Callable[[], object]], raw: Callable[[str], Callable[[], object]]
    ) -> Race:
        contestants: dict[str, Contestant] = {OURS: prepared(ours)}
        for name in self._raw:
            contestants[name] = prepared(lambda name=name: raw(name))  # type: ignore[misc]
        timed = interleave(contestants, self._rounds)
        return Race(what, self._blocks, self._block_bytes, timed, TARGET)

    def _views(self) -> list[memoryview]:
        """Slots of memory, scattered as in a running cache."""
        return [
            self._buffers.slot(slot) for slot in self._random.sample(range(self._buffers.traits.slots), self._blocks)
        ]

    # ------------------------------------------------------------ ours

    def _prepare_put(self) -> Callable[[], object]:
        keys = [qualified(self._namespace, block_key(os.urandom(32), 0)) for _ in range(self._blocks)]
        oldest = self._kept.popleft() if len(self._kept) == self._ring_batches else []
        evict = [EvictItem(kept.key, kept.outcome.place, kept.outcome.generation) for kept in oldest]
        items = [WriteItem(key, self._block_bytes, view) for key, view in zip(keys, self._views(), strict=True)]

        def put() -> None:
            outcomes = self._tier.write(WriteBatch(items, evict))
            _expect_done(outcomes)
            self._kept.append([_Kept(*pair) for pair in zip(keys, outcomes, strict=False)])

        return put

    def _prepare_get(self, wanted: Iterable[_Kept]) -> Callable[[], object]:
        items = [
            ReadItem(kept.key, kept.outcome.place, kept.outcome.generation, self._block_bytes, view)
            for kept, view in zip(wanted, self._views(), strict=True)
        ]
        return lambda: _expect_done(self._tier.read(items))

    def _prepare_get_batch(self) -> Callable[[], object]:
        return self._prepare_get(self._random.choice(self._kept))

    def _prepare_get_scattered(self) -> Callable[[], object]:
        every = [kept for batch in self._kept for kept in batch]
        return self._prepare_get(self._random.sample(every, self._blocks))

    # ------------------------------------------------------------ theirs

    def _prepare_raw_write(self, name: str) -> Callable[[], object]:
        items = self._batch_items(self._raw_next[name])
        self._raw_next[name] = (self._raw_next[name] + 1) % self._ring_batches
        return lambda: self._raw[name].write(items, self._sync)

    def _prepare_raw_read_batch(self, name: str) -> Callable[[], object]:
        items = self._batch_items(self._random.randrange(self._ring_batches))
        return lambda: self._raw[name].read(items)

    def _prepare_raw_read_scattered(self, name: str) -> Callable[[], object]:
        slots = self._random.sample(range(self._ring_batches * self._blocks), self._blocks)
        items = list(zip(slots, self._views(), strict=True))
        return lambda: self._raw[name].read(items)

    def _batch_items(self, batch: int) -> list[Item]:
        first = batch * self._blocks
        return list(zip(range(first, first + self._blocks), self._views(), strict=True))


def _expect_done(outcomes: Sequence[Outcome]) -> None:
    """A failed move would be a fast one."""
    for outcome in outcomes:
        if not outcome.done:
            raise OSError(f"the store did not move a block: {outcome.status.value} {outcome.detail}")
