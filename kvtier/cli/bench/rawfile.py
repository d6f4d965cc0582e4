"""What the disk gives to a straightforward program: one preallocated file, O_DIRECT, neighbours in one system call.

Owns: the file and its threads. Slots lie in the file as in a store, without a store's index, checksums or checks.
Always: memory and offsets are page aligned; a write ends with one fdatasync, if asked.
Units: slots (index), bytes.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CALL_BYTES_MAX = 4 << 20
IOV_MAX = os.sysconf("SC_IOV_MAX")

Item = tuple[int, memoryview]  # slot, a whole slot of memory
Call = Callable[[int, Sequence[memoryview], int], int]


class RawFile:
    """`slots` slots of `stride_bytes`, moved by `threads` threads. The disk space is claimed, and not yet written."""

    def __init__(self, path: Path, stride_bytes: int, slots: int, threads: int) -> None:
        """Raises OSError."""
        self._stride_bytes = stride_bytes
        self._threads = threads
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raw")
        try:
            os.posix_fallocate(self._fd, 0, slots * stride_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, items: Sequence[Item], sync: bool) -> None:
        """Raises OSError."""
        self._spread(os.pwritev, items)
        if sync:
            os.fdatasync(self._fd)

    def read(self, items: Sequence[Item]) -> None:
        """Raises OSError."""
        self._spread(os.preadv, items)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _spread(self, call: Call, items: Sequence[Item]) -> None:
        runs = list(self._runs(items))
        if self._threads == 1 or len(runs) == 1:
            for run in runs:
                self._move(call, run)
        else:
            list(self._pool.map(lambda run: self._move(call, run), runs))

    def _runs(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Neighbours together, as many as a call takes and as leaves work for every thread."""
        share_bytes = min(CALL_BYTES_MAX, len(items) * self._stride_bytes // self._threads)
        items_max = min(max(1, share_bytes // self._stride_bytes), IOV_MAX)
        run: list[Item] = []
        for item in sorted(items, key=lambda item: item[0]):
            if run and (item[0] != run[-1][0] + 1 or len(run) == items_max):
                yield run
                run = []
            run.append(item)
        yield run

    def _move(self, call: Call, run: list[Item]) -> None:
        moved = call(self._fd, [view for _, view in run], run[0][0] * self._stride_bytes)
        if moved != len(run) * self._stride_bytes:
            raise OSError(errno.EIO, f"the disk moved {moved} of {len(run) * self._stride_bytes} bytes")
