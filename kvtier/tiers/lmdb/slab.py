"""Moves whole slots between memory and the slab file, many at a time.

Owns: the block file and the I/O threads. Neighbouring slots become one system call of up to 4 MiB; calls are
spread over the threads, and checksums are made there too (done after the I/O they cost a quarter of the speed).
Always: a transfer ends with every byte moved or with an error; one slot's error is not its neighbour's.
Units: bytes; offsets and strides are whole pages.
"""

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvtier.blocks.codec import checksum
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.io_threads import IoThreads
from kvtier.tiers.slots import address_of
from kvtier.types import PAGE_BYTES, BlockKey

RUN_BYTES_MAX = 4 << 20  # half of it moves no faster, and the threads for twice the calls take 3 to 5 % more CPU
SMALL_BYTES = 256 << 10  # calls of less than this, all over the slab, keep a disk busy only if there are more of them
SMALL_THREADS = 3  # times as many
IOV_MAX = os.sysconf("SC_IOV_MAX")

Move = Callable[[Sequence[memoryview], int], int]


@dataclass(slots=True)
class SlotIO:
    """One slot's transfer. `view` is the caller's memory; it may be shorter than the slot, or unaligned.

    `checksum` is that of the payload: as it was given to the kernel, or as it came from there (0 if not asked).
    """

    key: BlockKey
    offset: int
    stride_bytes: int
    length_bytes: int
    view: memoryview
    checksum: int = 0
    error: OSError | None = None
    fingerprint: bytes = b""  # of the block's namespace, where it is stored beside the payload
    _bounce: memoryview | None = None

    @property
    def buffer(self) -> memoryview:
        """What the kernel sees: exactly one slot."""
        return self.view[: self.stride_bytes] if self._bounce is None else self._bounce

    def prepare(self, direct: bool) -> None:
        """Use a page of our own where the caller's memory does not suit the kernel."""
        if len(self.view) < self.stride_bytes or (direct and address_of(self.view) % PAGE_BYTES):
            self._bounce = memoryview(mmap.mmap(-1, self.stride_bytes))

    def bounce_in(self) -> None:
        if self._bounce is not None:
            self._bounce[: self.length_bytes] = self.view[: self.length_bytes]

    def bounce_out(self) -> None:
        if self._bounce is not None:
            self.view[: self.length_bytes] = self._bounce[: self.length_bytes]

    def clear_tail(self) -> None:
        """Behind a block's payload its slot in memory holds zeroes; the slab's padding is under no checksum."""
        if tail_bytes := len(self.view) - self.length_bytes:
            self.view[self.length_bytes :] = bytes(tail_bytes)

    def take_checksum(self) -> None:
        memory = self.view if self._bounce is None else self._bounce
        self.checksum = checksum(self.key, memory[: self.length_bytes])


class TruncatedSlab(OSError):
    """The slab ends before the slot does: its bytes are gone for good, unlike after an I/O error."""


class Slab:
    """The slab file and its I/O threads: `io_threads` for large runs, more for small ones, but one if that is asked."""

    def __init__(self, file: BlockFile, io_threads: int) -> None:
        self.file = file
        self._threads_large = io_threads
        self._threads_small = SMALL_THREADS * io_threads if io_threads > 1 else 1
        self._threads = IoThreads(self._threads_small, "kvtier-slab")

    def write(self, ios: Sequence[SlotIO]) -> None:
        """Write every slot and note its payload's checksum; failures are noted in `error`."""
        self._spread(self._write_run, ios)

    def read(self, ios: Sequence[SlotIO], verify: bool) -> None:
        """Read every slot, with the checksum of what came if `verify`; failures are noted in `error`."""
        run = self._read_run_verified if verify else self._read_run
        self._spread(run, ios)

    def close(self) -> None:
        """Idempotent."""
        self._threads.close()
        self.file.close()

    # ------------------------------------------------------------ inside

    def _spread(self, work: Callable[[list[SlotIO]], None], ios: Sequence[SlotIO]) -> None:
        runs = runs_of(ios)
        are_small = runs and sum([io.stride_bytes for io in ios]) // len(runs) < SMALL_BYTES
        self._threads.share(work, runs, self._threads_small if are_small else self._threads_large)

    def _write_run(self, run: list[SlotIO]) -> None:
        ready = self._prepared(run)
        for io in ready:
            io.bounce_in()
            io.take_checksum()
        self._move_each(self.file.write, ready)

    def _read_run(self, run: list[SlotIO]) -> None:
        self._move_each(self.file.read, self._prepared(run))
        for io in run:
            if io.error is None:
                io.bounce_out()
                io.clear_tail()

    def _read_run_verified(self, run: list[SlotIO]) -> None:
        self._read_run(run)
        for io in run:
            if io.error is None:
                io.take_checksum()

    def _prepared(self, run: list[SlotIO]) -> list[SlotIO]:
        """The run, if memory for bouncing it can be had; else none of it."""
        try:
            for io in run:
                io.prepare(self.file.direct)
        except OSError as error:
            for io in run:
                io.error = error
            return []
        return run

    def _move_each(self, move: Move, run: list[SlotIO]) -> None:
        """Move a run at once; if that fails, slot by slot, to learn which one is bad."""
        if not run:
            return
        try:
            length_bytes = run[-1].offset + run[-1].stride_bytes - run[0].offset
            _move_all(move, [io.buffer for io in run], run[0].offset, length_bytes)
        except OSError as error:
            if len(run) == 1:
                run[0].error = error
            else:
                for io in run:
                    self._move_each(move, [io])


def runs_of(ios: Sequence[SlotIO]) -> list[list[SlotIO]]:
    """Cut the transfers, in slab order, into runs of neighbours."""
    runs: list[list[SlotIO]] = []
    end = run_bytes = 0
    for io in sorted(ios, key=attrgetter("offset")):
        offset, stride_bytes = io.offset, io.stride_bytes
        joins = runs and offset == end and run_bytes + stride_bytes <= RUN_BYTES_MAX and len(runs[-1]) < IOV_MAX
        if joins:
            runs[-1].append(io)
            run_bytes += stride_bytes
        else:
            runs.append([io])
            run_bytes = stride_bytes
        end = offset + stride_bytes
    return runs


def _move_all(move: Move, buffers: list[memoryview], offset: int, length_bytes: int) -> None:
    """Call `move` until every byte is moved. Raises OSError; TruncatedSlab at the end of the file."""
    while True:
        moved = move(buffers, offset) // PAGE_BYTES * PAGE_BYTES  # O_DIRECT goes on at whole pages only
        if moved <= 0:
            raise TruncatedSlab(errno.ENODATA, "the slab ends before the slot")
        if moved >= length_bytes:
            return
        offset += moved
        length_bytes -= moved
        buffers = _without(buffers, moved)


def _without(buffers: list[memoryview], moved: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= len(buffer)
    return []
