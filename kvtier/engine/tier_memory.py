"""TierMemory: what callers ask of a tier's memory: a size, to sleep, to wake. Who asked what, and how it was answered.
The size of a store is its capacity.

Owns: the tickets of those who wait for a wake, and the matches that lost their pins to a sleep. Always: each ticket is
answered once, with the memory that is there. Units: bytes, granules.
"""

from collections.abc import Callable, Mapping, Sequence

from kvtier.allocator.geometry import Geometry
from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.cache.leases import Match
from kvtier.cache.pins import unpin
from kvtier.engine.answers import Answer, Resized, Slept, Woken
from kvtier.engine.planner import Planner
from kvtier.engine.prefetch import Prefetch
from kvtier.engine.reservations import Reservations
from kvtier.engine.rewarming import Rewarming
from kvtier.engine.sleeping import TOP
from kvtier.errors import UsageError
from kvtier.registry import suggestion
from kvtier.types import TransferBatch


class TierMemory:
    """Of all tiers of one core. `matches` are those that are not given back, by number; `look` finds and pins anew."""

    def __init__(
        self,
        planner: Planner,
        leases: Reservations,
        prefetch: Prefetch,
        matches: Mapping[int, Match],
        look: Callable[[Match], None],
    ) -> None:
        self._residency = residency = planner.residency
        self._planner = planner
        self._sleep = planner.sleep
        self._leases = leases
        self._prefetch = prefetch
        self._rewarming = Rewarming(residency, planner.promotions)
        self._matches = matches
        self._look = look
        self._names: Sequence[str] = [level.name for level in residency.levels]
        self._unpinned: set[int] = set()  # matches whose pins went with the top tier's memory, until it is gone
        self._wakes: set[int] = set()  # tickets of those who wait for it
        self._awake: list[tuple[int, Woken]] = []  # answers to those who did not have to wait

    # ------------------------------------------------------------ asked for

    def resize(self, ticket: int, tier_name: str, size_bytes: int) -> None:
        """See `Core.submit_resize`."""
        if tier_name not in self._names:
            raise UsageError(f"there is no tier {tier_name!r}; {suggestion(tier_name, self._names)}")
        tier = self._names.index(tier_name)
        self._residency.levels[tier].expect_awake()
        room = self._residency.levels[tier].room
        if room is not None and room.capacities is not None:
            self._planner.capacities.begin(ticket, tier, size_bytes)
            return
        geometry = self._residency.levels[tier].geometry
        if geometry is None:
            raise UsageError(f"tier {tier_name} cannot be resized while it is open; change its capacity and open anew")
        granules = min(size_bytes // geometry.granule_bytes, geometry.granules)
        least = geometry.granules_of(NULL_SLOT + 1).stop
        if granules < least:
            least_bytes = least * geometry.granule_bytes
            raise UsageError(
                f"{size_bytes} bytes are too few: memory comes in granules of {geometry.granule_bytes}, and the null "
                f"block and one more take at least {least_bytes}"
            )
        self._planner.resizes.begin(ticket, tier, granules)
        if tier == TOP:
            self._sleep.resized()

    def sleep(self, ticket: int) -> None:
        """See `Core.submit_sleep`. Raises UsageError while leases are held, or if that memory does not come and go."""
        self._sleeping_geometry()
        self._leases.refuse_if_leased()
        self._prefetch.leave(TOP)
        self._rewarming.end()
        self._sleep.begin(ticket)

    def wake(self, ticket: int, *, restore: bool) -> None:
        """See `Core.submit_wake`."""
        geometry = self._sleeping_geometry()
        self._rewarming.begin(self._sleep.contents if restore else ())
        if self._sleep.wake(ticket):
            self._wakes.add(ticket)
        else:
            there = len(self._residency.levels[TOP].granules)
            self._awake.append((ticket, Woken(there * geometry.granule_bytes, 0)))

    def _sleeping_geometry(self) -> Geometry:
        self._residency.levels[TOP].expect_device()
        geometry = self._residency.levels[TOP].geometry
        if geometry is None:
            raise UsageError(
                f"tier {self._names[TOP]} keeps its memory as long as it is open: only a gpu tier sleeps; where an "
                "engine has its own above it, that engine does"
            )
        return geometry

    # ------------------------------------------------------------ polled

    def plan(self, now_s: float) -> list[TransferBatch]:
        """Everything that should move now, memory included."""
        self._rewarming.advance(growing=self._planner.resizes.is_active(TOP))
        if self._sleep.is_leaving:
            self._unpin()
        batches = self._planner.plan(now_s)
        if self._sleep.is_to_be_emptied(now_s):
            batches += self._sleep.empty()
        if self._unpinned and not self._sleep.is_leaving:
            self._pin_again()
        return batches

    def answers(self) -> list[tuple[int, Answer]]:
        """Tickets answered since the last call."""
        resizes, slept = self._planner.resizes.ended, self._sleep.ended
        answers: list[tuple[int, Answer]] = [(ticket, self._resized(ticket, size)) for ticket, size in resizes]
        answers += [(ticket, Slept(freed, dropped)) for ticket, freed, dropped in slept]
        answers += self._awake
        resizes.clear()
        slept.clear()
        self._awake.clear()
        return answers

    def give_up(self, tier: int) -> list[int]:
        """The tier's device is lost. Returns the tickets that have no answer."""
        waiting = self._planner.resizes.give_up(tier)
        if tier == TOP:
            waiting += self._sleep.give_up()
        self._wakes.difference_update(waiting)
        return waiting

    # ------------------------------------------------------------ inside

    def _unpin(self) -> None:
        """Matches do not keep the top tier awake."""
        for match in self._matches.values():
            if any(tier == TOP for _, tier in match.pins):
                unpin(self._residency, match)
                self._unpinned.add(match.match_id)

    def _pin_again(self) -> None:
        """They pin what lies below, once nothing lies above."""
        for match_id in self._unpinned & self._matches.keys():
            self._look(self._matches[match_id])
        self._unpinned.clear()

    def _resized(self, ticket: int, size_bytes: int) -> Resized | Woken:
        if ticket not in self._wakes:
            return Resized(size_bytes)
        self._wakes.discard(ticket)
        return Woken(size_bytes, self._sleep.missing_bytes)
