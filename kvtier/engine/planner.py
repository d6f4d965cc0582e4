"""Which blocks move, and what their moving meant.

Owns the batches under way. `plan` emits new ones, loads before stores; `apply` takes the terminal acknowledgement
of one and updates the residency, block by block: a batch may half fail. A result that was overtaken by a drop or
reset is discarded, and only then is its place free again.

Units: handles, seconds of the engine's clock. Nothing here waits; the executor carries batches out.
"""

from kvtier.cache.leases import Arrival
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import Move, State
from kvtier.engine.breaker import Breakers
from kvtier.engine.capacities import Capacities
from kvtier.engine.demotion import STARVED_S, Demotions
from kvtier.engine.drops import Drops
from kvtier.engine.flight import Flight, Underway
from kvtier.engine.pressure import DiskPressure
from kvtier.engine.promotion import Promotions
from kvtier.engine.rates import Rates
from kvtier.engine.resizing import Resizes
from kvtier.engine.scrubbing import Scrubs
from kvtier.engine.sidecar import Sidecars
from kvtier.engine.sleeping import Sleep
from kvtier.errors import InvariantError
from kvtier.events import Reason
from kvtier.types import BatchDone, LayerPart, Outcome, Remap, Status, Transfer, TransferBatch

BLAME = {Status.CORRUPT: Reason.CONDEMNED, Status.MISSING: Reason.LOST, Status.FAILED: Reason.LOST}
READ_COUNTERS = {Status.CORRUPT: "corrupt", Status.MISSING: "missing"}


