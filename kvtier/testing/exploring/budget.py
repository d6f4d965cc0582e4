"""`Budget`: what a disk may still be written, reckoned beside the engine's own account and from the outside.

Owns the bytes left, and what was left when each row of the account was written that the store has. It outlives engines,
as the account does. Always: it is at least what the engine may count on: what is written is charged as soon as it is,
never before, and of what is under way no more than the blocks; a restart goes on from the last row that is stored.

Units: bytes, seconds of simulated time.
"""

from kvtier.testing.exploring.underway import Flying
from kvtier.tiers.base import SupportsMeter
from kvtier.types import BatchDone, TransferBatch

SLACK_BYTES = 256.0  # an account is kept in whole bytes and milliseconds


class Budget:
    """Of one disk: at most `burst_bytes`, and so many more each second."""

    def __init__(self, burst_bytes: float, bytes_per_s: float) -> None:
        self.burst_bytes = burst_bytes
        self._bytes_per_s = bytes_per_s
        self._left_bytes, self._at_s = burst_bytes, 0.0
        self._rows: dict[int, tuple[float, float]] = {}  # by batch: left then, and when
        self._row = burst_bytes, 0.0

    def left_bytes(self, now_s: float) -> float:
        """Negative after a flush that has overdrawn it."""
        saved = self._left_bytes + (now_s - self._at_s) * self._bytes_per_s
        self._left_bytes, self._at_s = min(self.burst_bytes, saved), now_s
        return self._left_bytes

    def planned(self, batch: TransferBatch, before_bytes: int, now_s: float) -> None:
        """A batch to the disk was planned, with its row, while so much before it was under way."""
        left_bytes = self.left_bytes(now_s) - before_bytes - bytes_of(batch)
        self._rows[batch.batch_id] = left_bytes + SLACK_BYTES, now_s

    def carried(self, batch: TransferBatch, done: BatchDone, length_bytes: int, now_s: float) -> None:
        """It was carried out, and so much was written for it."""
        self._left_bytes = self.left_bytes(now_s) - length_bytes
        if batch.sidecar and done.outcomes[-1].done:
            self._row = self._rows[batch.batch_id]

    def restarted(self) -> None:
        """What was planned and not carried out never will be."""
        self._rows.clear()
        self._left_bytes, self._at_s = self._row


def bytes_of(batch: TransferBatch) -> int:
    """Of the blocks that it moves."""
    return sum(transfer.length_bytes for transfer in batch.transfers)


def written_bytes(meter: SupportsMeter) -> int:
    """What the disk has been given by a store that keeps an account."""
    written = meter.written()
    return written.slot_bytes + written.index_bytes


def done_bytes(flying: Flying) -> int:
    """Of the blocks that it has moved."""
    outcomes = () if flying.done is None else flying.done.outcomes
    return sum(t.length_bytes for t, outcome in zip(flying.batch.transfers, outcomes, strict=False) if outcome.done)
