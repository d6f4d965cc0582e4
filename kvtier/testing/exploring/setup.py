"""`Setup`: which cache one run explores, drawn from its seed, and how that cache is built.

Owns no state. Always: the same random numbers give the same setup. Small on purpose: with few slots everything that
can get in each other's way does.

Units: slots, pages of 4 KiB, seconds of simulated time, fractions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.spec import block_specs
from kvtier.cache.level import Level, Room
from kvtier.policies import POLICIES
from kvtier.policies.admission import ADMISSIONS
from kvtier.policies.gate import Gate
from kvtier.policies.wear import DAY_S, WearBudget
from kvtier.testing.exploring.store import ExploredStore
from kvtier.tiers.base import SupportsArray, SupportsMeter, SupportsRemap, SupportsSlots, Tier
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.host import HostTier
from kvtier.types import PAGE_BYTES, GroupSpec, ModelSpec, page_aligned

SHAPES = (("gpu", "host", "disk"), ("gpu", "disk"), ("host", "disk"), ("gpu", "host"), ("gpu",))
SHAPE_WEIGHTS = (60, 15, 15, 7, 3)
# Per group: tokens and heads of a block. 256 bytes for each token and head: 2 KiB, 4 KiB, and 6 KiB in two pages.
GROUPS = (((4, 2),), ((4, 2), (4, 2)), ((4, 2), (8, 2)), ((4, 2), (4, 6)))
EXTENT_PAGES = (1, 2, 4)
MEMORY_POLICIES = ("lru", "lru", "lru", "arc", "arc", "arc", "hit_density")
POLICIES_DRAWN = {"gpu": MEMORY_POLICIES, "host": MEMORY_POLICIES, "disk": ("lru", "arc")}
ADMISSION_RULES = ("second_access", "ghost_hit", "tinylfu")
CHOOSY, BUDGETED, IN_PLACE = 0.2, 0.35, 0.2  # odds
SCRUB_PAGES_PER_S = (1, 100)


@dataclass(frozen=True, slots=True)
class Setup:
    """One cache: its tiers, fastest first, and how rough its disk is."""

    shape: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]
    policies: tuple[str, ...]  # by tier
    gpu_slots: int
    host_slots: int
    extents: int
    extent_pages: int
    batch_pages: int
    watermarks: tuple[float, float]
    queue_bytes: int
    admissions: tuple[str, ...]  # by tier
    wear: tuple[int, float] | None  # of the disk: bytes saved up at most, and bytes per second
    metered: bool  # whether the disk tells what it writes
    prefetch_budget: float
    lookahead_requests: int
    governed: bool
    pin_quota: float  # of each tier
    scrub_bytes_per_s: int  # how fast the disk is looked through for nobody; 0: it is not
    in_place: bool  # what lies in host memory is read there
    direct: bool  # whether the top tier's slots can be a disk's buffer
    slow: float  # share of the batches that take time
    hung: float  # share of those that end only when all does
    rough: float  # how often the disk begins to fail

    @classmethod
    def drawn(cls, rng: Random) -> "Setup":
        """One of the many."""
        (shape,) = rng.choices(SHAPES, SHAPE_WEIGHTS)
        groups = rng.choice(GROUPS)
        low = rng.choice((0.1, 0.25, 0.4))
        extent_pages = rng.choice(EXTENT_PAGES) * (2 if _pages_max(groups) > 1 else 1)
        return cls(
            shape=shape,
            groups=groups,
            policies=tuple(rng.choice(POLICIES_DRAWN[name]) for name in shape),
            gpu_slots=rng.randint(6, 12) * len(groups),
            host_slots=rng.randint(3, 9) * len(groups),
            extents=max(2, rng.randint(8, 24) * len(groups) // extent_pages),
            extent_pages=extent_pages,
            batch_pages=rng.choice((1, 2, 4, 8)),
            watermarks=(low, low + rng.choice((0.1, 0.25))),
            queue_bytes=rng.choice((8 << 10, 256 << 10)),
            admissions=tuple(_admission(rng, index) for index, _ in enumerate(shape)),
            wear=_wear(rng) if "disk" in shape and rng.random() < BUDGETED else None,
            metered=rng.random() < 0.5,
            prefetch_budget=rng.choice((0.0, 0.25, 0.5)),
            lookahead_requests=rng.choice((1, 2, 8)),
            governed=rng.random() < 0.8,
            pin_quota=rng.choice((0.0, 0.25, 0.5, 0.5, 1.0)),
            scrub_bytes_per_s=rng.choice((0, *SCRUB_PAGES_PER_S)) * PAGE_BYTES if "disk" in shape else 0,
            in_place=shape[:2] == ("gpu", "host") and rng.random() < IN_PLACE,
            direct="host" not in shape or rng.random() < 0.6,
            slow=rng.choice((0.0, 0.3)),
            hung=rng.choice((0.0, 0.0, 0.0, 0.01)),
            rough=rng.choice((0.0, 1.0, 3.0)),
        )

    def model(self, epoch: str) -> ModelSpec:
        """A model of two layers whose blocks have these groups."""
        rows = tuple(GroupSpec("full", (0, 1), heads, 16, "float32", tokens) for tokens, heads in self.groups)
        return ModelSpec("explored", epoch, rows)

    @property
    def gpu_slots_max(self) -> int:
        """How far the gpu tier may grow."""
        return 2 * self.gpu_slots

    @property
    def stride_bytes(self) -> int:
        """Of a slot in memory."""
        return PAGE_BYTES * _pages_max(self.groups)

    def tiers(self, store: ExploredStore | None) -> list[Tier]:
        """The memory tiers, new, and the opened disk under them."""
        made: list[Tier] = []
        if "gpu" in self.shape:
            made.append(
                GpuTier.create(
                    name="gpu",
                    capacity_bytes=(self.gpu_slots + 1) * self.stride_bytes,
                    capacity_max_bytes=(self.gpu_slots_max + 1) * self.stride_bytes,
                    length_bytes_max=self.stride_bytes,
                )
            )
        if "host" in self.shape:
            capacity_bytes = self.host_slots * self.stride_bytes
            made.append(
                HostTier.create(
                    name="host",
                    capacity_bytes=capacity_bytes,
                    length_bytes_max=self.stride_bytes,
                    pin="off",
                    hugepages="off",
                )
            )
        return made if store is None else [*made, store]

    def levels(self, tiers: Sequence[Tier], store: ExploredStore | None, meter: SupportsMeter | None) -> list[Level]:
        """The deciding code's view of these tiers. store: the disk without its faults; meter: it, if it is asked."""
        levels = [self._level(index, tier) for index, tier in enumerate(tiers)]
        room = levels[-1].room
        if room is not None and meter is not None:
            levels[-1].room = replace(room, written=meter.written)
        if hasattr(store, "scrub"):
            levels[-1].scrub_bytes_per_s = self.scrub_bytes_per_s
        return levels

    def _level(self, index: int, tier: Tier) -> Level:
        traits = tier.traits
        memory = isinstance(tier, SupportsSlots)
        stride_bytes = tier.stride_bytes if isinstance(tier, SupportsSlots) else self._mean_bytes()
        blocks = max(1, traits.capacity_bytes // stride_bytes)
        level = Level(
            name=tier.name,
            policy=POLICIES.get(self.policies[index])(blocks),
            policy_name=self.policies[index],
            policy_blocks=blocks,
            batch_bytes=self.batch_pages * PAGE_BYTES,
            capacity_bytes=traits.capacity_bytes,
            stride_bytes=stride_bytes if memory else 0,
            host_addressable=traits.host_addressable and (self.direct or index > 0),
            reads_below=self.in_place and index == 0,
            low_watermark=self.watermarks[0],
            high_watermark=self.watermarks[1],
            gate=self._gate(index, blocks),
        )
        if memory:
            level.pool = SlotPool(traits.slots, null_slot=isinstance(tier, SupportsArray))
        elif isinstance(tier, ExploredStore):
            level.room = Room(tier.room, tier.neighbours, tier.used_bytes, tier.excess_bytes)
        if isinstance(tier, SupportsRemap):
            level.geometry, level.granules = tier.geometry, set(tier.granules_mapped)
            level.slots.withdraw({*range(traits.slots)}.difference(*tier.geometry.slots_whole(level.granules)))
        return level

    def _gate(self, index: int, blocks: int) -> Gate | None:
        """Who is let into a tier, as `engine.gates` has it."""
        budget = self.wear if self.shape[index] == "disk" else None
        if self.admissions[index] == "always" and budget is None:
            return None
        rule = ADMISSIONS.get(self.admissions[index])(blocks)
        return Gate(rule, blocks, None if budget is None else WearBudget(budget[1] * DAY_S, budget[0]))

    def _mean_bytes(self) -> int:
        specs = block_specs(self.model("any"))
        return sum(page_aligned(spec.block_bytes) for spec in specs) // len(specs)


def _admission(rng: Random, index: int) -> str:
    """Of a tier: mostly everybody, and whoever is written into the top tier."""
    return rng.choice(ADMISSION_RULES) if index and rng.random() < CHOOSY else "always"


def _wear(rng: Random) -> tuple[int, float]:
    """A budget that is used up in a few batches, and saved up again in seconds, or hardly ever."""
    return rng.choice((4, 16, 64)) * PAGE_BYTES, rng.choice((0.2, 2.0, 20.0)) * PAGE_BYTES


def _pages_max(groups: Sequence[tuple[int, int]]) -> int:
    return max(page_aligned(256 * tokens * heads) for tokens, heads in groups) // PAGE_BYTES