class Planner:
    """Plans transfers over a residency and settles their outcomes."""

    def __init__(
        self,
        residency: Residency,
        sidecars: Sidecars,
        rates: Rates,
        queue_bytes: int,
        parts: tuple[LayerPart, ...] = (),
    ) -> None:
        """`parts`: how streamed blocks are copied into the top tier."""
        self.residency = self._residency = residency
        self._directory = residency.directory
        self._sidecars = sidecars
        self.flight = Flight(residency, sidecars, rates)
        self.promotions = Promotions(residency, self.flight, parts)
        self.breakers = Breakers(residency, self.flight, self.promotions)
        self.demotions = Demotions(residency, self.flight, sidecars.wear, queue_bytes)
        self._pressure = DiskPressure(residency, self.flight, self.demotions)
        self.resizes = Resizes(residency, self.flight, self.demotions)
        self.sleep = Sleep(residency, self.flight, self.promotions, self.demotions, self.resizes)
        self._scrubs = Scrubs(residency, self.flight, self.promotions, self.breakers, sidecars)
        self.capacities = Capacities(residency, self.flight, self.resizes.ended)
        self.drops = Drops(residency, self.flight, self.demotions)
        self.devices_lost: list[int] = []  # tiers, as batches have told since they were last looked at
        self.failed_loads: list[int] = []  # blocks that did not arrive, since they were last looked at
        self.order_waits = False  # a flush is done but for the order, which goes out after the write under way

    # ------------------------------------------------------------ plan

    def watch(self, now_s: float) -> None:
        """Look after the tiers that may hang or are left alone, before anything is planned."""
        self.flight.now_s = now_s
        self.breakers.watch(now_s)

    def plan(self, now_s: float) -> list[TransferBatch]:
        """Everything that should move now. Each batch must be answered by exactly one `apply`."""
        self.flight.now_s = now_s
        self._sidecars.wear.look(now_s)
        batches = self.promotions.batches()
        batches += self.drops.batches()
        batches += self.capacities.batches()
        batches += self._pressure.batches(now_s)
        batches += self.resizes.batches()
        self.sleep.plan()
        batches += self.demotions.batches(now_s)
        batches += self._notes(now_s)
        batches += self._scrubs.batches(now_s)
        self.resizes.conclude()
        return batches

    def _notes(self, now_s: float) -> list[TransferBatch]:
        """Batches of nothing but a sidecar: where it has grown long, or when a flush has written all its blocks."""
        flushing = self.demotions.flushed_all()
        batches, waiting = [], False
        self.order_waits = False
        for tier in self._residency.orders:
            if not self._sidecars.due(tier, now_s, flushing=flushing):
                continue
            if self.flight.writes(tier):
                waiting, self.order_waits = True, flushing
            elif self._residency.levels[tier].blocked_until_s > now_s:
                waiting = True
            else:
                batches.append(self.flight.depart((tier, tier), ()))
        if flushing and not waiting:
            self.demotions.flush_noted()
        return batches

    def _may_note(self, tier: int, now_s: float) -> bool:
        return not self.flight.writes(tier) and self._residency.levels[tier].blocked_until_s <= now_s

    # ------------------------------------------------------------ apply

    def enqueued(self, batch_id: int, arrival: Arrival) -> list[int]:
        """A stream has taken a batch into the top tier. Returns its blocks that somebody may wait for."""
        return self.promotions.enqueued(self.flight.handles_of(batch_id), arrival)

    def apply(self, done: BatchDone, now_s: float) -> list[int]:
        """Settle a batch. Returns the handles whose way to the top tier ended, well or not."""
        self.flight.now_s = now_s
        if self._scrubs.settled(done, now_s):
            return []
        underway = self.flight.arrive(done)
        if underway is None:
            self._residency.counters.add("late_results")
            return []
        batch = underway.batch
        done = self._about_devices(batch, done)
        if len(done.outcomes) != batch.outcomes:
            raise InvariantError(f"batch {done.batch_id}: {len(done.outcomes)} outcomes for {batch.outcomes} items")
        if batch.capacity_bytes is not None:
            self.capacities.settled(batch, done.outcomes[0])
            return []
        if batch.remap is not None:
            self._remapped(batch.target, batch.remap, done.outcomes[0])
            return []
        moved, left = done.outcomes[: len(batch.transfers)], done.outcomes[len(batch.transfers) :]
        if batch.sidecar:
            self._sidecars.settled(batch.target, dict(batch.sidecar), left[-1])
            left = left[:-1]
        broken = any(self._is_broken(*end) for end in zip(batch.transfers, moved, strict=True))
        self._left(underway, left, now_s)
        resolved: list[int] = []
        for transfer, outcome in zip(batch.transfers, moved, strict=True):
            resolved += self._moved(batch, transfer, outcome, now_s)
        if batch.target > batch.source:
            self._note_target(batch.target, moved, now_s)
        elif batch.target < batch.source:
            failed = {Status.FAILED} == {outcome.status for outcome in moved}
            self.breakers.ended(batch.source, underway.since_s, now_s, failed=failed)
        if broken or any(outcome.status is Status.DEVICE_LOST for outcome in done.outcomes):
            self.devices_lost.append(min(batch.source, batch.target))
        return resolved

    def _remapped(self, tier: int, remap: Remap, outcome: Outcome) -> None:
        if outcome.status is Status.DEVICE_LOST:
            self.devices_lost.append(tier)  # and with it go those who wait
        elif remap.sleep:
            self.sleep.settled(outcome)
        else:
            self.resizes.settled(tier, remap, outcome)
            self.sleep.mapped()

    def _is_broken(self, transfer: Transfer, outcome: Outcome) -> bool:
        """Whether a copy failed after a lease was told that it comes: only a device that is lost does that."""
        return not outcome.done and self.promotions.arrival(transfer.handle) is not None

    def _about_devices(self, batch: TransferBatch, done: BatchDone) -> BatchDone:
        """What a disk says of a lost device is a failure of its own: it knows of none."""
        levels = self._residency.levels
        if not (levels[batch.source].persistent or levels[batch.target].persistent):
            return done
        failed = (
            Outcome(Status.FAILED, detail=o.detail) if o.status is Status.DEVICE_LOST else o for o in done.outcomes
        )
        return BatchDone(done.batch_id, tuple(failed))

    def _moved(self, batch: TransferBatch, transfer: Transfer, outcome: Outcome, now_s: float) -> list[int]:
        handle, source, target = transfer.handle, batch.source, batch.target
        overtaken = not self._directory.is_ready(handle, source)  # dropped: its place may hold another block by now
        blamed = outcome.status in BLAME and self._knows_source(batch, outcome)
        if not (overtaken and blamed) or outcome.status is Status.FAILED:
            self._count(source, target, transfer, outcome)
        if self._directory.state(handle, target) is not State.FILLING:
            self._residency.counters.add("late_results")
            self._residency.counters.add_tier(target, "late")
            if self._residency.levels[target].persistent:
                if outcome.done:
                    self._directory.put_at(handle, target, outcome.place, outcome.generation)  # to erase it there
                else:
                    self._residency.never_written(handle, target)
        elif outcome.done:
            self._residency.filled(handle, target, outcome.place, outcome.generation)
        else:
            self._residency.lose(handle, target, Move.FAILED, Reason.FAILED)
            self.failed_loads += [handle] * (target < source)
        if blamed and not overtaken:
            if outcome.status is Status.CORRUPT and self._residency.levels[source].persistent:
                self._sidecars.condemn(source, transfer, outcome, now_s)
            self._residency.lose(handle, source, Move.RECLAIM, BLAME[outcome.status])
        key = transfer.key
        resolved = self._onwards(handle, target)
        self._residency.unhold([handle], source)
        self._residency.unhold([handle], target)
        if target > source:
            self.demotions.flushes.tried(
                handle, key, lowest=self._residency.levels[target].persistent, done=outcome.done
            )
        return resolved

    def _knows_source(self, batch: TransferBatch, outcome: Outcome) -> bool:
        """Whether a failure is the source's: a block that a disk cannot read must not be found, and fail, again and
        again (vllm#49176), nor one in memory that does not decode. Who only writes knows nothing of it."""
        persistent = self._residency.levels[batch.source].persistent
        return batch.target < batch.source and (persistent or outcome.status is Status.CORRUPT)

    def _onwards(self, handle: int, target: int) -> list[int]:
        """After a hop up: the next one, or the end of the promotion (whose own hold `_moved` lets go at the top)."""
        if not self.promotions.arrived(handle, target):
            return []
        if target != self.promotions.goal:  # it ended on the way
            if self._directory.state(handle, 0) is State.FILLING:
                self._residency.lose(handle, 0, Move.FAILED, Reason.FAILED)
            self._residency.unhold([handle], 0)
        return [handle]

    def _left(self, underway: Underway, outcomes: tuple[Outcome, ...], now_s: float) -> None:
        tier = underway.batch.target
        if underway.batch.drop is not None:
            self.drops.settled(underway.batch.batch_id, outcomes[0])
            outcomes = outcomes * len(underway.leaving)
        for copy, outcome in zip(underway.leaving, outcomes, strict=True):
            if outcome.status in (Status.DONE, Status.MISSING):
                self._residency.erased(copy, tier)
            else:
                self._residency.kept(copy, tier)
        if any(outcome.status in (Status.FAILED, Status.NO_ROOM) for outcome in outcomes):
            self.demotions.blocked(tier, now_s)  # NO_ROOM: not even an eviction can be written down

    def _note_target(self, tier: int, outcomes: tuple[Outcome, ...], now_s: float) -> None:
        statuses = {outcome.status for outcome in outcomes}
        if Status.DONE in statuses:
            self.demotions.recovered(tier)
        if Status.FAILED in statuses:
            self.demotions.blocked(tier, now_s)  # if it took some of it, as for the first time
        if Status.NO_ROOM in statuses:
            self._residency.levels[tier].starved_until_s = now_s + STARVED_S

    def _count(self, source: int, target: int, transfer: Transfer, outcome: Outcome) -> None:
        counters = self._residency.counters
        if outcome.done:
            counters.add_tier(source, "read_blocks")
            counters.add_tier(source, "read_bytes", transfer.length_bytes)
            counters.add_tier(target, "written_blocks")
            counters.add_tier(target, "written_bytes", transfer.length_bytes)
            counters.add_tier(target, "promoted_blocks" if target < source else "demoted_blocks")
        elif outcome.status is Status.NO_ROOM:
            counters.add_tier(target, "no_room")
        elif target > source:
            counters.add_tier(target, "write_failed")
        else:
            counters.add_tier(source, READ_COUNTERS.get(outcome.status, "read_failed"))

    # ------------------------------------------------------------ asked

    def stats(self, tier: int) -> dict[str, int | float | str | None]:
        """How a tier is doing: what is queued for it, how fast it was read lately, and whether it is left alone."""
        lanes = [lane for lane in self.flight.bytes if tier in lane]
        up = self.promotions.path(tier)[:1]
        seconds = self.flight.rates.seconds_per_byte(up[0], self.flight.now_s) if up else None
        return {
            "circuit": self.breakers.circuit(tier).value,
            "reading_bytes": sum(self.flight.bytes[lane] for lane in lanes if lane[0] == tier),
            "writing_bytes": (writing_bytes := self.flight.writing_bytes(tier)),
            "waiting_bytes": sum(self.promotions.waiting_bytes((tier, target)) for target in range(tier)),
            "load_bytes_per_s": None if not seconds else int(1 / seconds),
            **self._sidecars.wear.stats(tier, self.flight.now_s, writing_bytes),
        }

    # ------------------------------------------------------------ time

    def wake_at_s(self, now_s: float) -> float | None:
        """When to plan again though nothing happens: a tier's pause ends, or it is time to ask one how it is doing."""
        times = [level.blocked_until_s for level in self._residency.levels if level.blocked_until_s > now_s]
        waiting = (t for t in self._residency.orders if self._may_note(t, now_s))
        watched = (self._pressure.wake_at_s(), self.sleep.wake_at_s(now_s), self.breakers.wake_at_s())
        others = [*watched, self._scrubs.wake_at_s(), *map(self._sidecars.due_at_s, waiting)]
        return min([*times, *(at_s for at_s in others if at_s is not None)], default=None)
