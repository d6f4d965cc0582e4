"""Checks what lies on disk before anybody asks for it: a slow walk over all copies, while the disk is idle.

Owns: how far the walk over each tier is, and the batch of it that is under way. Always: one small batch at a time, and
none while the tier is read or written, has loads waiting, or is left alone by its breaker; over time no more bytes than
the configuration allows. A copy that is found bad is condemned as if a load had found it; one that moved meanwhile is
passed over, for who reads and who was read are compared by place and generation.
Units: bytes, seconds of the engine's clock.
"""

from dataclasses import dataclass

from kvtier.cache.residency import Residency
from kvtier.cache.transitions import Move
from kvtier.engine.breaker import Breakers, Circuit
from kvtier.engine.flight import Flight
from kvtier.engine.promotion import Promotions
from kvtier.engine.sidecar import Sidecars
from kvtier.events import Reason
from kvtier.types import BatchDone, Outcome, Status, Transfer, TransferBatch

PASS_S = 86_400.0  # between the beginnings of two passes
PIECE_BYTES = 1 << 20  # a load that comes meanwhile waits for so much at most
PIECE_BLOCKS = 256


@dataclass(slots=True)
class _Walk:
    """A pass over one tier: handles below `handle` were looked at."""

    handle: int = 0
    due_s: float = 0.0
    began_s: float = 0.0
    underway: TransferBatch | None = None


class Scrubs:
    """Asked on every plan; told of its batches' ends."""

    def __init__(
        self, residency: Residency, flight: Flight, promotions: Promotions, breakers: Breakers, sidecars: Sidecars
    ) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._promotions = promotions
        self._breakers = breakers
        self._sidecars = sidecars
        self._walks = {tier: _Walk() for tier in residency.orders if residency.levels[tier].scrub_bytes_per_s}

    def batches(self, now_s: float) -> list[TransferBatch]:
        """What to check now."""
        made = []
        for tier, walk in self._walks.items():
            if now_s >= walk.due_s and walk.underway is None and self._is_idle(tier):
                walk.underway = self._next(tier, walk, now_s)
                made += [walk.underway] if walk.underway else []
        return made

    def settled(self, done: BatchDone, now_s: float) -> bool:
        """Take the acknowledgement of a batch, if it is one of ours."""
        for tier, walk in self._walks.items():
            batch = walk.underway
            if batch is not None and batch.batch_id == done.batch_id:
                walk.underway = None
                for copy, outcome in zip(batch.scrub, done.outcomes, strict=True):
                    self._checked(tier, copy, outcome, now_s)
                return True
        return False

    def wake_at_s(self) -> float | None:
        """When the next batch is due; a tier that is busy then is looked at again when it no longer is."""
        due = (walk.due_s for tier, walk in self._walks.items() if walk.underway is None and self._is_idle(tier))
        return min(due, default=None)

    def _is_idle(self, tier: int) -> bool:
        flight = self._flight
        moves = flight.loads(tier) or flight.writes(tier)
        waits = any(self._promotions.waiting_bytes((tier, target)) for target in range(tier))
        return not moves and not waits and self._breakers.circuit(tier) is Circuit.CLOSED

    def _next(self, tier: int, walk: _Walk, now_s: float) -> TransferBatch | None:
        """The next few copies; None at the end of a pass."""
        if not walk.handle:
            walk.began_s = now_s
        copies: list[Transfer] = []
        piece_bytes = 0
        for handle in self._directory.ready_from(walk.handle, tier, PIECE_BLOCKS):
            copy = self._copy(handle, tier)
            if copies and piece_bytes + copy.length_bytes > PIECE_BYTES:
                break
            copies.append(copy)
            piece_bytes += copy.length_bytes
        if not copies:
            self._residency.counters.add_tier(tier, "scrub_passes")
            walk.handle, walk.due_s = 0, walk.began_s + PASS_S
            return None
        walk.handle = copies[-1].handle + 1
        walk.due_s = now_s + piece_bytes / self._residency.levels[tier].scrub_bytes_per_s
        return TransferBatch(self._flight.number(), tier, tier, (), scrub=tuple(copies))

    def _copy(self, handle: int, tier: int) -> Transfer:
        directory = self._directory
        place, generation = directory.place(handle, tier), directory.generation(handle, tier)
        return Transfer(handle, directory.key(handle), place, generation, 0, directory.length_bytes(handle))

    def _checked(self, tier: int, copy: Transfer, outcome: Outcome, now_s: float) -> None:
        counters = self._residency.counters
        if outcome.status is Status.FAILED:
            counters.add_tier(tier, "read_failed")  # it may be read another time
            return
        if not self._directory.is_ready(copy.handle, tier) or self._copy(copy.handle, tier) != copy:
            return
        counters.add_tier(tier, "scrubbed_blocks")
        counters.add_tier(tier, "scrubbed_bytes", copy.length_bytes)
        if outcome.status is Status.CORRUPT:
            counters.add_tier(tier, "scrubbed_corrupt")
            self._sidecars.condemn(tier, copy, outcome, now_s)
            self._residency.lose(copy.handle, tier, Move.RECLAIM, Reason.CONDEMNED)
        elif outcome.status is Status.MISSING:
            self._residency.lose(copy.handle, tier, Move.RECLAIM, Reason.LOST)
