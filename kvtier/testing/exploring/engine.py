"""`ExploredEngine`: one life of the production core and its tiers, from opening to crash or close.

Has no thread, loop or clock of its own. Owns the memory tiers and the batches under way. Always: the counters never
fall, and every move of a copy is noted for the coverage.

Units: seconds of simulated time, tier indexes.
"""

from random import Random

from kvtier.blocks.namespace import NamespaceTable, fingerprint
from kvtier.blocks.spec import block_specs
from kvtier.cache.transitions import Move, State
from kvtier.clock import ManualClock
from kvtier.engine.answers import Answer
from kvtier.engine.core import Core
from kvtier.engine.polled import Job, PolledSurface
from kvtier.policies.base import Policy
from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.setup import Setup
from kvtier.testing.exploring.store import Disk, ExploredStore
from kvtier.testing.exploring.streams import Coming
from kvtier.testing.exploring.underway import Flying, Underway
from kvtier.testing.faulty import FaultyTier, Odds
from kvtier.tiers.base import SupportsMeter, SupportsSlots, Tier
from kvtier.types import BatchDone, ModelSpec, TransferBatch

STRANGER = b"\x5a" * 32  # a namespace that only shifts the local ids of the others


class ExploredEngine:
    """A core over the tiers of a setup. `store` is the disk without its faults, `disk` its tier index; or None."""

    def __init__(
        self,
        setup: Setup,
        medium: Disk | None,
        clock: ManualClock,
        rng: Random,
        odds: Odds,
        epoch: str,
        coverage: Coverage,
    ) -> None:
        self.setup = setup
        self.clock = clock
        self.namespaces = NamespaceTable()
        if rng.random() < 0.5:
            self.namespaces.id_of(STRANGER, b"")
        self.store: ExploredStore | None = None if medium is None else medium.open(self.namespaces)
        self.faulty = None if self.store is None else FaultyTier(self.store, rng, odds)
        self.meter = self.store if setup.metered and isinstance(self.store, SupportsMeter) else None
        self.tiers = setup.tiers(self.faulty)
        self.top = _slots_of(self.tiers[0])
        self.specs = block_specs(setup.model(epoch))
        self.disk = None if self.store is None else len(self.tiers) - 1
        self.core = Core(
            setup.model(epoch),
            setup.levels(self.tiers, self.store, self.meter),
            self.namespaces,
            queue_bytes=setup.queue_bytes,
            prefetch_budget=setup.prefetch_budget,
            lookahead_requests=setup.lookahead_requests,
            governed=setup.governed,
            pin_quota=setup.pin_quota,
        )
        self.surface = PolledSurface(self.core)
        self._known: tuple[ModelSpec, bytes, int] | None = None
        self.directory = self.core.residency.directory
        self.underway = Underway(self.tiers, rng, setup.slow, setup.hung)
        self.acknowledged: list[BatchDone] = []  # the latest
        self.coverage = coverage
        self._note_moves(coverage)
        if self.store is not None and self.disk is not None:
            self.core.adopt(self.disk, self.store.scan(), self.store.sidecar(), clock.now())

    def _note_moves(self, coverage: Coverage) -> None:
        directory, move = self.directory, self.directory.move

        def noted(handle: int, tier: int, what: Move) -> State:
            coverage.moved(directory.state(handle, tier), what)
            return move(handle, tier, what)

        setattr(directory, "move", noted)  # noqa: B010  an observer, on this object alone

    @property
    def fingerprint(self) -> bytes:
        """Of the namespace that is looked up now."""
        return self._identity()[1]

    @property
    def namespace(self) -> int:
        """The local id of that namespace."""
        return self._identity()[2]

    def _identity(self) -> tuple[ModelSpec, bytes, int]:
        """A model, its fingerprint and local id: of the current one, digested once, for every check asks."""
        model = self.core.model
        if self._known is None or self._known[0] is not model:
            self._known = model, fingerprint(model), self.namespaces.id_of_model(model)
        return self._known

    # ------------------------------------------------------------ time

    def plan(self) -> list[TransferBatch]:
        """Let the core plan; chance says when what it planned ends."""
        now_s = self.clock.now()
        batches = self.core.plan(now_s)
        self.underway.depart(batches, now_s)
        return batches

    def enqueue(self, flying: Flying) -> None:
        """A device's stream takes a batch, and will carry it out."""
        flying.taken = True
        self.core.enqueued(flying.batch.batch_id, Coming(flying))

    def end(self, flying: Flying) -> BatchDone:
        """A batch ends, and the core hears of it."""
        done = self.underway.end(flying)
        self.core.apply(done, self.clock.now())
        self.acknowledged = [*self.acknowledged[-7:], done]
        return done

    def poll(self) -> list[tuple[int, Answer | Job]]:
        return self.surface.poll()

    def close(self) -> None:
        """Its memory is gone; the disk can be opened again."""
        for tier in self.tiers:
            tier.close()

    # ------------------------------------------------------------ asked

    @property
    def goal(self) -> int:
        """The tier into which blocks are brought to be read."""
        return int(self.setup.in_place)

    def shown(self, entry: int) -> memoryview:
        """What an entry of a block table shows: a slot of the top tier, or ~slot of the one below."""
        if entry >= 0:
            return self.top.slot(entry)
        return _slots_of(self.tiers[1]).slot(~entry)

    @property
    def policies(self) -> list[Policy]:
        """By tier; a disk's own, without what notes it down."""
        levels = self.core.residency.levels
        return [getattr(level.policy, "_policy", level.policy) for level in levels]

    def copies(self) -> list[tuple[int, int, State, int]]:
        """Handle, tier, state and place of each."""
        directory = self.directory
        return [
            (handle, tier, directory.state(handle, tier), directory.place(handle, tier))
            for handle in range(directory._rows)
            for tier in range(directory.tiers)
        ]

    def state(self) -> tuple[object, ...]:
        """States, places, order and slots: what an event may change, as plain data that can be compared."""
        directory, levels = self.directory, self.core.residency.levels
        orders = [(level.policy.candidates(len(level.policy)), level.policy.ghosts()) for level in levels]
        pools = [(lv.pool.slots_free, lv.pool.slots_quarantined) for lv in levels if lv.pool is not None]
        return self.copies(), orders, pools, directory.idle[:], len(self.core.planner.flight)

    def counters(self) -> dict[str, int]:
        """All of them, flat."""
        flat = dict(self.core.counters.engine())
        for tier, level in enumerate(self.core.residency.levels):
            flat |= {f"{level.name}.{name}": count for name, count in self.core.counters.of_tier(tier).items()}
        return flat


def _slots_of(tier: Tier) -> SupportsSlots:
    assert isinstance(tier, SupportsSlots)
    return tier
