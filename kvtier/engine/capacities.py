"""A persistent tier that may take more or less of its disk from now on, while it is used.

Owns: the changes under way. Always: a change is a batch of its own on the tier's writer; what a smaller capacity has
no room for leaves afterwards as for `min_free` (`pressure`), and until it has, nothing is stored.
Units: bytes, blocks.
"""

from kvtier.cache.residency import Residency
from kvtier.engine.flight import Flight
from kvtier.types import Outcome, TransferBatch


class Capacities:
    """Plans changes. What ends goes to `ended`: (ticket, bytes that the tier may take now)."""

    def __init__(self, residency: Residency, flight: Flight, ended: list[tuple[int, int]]) -> None:
        self._residency = residency
        self._flight = flight
        self._asked: list[tuple[int, int, int]] = []  # ticket, tier, bytes
        self._tickets: dict[int, int] = {}  # by batch under way
        self._ended = ended

    def begin(self, ticket: int, tier: int, capacity_bytes: int) -> None:
        """Give a tier that `Room.capacities` tells about another capacity."""
        self._asked.append((ticket, tier, capacity_bytes))

    def batches(self) -> list[TransferBatch]:
        """Changes to carry out now."""
        asked, self._asked = self._asked, []
        made = [self._flight.depart_capacity(tier, capacity_bytes) for _, tier, capacity_bytes in asked]
        self._tickets |= {batch.batch_id: ticket for batch, (ticket, _, _) in zip(made, asked, strict=True)}
        return made

    def settled(self, batch: TransferBatch, outcome: Outcome) -> None:
        """A change ended."""
        level = self._residency.levels[batch.target]
        assert level.room is not None
        assert level.room.capacities is not None
        given_bytes, payload_bytes = level.room.capacities()
        if outcome.done:
            level.policy_blocks = max(1, level.policy_blocks * payload_bytes // max(1, level.capacity_bytes))
            level.capacity_bytes = payload_bytes
            self._residency.ranks.shrunk(batch.target)
            level.policy.resize(level.policy_blocks)
            self._residency.retire_ghosts(level.policy)
        self._ended.append((self._tickets.pop(batch.batch_id), given_bytes))
