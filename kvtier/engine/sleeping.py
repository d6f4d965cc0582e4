"""Sleep: the top tier's memory goes back to the machine while nobody needs it, and comes back at the same addresses.

    AWAKE --begin--> SAVING --nothing more can be saved--> EMPTYING --no copy is left--> UNMAPPING --done--> ASLEEP
      ^                |                                                                    |                  |
      +----- wake -----+                               +---------- the driver refuses ------+                  |
      +------------------------------------------------+-------------------------- wake, first memory mapped --+

Owns: where the top tier stands in this, and what lay in it. Dirty blocks are copied to the tier below first; what
finds no room there is dropped and counted. Always: it begins only when nobody holds a
lease, and from then on nobody gets a slot; memory goes when no batch under way touches the tier. A match outlives it:
it pins what lies below afterwards.

Units: granules, slots, bytes, blocks, seconds of the engine's clock.
"""

from enum import Enum
from itertools import islice

from kvtier.cache.residency import Residency
from kvtier.cache.staying import NotDemotable
from kvtier.cache.transitions import Move
from kvtier.engine.demotion import Demotions
from kvtier.engine.flight import Flight
from kvtier.engine.promotion import Promotions
from kvtier.engine.resizing import SLOTS_AT_ONCE, Resizes
from kvtier.events import Reason
from kvtier.types import Outcome, Remap, TransferBatch

TOP = 0
SETBACKS_MAX = 3  # stores that fail or find no room before the rest is given up


class Stage(Enum):
    """Where the tier stands."""

    AWAKE = "awake"
    SAVING = "saving"
    EMPTYING = "emptying"
    UNMAPPING = "unmapping"
    ASLEEP = "asleep"


