"""Part `decode`: how much a loop of decode steps is slowed by demotion that never pauses.

Owns no state. A step is our paged attention for a batch of sequences, and a wait for its end, as a sampler waits. While
it runs, another thread copies blocks of other slots down to pinned memory, batch after batch, through the tier's own
`DeviceCopies`. Rounds with and without take turns. Finds: blocks that came down with other bytes, changed results.
Units: microseconds by the calling thread's clock.
"""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from kvtier.errors import KvtierError
from kvtier.testing.gpu_check.card import Bytes, Card, Desk
from kvtier.testing.gpu_check.paged import Placed, problem
from kvtier.testing.gpu_check.record import Record
from kvtier.tiers.device_copies import DeviceCopies
from kvtier.types import ReadItem, StoreKey

BATCH_BYTES = 4 << 20  # what the engine gives to the tier at once
BLOCK_BYTES_MAX = 1 << 20
NO_KEY = StoreKey(b"")  # a memory tier does not look at it


def measure(card: Card, record: Record) -> None:
    scale = card.scale
    question = problem(
        5, "bfloat16", scale.heads, scale.decode_head_dim, [scale.decode_kv_tokens] * scale.decode_sequences
    )
    with ExitStack() as lent:
        pool = lent.enter_context(card.memory(question.pool.nbytes))
        desk = lent.enter_context(card.memory(question.desk_bytes))
        demotion = lent.enter_context(Demotion.lent(card))
        card.put(pool, question.pool)
        placed = Placed(card, question, pool, Desk(card, desk, question.desk_bytes))
        _steps(card, placed, scale.rounds)
        wanted = placed.result()
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(scale.rounds):
            alone += _steps(card, placed, scale.decode_steps)
            with demotion.running():
                beside += _steps(card, placed, scale.decode_steps)
        record.expect(np.array_equal(placed.result(), wanted), "decode results change while blocks are demoted")
        record.expect(demotion.bytes_down > 0, "nothing was demoted while the loop ran")
        record.expect(demotion.is_exact(), "blocks came down with other bytes")
    slower = (statistics.median(beside) / statistics.median(alone) - 1) * 100
    record.measured("a step alone", statistics.median(alone), "us")
    record.measured("a step beside demotion", statistics.median(beside), "us")
    record.measured("K and V read by a step", question.pool.nbytes / 1e9, "GB")
    record.measured("demotion meanwhile", demotion.bytes_down / demotion.seconds / 1e9, "GB/s")
    record.measured("a step is slower by", slower, "%")
    record.aims["decode_slower"] = slower
    record.notes.append(
        "a step is attention alone: no model's weights are read, so what demotion costs a whole model is not measured"
    )


def _steps(card: Card, placed: Placed, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        placed.run()
        card.streams.finish(card.stream)
        times.append((time.perf_counter() - start) * 1e6)
    return times


class Demotion:
    """Copies the same blocks down again and again, while it is `running`."""

    def __init__(self, card: Card, host: Bytes, device: int, block_bytes: int) -> None:
        count = len(host) // block_bytes
        self._host, self._device, self._card = host, device, card
        self._copies = DeviceCopies("gpu_check", card.streams, device, block_bytes, range(count))
        views = [memoryview(host.data)[n * block_bytes : (n + 1) * block_bytes] for n in range(count)]
        self._items = [ReadItem(NO_KEY, number, 0, block_bytes, view) for number, view in enumerate(views)]
        self.bytes_down = 0
        self.seconds = 0.0

    @classmethod
    @contextmanager
    def lent(cls, card: Card) -> Iterator["Demotion"]:
        """With memory of its own, for a few batches."""
        length_bytes = min(card.scale.copy_bytes, 4 * BATCH_BYTES)
        with card.pinned(length_bytes) as host, card.memory(length_bytes) as device:
            host[:] = np.random.default_rng(6).integers(0, 256, length_bytes, np.uint8)
            card.put(device, host)
            made = cls(card, host, device, min(BLOCK_BYTES_MAX, length_bytes // 4))
            try:
                yield made
            finally:
                made._copies.close()
                made._items.clear()  # their views keep the memory

    @contextmanager
    def running(self) -> Iterator[None]:
        """In a thread of its own. Raises what stopped it."""
        stop, began, problems = threading.Event(), threading.Event(), list[KvtierError]()

        def demote() -> None:
            start = time.perf_counter()
            try:
                while not stop.is_set():
                    began.set()
                    for first in range(0, len(self._items), self._per_batch):
                        batch = self._items[first : first + self._per_batch]
                        self._copies.read(batch)
                        self.bytes_down += sum(item.length_bytes for item in batch)
            except KvtierError as error:
                problems.append(error)
            finally:
                began.set()
                self.seconds += time.perf_counter() - start

        thread = threading.Thread(target=demote, name="kvtier-demotion")
        thread.start()
        began.wait()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if problems:
            raise problems[0]

    def is_exact(self) -> bool:
        """Copy down once more, into poisoned memory, and compare with what lies on the device."""
        self._host[:] = 0x5A
        self._copies.read(self._items)
        there = np.empty_like(self._host)
        self._card.get(self._device, there)
        return np.array_equal(self._host, there)

    @property
    def _per_batch(self) -> int:
        return max(1, BATCH_BYTES // self._items[0].length_bytes)
