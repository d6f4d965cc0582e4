"""How much one run of `kvtier bench nvme` moves: batches, rounds, stores.

Owns no state. Units: blocks, bytes.
"""

from dataclasses import dataclass, replace

from kvtier.types import page_aligned

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch."""

    block_bytes: int
    blocks: int

    @property
    def batch_bytes(self) -> int:
        """What its slots take."""
        return self.blocks * page_aligned(self.block_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: of each race. ring_bytes: what each contestant keeps, oldest batch first to go. churn_bytes: the capacity
    that is churned. records: blocks of the store whose writes are counted at the device. lookup_blocks: keys of a
    match. lag_blocks: of 737,280 bytes, brought down in each of lag_rounds. image_bytes: of the fresh filesystem."""

    large: Shape = Shape(2 * MIB, 16)
    middle: Shape = Shape(360 * 1024, 32)
    small: Shape = Shape(64 * 1024, 128)
    rounds: int = 15
    durability: str = "batch"
    ring_bytes: int = 192 * MIB
    churn_bytes: int = 192 * MIB
    churn_turns: int = 5
    records: int = 100_000
    lookup_blocks: int = 1000
    lag_blocks: int = 729
    lag_rounds: int = 5
    host_blocks: int = 16
    image_bytes: int = 3 * GIB

    def ring_batches(self, shape: Shape) -> int:
        """How many batches a contestant keeps."""
        return max(2, self.ring_bytes // shape.batch_bytes)


def quick(plan: Plan) -> Plan:
    """Everything once and small: shows that it runs, and not how fast."""
    return replace(
        plan,
        large=Shape(2 * MIB, 2),
        middle=Shape(360 * 1024, 3),
        small=Shape(64 * 1024, 16),
        rounds=1,
        ring_bytes=8 * MIB,
        churn_bytes=24 * MIB,
        records=2000,
        lookup_blocks=64,
        lag_blocks=16,
        lag_rounds=1,
        host_blocks=2,
        image_bytes=400 * MIB,
    )
