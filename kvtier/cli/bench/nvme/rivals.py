"""What a store is compared with: a raw file, and one file per block.

    RawRing      a preallocated file, O_DIRECT, pwritev or preadv of neighbours, one fdatasync for a batch
    FileRing     a temporary file per block, fdatasync, rename; then fsync of the folders; four threads

Each keeps a ring of batches, as the store does. Both are durable; neither has an index, a checksum or a capacity.
Units: slots, bytes.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import Shape
from kvtier.cli.bench.rawfile import RawFile
from kvtier.types import page_aligned

FILE_THREADS = 4
FOLDERS = 256  # one folder of all files is what everybody avoids

Move = Callable[[], object]


class RawRing:
    """Batches one behind the other in a file; the oldest is written over."""

    def __init__(self, path: Path, shape: Shape, batches: int, threads: int, buffers: Buffers, undo: ExitStack) -> None:
        self._blocks = shape.blocks
        self._batches = batches
        self._buffers = buffers
        self._random = random.Random(0)
        self._file = RawFile(path, page_aligned(shape.block_bytes), batches * shape.blocks, threads)
        undo.callback(self._file.close)
        self._next = 0

    def fill(self) -> None:
        for _ in range(self._batches):
            self.put()()

    def put(self) -> Move:
        items = self._of_batch(self._next)
        self._next = (self._next + 1) % self._batches
        return lambda: self._file.write(items, sync=True)

    def get(self) -> Move:
        items = self._of_batch(self._random.randrange(self._batches))
        return lambda: self._file.read(items)

    def get_scattered(self) -> Move:
        slots = self._random.sample(range(self._batches * self._blocks), self._blocks)
        items = list(zip(slots, self._buffers.views(), strict=True))
        return lambda: self._file.read(items)

    def _of_batch(self, batch: int) -> list[tuple[int, memoryview]]:
        first = batch * self._blocks
        return list(zip(range(first, first + self._blocks), self._buffers.views(), strict=True))


class FileRing:
    """A file per block, in folders by the first byte of its name; the oldest batch's files are removed."""

    def __init__(self, folder: Path, shape: Shape, batches: int, buffers: Buffers, undo: ExitStack) -> None:
        self._block_bytes = shape.block_bytes
        self._batches = batches
        self._buffers = buffers
        self._numbers = count()
        self._kept: deque[list[Path]] = deque()
        self._pool = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files")
        undo.callback(self._pool.shutdown)
        self._folder = folder
        for number in range(FOLDERS):
            (folder / f"{number:02x}").mkdir(parents=True)

    def fill(self) -> None:
        for _ in range(self._batches + 1):
            self.put()()

    def put(self) -> Move:
        views = [view[: self._block_bytes] for view in self._buffers.views()]
        files = [self._folder / f"{next(self._numbers) % FOLDERS:02x}" / os.urandom(32).hex() for _ in views]
        oldest = self._kept.popleft() if len(self._kept) == self._batches else []

        def move() -> None:
            list(self._pool.map(_write, files, views))
            list(self._pool.map(_sync_folder, {file.parent for file in files}))
            list(self._pool.map(os.unlink, oldest))
            self._kept.append(files)

        return move


def _write(file: Path, view: memoryview) -> None:
    unfinished = file.with_suffix(".tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, view)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    unfinished.rename(file)


def _write_all(fd: int, view: Sequence[int]) -> None:
    left = memoryview(view)  # type: ignore[arg-type]
    while left:
        left = left[os.write(fd, left) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
