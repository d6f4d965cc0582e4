"""`Drops`: namespaces that are forgotten at once, and erased from the persistent tiers after that.

Owns: the drops that wait, the batches under way of each, and how they ended. Always: nobody finds a block of a
namespace from the moment it is dropped; a drop has ended when each of its batches has, and is told once.
"""

from collections import deque

from kvtier.cache.residency import Residency
from kvtier.engine.demotion import Demotions
from kvtier.engine.flight import Flight
from kvtier.types import NAMESPACE_BYTES, Outcome, TransferBatch


class Drops:
    """Of one core."""

    def __init__(self, residency: Residency, flight: Flight, demotions: Demotions) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._demotions = demotions
        self._waiting: deque[tuple[int, int]] = deque()  # (ticket, namespace), not yet planned
        self._underway: dict[int, set[int]] = {}  # ticket -> its batches
        self._failed: set[int] = set()

    def begin(self, ticket: int, namespace: int, handles: list[int]) -> None:
        """Forget these blocks at once, and erase their namespace from the persistent tiers (see `ended`)."""
        self._demotions.flushes.forget({handle: self._directory.key(handle) for handle in handles})
        for handle in handles:
            self._residency.overtake(handle)
        self._waiting.append((ticket, namespace))

    def batches(self) -> list[TransferBatch]:
        """What erases them. Each batch must be settled by exactly one outcome."""
        made: list[TransferBatch] = []
        while self._waiting:
            made += self._batches_of(*self._waiting.popleft())
        return made

    def _batches_of(self, ticket: int, namespace: int) -> list[TransferBatch]:
        """One batch for each persistent tier. Its writer runs batches in order, so later writes are safe from it."""
        prefix = namespace.to_bytes(NAMESPACE_BYTES, "big")
        batches = []
        for tier, level in enumerate(self._residency.levels):
            if level.persistent:
                queue = self._residency.leaving[tier]
                leaving = [copy for copy in queue if self._directory.key(copy.handle).startswith(prefix)]
                kept = [copy for copy in queue if not self._directory.key(copy.handle).startswith(prefix)]
                queue.clear()
                queue.extend(kept)
                batches.append(self._flight.depart_drop(tier, namespace, leaving))
        self._underway[ticket] = {batch.batch_id for batch in batches}
        return batches

    def settled(self, batch_id: int, outcome: Outcome) -> None:
        """One of its batches ended."""
        for ticket, batch_ids in self._underway.items():
            if batch_id in batch_ids:
                batch_ids.remove(batch_id)
                if not outcome.done:
                    self._failed.add(ticket)

    def ended(self) -> list[tuple[int, bool]]:
        """Drops that are durable now, or failed: (ticket, done). Each is reported once."""
        ended = [(t, t not in self._failed) for t, batch_ids in self._underway.items() if not batch_ids]
        for ticket, _ in ended:
            del self._underway[ticket]
            self._failed.discard(ticket)
        return ended