class Sleep:
    """The top tier's. `ended` collects (ticket, bytes given back, blocks dropped) of those who asked for it."""

    def __init__(
        self,
        residency: Residency,
        flight: Flight,
        promotions: Promotions,
        demotions: Demotions,
        resizes: Resizes,
    ) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._promotions = promotions
        self._demotions = demotions
        self._resizes = resizes
        self.stage = Stage.AWAKE
        self.granules: tuple[int, ...] = ()  # that had memory when it last went to sleep
        self.contents: list[int] = []  # what lay in it then, used last first
        self.ended: list[tuple[int, int, int]] = []
        self._tickets: list[int] = []
        self._dropped_blocks = 0
        self._setbacks = 0
        self._seen_arrivals = -1
        self._wakes: list[int] = []  # tickets of who wants it awake once it sleeps

    # ------------------------------------------------------------ what happens

    def begin(self, ticket: int) -> None:
        """Go to sleep; nobody holds a lease. Asked for again, it is answered with the first."""
        if self.stage is Stage.ASLEEP and not self._resizes.is_active(TOP):
            self.ended.append((ticket, 0, 0))
            return
        self._tickets.append(ticket)
        self._resizes.ended += [(waiting, 0) for waiting in self._wakes]
        self._wakes.clear()
        if self.stage in (Stage.AWAKE, Stage.ASLEEP):
            self._resizes.stop(TOP)
            self._fall()

    def _fall(self) -> None:
        self.stage = Stage.SAVING
        self._residency.levels[TOP].asleep = True
        self._residency.counters.add("sleeps")
        self._dropped_blocks = 0
        self._setbacks = self._setbacks_below()
        self._seen_arrivals = -1
        self._promotions.give_up_all()

    def wake(self, ticket: int) -> bool:
        """Become awake again. False if there is nothing to map: it was not asleep, or is not any more."""
        level = self._residency.levels[TOP]
        if self.stage in (Stage.EMPTYING, Stage.UNMAPPING):
            self._wakes.append(ticket)
            return True
        if self.stage is Stage.SAVING:
            self._stay_as_it_is()
        if not self.missing_granules:
            return False
        self._resizes.begin(ticket, TOP, len(level.granules) + self.missing_granules, self.granules)
        return True

    @property
    def missing_granules(self) -> int:
        """How many it had before it slept and has not now."""
        return max(0, len(self.granules) - len(self._residency.levels[TOP].granules))

    @property
    def missing_bytes(self) -> int:
        """The same in bytes."""
        return self.missing_granules * self._granule_bytes

    def resized(self) -> None:
        """Its size was chosen anew: that of before does not matter any more."""
        self.granules = ()

    def mapped(self) -> None:
        """A remap has ended that was none of ours: with the first memory it is awake."""
        level = self._residency.levels[TOP]
        if self.stage is Stage.ASLEEP and level.granules:
            self.stage = Stage.AWAKE
            level.asleep = False

    def settled(self, outcome: Outcome) -> None:
        """The memory went back, or the driver refused: then it is awake, and empty."""
        level = self._residency.levels[TOP]
        freed_bytes = 0
        if outcome.done:
            freed_bytes = len(level.granules) * self._granule_bytes
            self.granules = tuple(sorted(level.granules.union(self.granules)))
            level.granules, level.capacity_bytes = set(), 0
            self.stage = Stage.ASLEEP
        else:
            self._resizes.readmit(TOP)
            self._stay_as_it_is()
        self._answer(freed_bytes)
        wakes, self._wakes = self._wakes, []
        for ticket in wakes:
            if not self.wake(ticket):
                self._resizes.ended.append((ticket, len(level.granules) * self._granule_bytes))

    def give_up(self) -> list[int]:
        """The device is lost. Returns the tickets that have no answer."""
        tickets = self._tickets + self._wakes
        self._tickets, self._wakes, self.contents = [], [], []
        self.stage = Stage.AWAKE
        return tickets

    # ------------------------------------------------------------ steps

    def plan(self) -> None:
        """Before stores are planned: say which blocks are to go down now."""
        if self.stage is not Stage.SAVING or self._resizes.is_active(TOP) or self._directory.tiers == 1:
            return
        if self._seen_arrivals == self._flight.arrivals:
            return
        self._seen_arrivals = self._flight.arrivals
        staying, hottest = NotDemotable(self._directory, TOP), self._hottest()
        # A disk has room for all, and those copied last stay in the memory above it; else the first ones find what room
        # there is.
        order = reversed(hottest) if self._residency.levels[-1].persistent else hottest
        self._demotions.evacuate(TOP, islice((h for h in order if h not in staying), SLOTS_AT_ONCE))

    @property
    def is_leaving(self) -> bool:
        """Whether what lies in it is on its way out: nobody should pin it."""
        return self.stage in (Stage.SAVING, Stage.EMPTYING)

    def is_to_be_emptied(self, now_s: float) -> bool:
        """Asked when all else is planned: nobody touches the tier, and what is dirty while nothing moves stays so."""
        if self.stage is Stage.SAVING:
            return not self._is_touched() and not (self._dirty() and self._goes_on(now_s))
        return self.stage is Stage.EMPTYING

    def empty(self) -> list[TransferBatch]:
        """Let copies go, some at a time; nobody pins one. After the last one the memory goes."""
        level = self._residency.levels[TOP]
        if self.stage is Stage.SAVING:
            self.stage = Stage.EMPTYING
            self._demotions.evacuate(TOP, ())
            self.contents = self._hottest()
        self._let_go()
        if self._directory.ready[TOP]:
            return []
        if not level.granules:  # it was asked to sleep again before it had any
            self._stay_as_it_is()
            return []
        self._resizes.withdraw_free(TOP)
        self.stage = Stage.UNMAPPING
        return [self._flight.depart_remap(TOP, Remap(sleep=True))]

    def wake_at_s(self, now_s: float) -> float | None:
        """At once, while it is being emptied."""
        return now_s if self.stage is Stage.EMPTYING else None

    # ------------------------------------------------------------ inside

    def _hottest(self) -> list[int]:
        """What lies in the tier, used last first."""
        policy = self._residency.levels[TOP].policy
        return policy.candidates(len(policy))[::-1]

    def _dirty(self) -> int:
        return self._directory.idle[TOP] - self._directory.idle_clean[TOP]

    def _is_touched(self) -> bool:
        """Whether something may still read or write its slots."""
        lanes = (lane for lane, count in self._flight.batches.items() if count)
        return self._resizes.is_active(TOP) or self._promotions.wanted > 0 or any(TOP in lane for lane in lanes)

    def _goes_on(self, now_s: float) -> bool:
        """Whether there may be room below in a moment: something moves, or a tier is left alone after a failure."""
        if self._setbacks_below() - self._setbacks >= SETBACKS_MAX:
            return False
        if any(level.blocked_until_s > now_s for level in self._residency.levels[TOP + 1 :]):
            return True
        lanes = ((source, target) for (source, target), count in self._flight.batches.items() if count)
        return any(source <= target or source not in self._directory.bypassed for source, target in lanes)

    def _setbacks_below(self) -> int:
        return sum(level.setbacks for level in self._residency.levels[TOP + 1 :])

    def _let_go(self) -> None:
        counters, directory = self._residency.counters, self._directory
        for handle in directory.ready_in(TOP)[:SLOTS_AT_ONCE]:
            clean = directory.tiers > 1 and directory.is_clean(handle, TOP)
            self._dropped_blocks += not clean
            counters.add("slept_dropped", int(not clean))
            reason = Reason.RECLAIMED if clean else Reason.DROPPED_DIRTY
            counters.add_tier(TOP, reason.value)
            self._residency.lose(handle, TOP, Move.RECLAIM, reason)

    def _stay_as_it_is(self) -> None:
        """Awake, unless it had no memory yet."""
        level = self._residency.levels[TOP]
        self.stage = Stage.AWAKE if level.granules else Stage.ASLEEP
        level.asleep = not level.granules
        self._demotions.evacuate(TOP, ())
        self._answer(0)

    def _answer(self, freed_bytes: int) -> None:
        self.ended += [(ticket, freed_bytes, self._dropped_blocks) for ticket in self._tickets]
        self._tickets.clear()

    @property
    def _granule_bytes(self) -> int:
        geometry = self._residency.levels[TOP].geometry
        assert geometry is not None, "only a tier whose memory comes and goes sleeps"
        return geometry.granule_bytes
