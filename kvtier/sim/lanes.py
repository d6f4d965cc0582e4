"""When batches end: each (tier, direction) is a pipe in which one batch follows the other.

Owns: until when each pipe is busy. A batch occupies its pipe for its bytes over the tier's speed, and is acknowledged
a latency later. Always: batches of one pipe end in the order in which they began.
Units: bytes, seconds of the simulated clock.
"""

from collections.abc import Sequence
from typing import cast

from kvtier.engine.executor import lane_of
from kvtier.sim.tier_model import TierModel, all_done
from kvtier.tiers.base import Tier
from kvtier.types import BatchDone, TransferBatch


class Lanes:
    """The pipes of modelled tiers, fastest tier first."""

    def __init__(self, tiers: Sequence[TierModel]) -> None:
        self.tiers = tiers
        self._with_traits = cast(Sequence[Tier], tiers)  # of which `lane_of` looks at the traits only
        self._busy_until_s: dict[tuple[int, str], float] = {}

    def ends_at_s(self, batch: TransferBatch, now_s: float) -> float:
        """Begin a batch; when will it be acknowledged?"""
        lane = lane_of(self._with_traits, batch)
        speed = self.tiers[lane[0]].speed
        bytes_per_s = speed.read_bytes_per_s if lane[1] == "read" else speed.write_bytes_per_s
        length_bytes = sum(transfer.length_bytes for transfer in batch.transfers)
        until_s = max(now_s, self._busy_until_s.get(lane, 0.0)) + length_bytes / bytes_per_s
        self._busy_until_s[lane] = until_s
        return until_s + speed.latency_s

    def carry_out(self, batch: TransferBatch) -> BatchDone:
        """Its acknowledgement, once it has ended. What is read is always there."""
        tier, direction = lane_of(self._with_traits, batch)
        return all_done(batch) if direction == "read" else self.tiers[tier].write(batch)
