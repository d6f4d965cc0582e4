"""Reader: kernels that read slots without pause, and tell if one of them ever saw a wrong byte.

Owns: a thread, a stream, and what it compares with. A step is one launch of the checksum kernel over all its slots,
with its sums copied out behind it; a few steps are always queued, so the device never waits for the host.
Always: every step's sums are compared with the CPU's; `gaps_ms` is how far apart steps ended, by the device's clock.
Units:  milliseconds, slots.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.errors import KvtierError
from kvtier.kernels import checksum, launch_blocks
from kvtier.kernels.launch import DevicePool, Launch
from kvtier.testing.gpu_check.card import Bytes, Card, Desk

QUEUED = 8  # steps
DESK_BYTES = 1 << 20
POLL_S = 0.001


class Reader:
    """Use with `with`: it reads from its beginning to its end."""

    def __init__(self, card: Card, pool: DevicePool, slots: Sequence[int], contents: Bytes) -> None:
        """contents: uint8 [slots, bytes], what lies at the beginning of each of the slots; nobody may write it."""
        self._card = card
        self._seeds = np.arange(1, len(slots) + 1, dtype=np.uint64)
        every = np.arange(len(slots), dtype=np.int32)
        self._wanted = checksum.checksums(contents, every, self._seeds, contents.shape[1])
        self._pool, self._slots = pool, np.array(slots, np.int32)
        self._length_bytes = contents.shape[1]
        self._ends: list[int] = []
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-reader")
        self._undo = ExitStack()
        self._problem: KvtierError | None = None
        self.steps = 0
        self.steps_wrong = 0
        self.gaps_ms: list[float] = []

    def __enter__(self) -> Self:
        """Returns when the first step is over."""
        card = self._card
        with ExitStack() as undo:
            desk = Desk(card, undo.enter_context(card.memory(DESK_BYTES)), DESK_BYTES)
            self._at_slots, self._at_seeds = desk.put(self._slots), desk.put(self._seeds)
            self._at_sums = desk.room(QUEUED * self._seeds.nbytes)
            pinned = undo.enter_context(card.pinned(QUEUED * self._seeds.nbytes))
            self._sums = pinned.view(np.uint64).reshape(QUEUED, -1)
            self._stream = card.streams.make_stream()
            undo.callback(card.streams.drop_stream, self._stream)
            for _ in range(QUEUED + 1):  # the last step's end is asked about once more, by the next one
                self._ends.append(card.timed_event())
                undo.callback(card.calls, "cuEventDestroy", self._ends[-1])
            undo.callback(card.streams.finish, self._stream)
            card.launcher.prepare(self._launch(0).variant)
            self._thread.start()
            undo.callback(self._halt)
            self._undo = undo.pop_all()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops it. Raises what stopped it before, such as DeviceLost."""
        self._undo.close()
        if self._problem and error is None:
            raise self._problem

    @property
    def is_running(self) -> bool:
        return self._problem is None and self._thread.is_alive()

    def await_steps(self, count: int) -> None:
        """Block until so many more steps are over, or it has stopped."""
        wanted = self.steps + count
        while self.steps < wanted and self.is_running:
            time.sleep(POLL_S)

    def _halt(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._card.streams.bind_thread()
            pending: deque[int] = deque()
            while not self._stop.is_set():
                self._submit(self.steps + len(pending))
                pending.append(self.steps + len(pending))
                if len(pending) == QUEUED:
                    self._take(pending.popleft())
            while pending:
                self._take(pending.popleft())
        except KvtierError as error:
            self._problem = error
        finally:
            self._started.set()

    def _launch(self, row: int) -> Launch:
        sums = self._at_sums + row * self._seeds.nbytes
        count = len(self._seeds)
        return launch_blocks.checksum(sums, self._pool, self._at_slots, self._at_seeds, count, self._length_bytes)

    def _submit(self, step: int) -> None:
        card, row = self._card, step % QUEUED
        launch = self._launch(row)
        card.launcher.launch(launch, self._stream.key)
        sums = self._at_sums + row * self._seeds.nbytes
        card.calls("cuMemcpyAsync", self._sums[row].ctypes.data, sums, self._seeds.nbytes, self._stream.key)
        card.calls("cuEventRecord", self._ends[step % len(self._ends)], self._stream.key)

    def _take(self, step: int) -> None:
        """Wait for a step and judge it."""
        card, end = self._card, self._ends[step % len(self._ends)]
        card.calls("cuEventSynchronize", end)
        if step:
            self.gaps_ms.append(card.between_ms(self._ends[(step - 1) % len(self._ends)], end))
        self.steps_wrong += not np.array_equal(self._sums[step % QUEUED], self._wanted)
        self.steps += 1
        self._started.set()
