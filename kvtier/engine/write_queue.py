"""Batches that wait for the writer of a tier which can commit several at once.

Owns: the queue. Always: batches are taken in the order in which they came, each once; what is there when the writer is
free goes together, up to a bound, and nobody waits for company. One thread puts, one takes.
Units: batches, bytes of blocks.
"""

import threading
from collections import deque

from kvtier.types import TransferBatch

GROUP_BATCHES_MAX = 8
GROUP_BYTES_MAX = 64 << 20  # all of them end when the last does: no more than a disk writes in a tenth of a second


class WriteQueue:
    """Thread-safe."""

    def __init__(self) -> None:
        self._batches: deque[TransferBatch] = deque()
        self._lock = threading.Lock()

    def put(self, batch: TransferBatch) -> None:
        with self._lock:
            self._batches.append(batch)

    def take(self) -> list[TransferBatch]:
        """The batches whose turn it is; none if an earlier turn took them."""
        with self._lock:
            taken: list[TransferBatch] = []
            size_bytes = 0
            while self._batches and len(taken) < GROUP_BATCHES_MAX:
                batch = self._batches[0]
                size_bytes += _bytes(batch)
                if taken and (size_bytes > GROUP_BYTES_MAX or not (_joins(taken[0]) and _joins(batch))):
                    break
                taken.append(self._batches.popleft())
            return taken

    def take_back(self, batch: TransferBatch) -> bool:
        """Forget the batch that was put last. False if it was taken."""
        with self._lock:
            is_there = bool(self._batches) and self._batches[-1] is batch
            if is_there:
                self._batches.pop()
            return is_there


def _joins(batch: TransferBatch) -> bool:
    """Whether it only writes blocks, evictions and rows."""
    return batch.drop is None and batch.remap is None and batch.capacity_bytes is None and not batch.scrub


def _bytes(batch: TransferBatch) -> int:
    return sum(transfer.length_bytes for transfer in batch.transfers)
