"""How fast a whole cache moves blocks down to disk and back, against the bare copies on the same way.

    flush      gpu -> host -> lmdb, until `flush` has its answer; bare: memmove, then pwritev and fdatasync per 16 MiB
    promote    lmdb -> host -> gpu, until `reserve` has its answer; bare: preadv, then memmove

The bare copies use O_DIRECT on four threads and do nothing else: no key, no checksum, no index.
Units: blocks of 737,280 bytes.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from kvtier.cache.leases import Lease, NoRoom
from kvtier.cli.bench import world
from kvtier.cli.bench.progress import Begin
from kvtier.cli.bench.rawfile import Item, RawFile
from kvtier.cli.bench.report import OURS, Race
from kvtier.cli.bench.timing import Contestant, interleave, turns
from kvtier.config import Config
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.errors import KvtierError
from kvtier.tiers.host import HostTier

BARE = "bare, 4 threads"
BARE_THREADS = 4
BARE_SYNC_BYTES = 16 << 20


def disk_bytes(blocks: int, rounds: int) -> int:
    """What `races` writes."""
    return world.LARGE_BYTES * blocks * (rounds + 1) * 5 // 2 + (64 << 20)


def races(folder: Path, blocks: int, rounds: int, begin: Begin) -> list[Race]:
    """Every round flushes a prompt of its own, and later promotes one that is nowhere in memory."""
    prompts = rounds + 1  # one round is thrown away
    config = world.config(world.LARGE, world.LARGE_BYTES, 2 * blocks, 2 * blocks, folder / "moves", blocks * prompts)
    with ExitStack() as undo:
        bare = Bare(folder, blocks, prompts, undo)
        with open_sync(config) as cache:
            contestants = {OURS: flushing(cache, config, blocks), BARE: bare.flushing()}
            step = begin("flushing", turns(contestants, rounds))
            down = Race("flush", blocks, world.LARGE_BYTES, interleave(contestants, rounds, step))
        with open_sync(config) as cache:
            contestants = {OURS: promoting(cache, config, blocks), BARE: bare.promoting()}
            step = begin("promoting", turns(contestants, rounds))
            up = Race("promote", blocks, world.LARGE_BYTES, interleave(contestants, rounds, step))
    return [down, up]


def flushing(cache: SyncCache, config: Config, blocks: int) -> Contestant:
    numbers = count()
    source = np.random.default_rng(0)

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        keys = world.prompt(config, next(numbers), blocks)
        lease = world.reserved(cache, keys, blocks)
        world.fill(cache, lease, source)
        world.commit_all(cache, lease, keys)
        cache.release(lease)
        yield lambda: world.flush(cache)

    return contestant


def promoting(cache: SyncCache, config: Config, blocks: int) -> Contestant:
    """Prompts in the order in which they were flushed, each once."""
    numbers = count()

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        keys = world.prompt(config, next(numbers), blocks)
        match = cache.match(keys, owner="bench")
        answers: list[Lease | NoRoom] = []
        yield lambda: answers.append(cache.reserve(match, blocks))
        lease = answers[0]
        if not isinstance(lease, Lease) or lease.tiers["lmdb"] != blocks * world.BLOCK_TOKENS:
            raise KvtierError(f"a prompt did not come from disk in full: {lease!r}")
        cache.release(lease)

    return contestant


class Bare:
    """Two pools of memory and a file, each as large as the cache's part of it."""

    def __init__(self, folder: Path, blocks: int, batches: int, undo: ExitStack) -> None:
        self._blocks = blocks
        self._batches = batches
        self._upper, self._lower = (self._pool(name, undo) for name in ("upper", "lower"))
        self._file = RawFile(folder / "bare", world.LARGE_BYTES, blocks * batches, BARE_THREADS)
        undo.callback(self._file.close)

    def flushing(self) -> Contestant:
        return self._contestant(self._down)

    def promoting(self) -> Contestant:
        return self._contestant(self._up)

    def _contestant(self, move: Callable[[int], None]) -> Contestant:
        batches = count()

        @contextmanager
        def contestant() -> Iterator[Callable[[], object]]:
            batch = next(batches) % self._batches
            yield lambda: move(batch)

        return contestant

    def _down(self, batch: int) -> None:
        _copy(self._upper, self._lower)
        items = self._items(batch)
        step = max(1, BARE_SYNC_BYTES // world.LARGE_BYTES)
        for first in range(0, len(items), step):
            self._file.write(items[first : first + step], sync=True)

    def _up(self, batch: int) -> None:
        self._file.read(self._items(batch))
        _copy(self._lower, self._upper)

    def _items(self, batch: int) -> list[Item]:
        first = batch * self._blocks
        return [(first + at, self._lower.slot(at)) for at in range(self._blocks)]

    def _pool(self, name: str, undo: ExitStack) -> HostTier:
        pool = HostTier.create(
            name=name,
            capacity_bytes=max(2, self._blocks) * world.LARGE_BYTES,
            length_bytes_max=world.LARGE_BYTES,
            pin="off",
            hugepages="off",
        )
        undo.callback(pool.close)
        for slot in range(self._blocks):
            pool.slot(slot)[:] = os.urandom(world.LARGE_BYTES)
        return pool


def _copy(source: HostTier, target: HostTier) -> None:
    for slot in range(min(source.traits.slots, target.traits.slots)):
        into, out_of = (ctypes.addressof(ctypes.c_char.from_buffer(tier.slot(slot))) for tier in (target, source))
        ctypes.memmove(into, out_of, world.LARGE_BYTES)
