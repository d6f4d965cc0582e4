"""The governor: how much of a match is worth loading, for a load must never be slower than computing (DESIGN 8).

Owns: nothing; it asks the measured speed of the ways up (`Rates`), what queues there, and the engine's speed of
computing (`PrefillSpeed`). A prefix is taken whole, up to a cut, or not at all:

    | found in the match                             |
    | loaded                    | computed           |
                                ^ where (time to compute all before it) - (time to load it) is largest,
                                  of the places that are reached before the deadline

Always: what lies where it is read costs nothing; what somebody else brings already costs only the wait for it. As long
as one of the two speeds is not known everything is loaded, within the deadline. A tier that was declined on an old
measurement is measured again, by bringing up one block for nobody, so that it can become worth it again.
Units: tokens, bytes, seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, lcm

from kvtier.blocks.spec import BlockSpec
from kvtier.cache.leases import Decision
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.promotion import Promotions
from kvtier.engine.rates import Lane, Rates

MARGIN = 1.1  # estimates err: a load that would just be worth it may be none
REMEASURE_S = 10.0
MEMORY_S_PER_BYTE = 1 / 2e9  # between two memory tiers, until it is measured


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring steps of a prefix that come the same way. `joined`: somebody else brings them already."""

    tier: int
    joined: bool
    steps: int


class Governor:
    """Decides for one match at a time. `sizes` and `specs`: block_tokens and shape of the blocks, by group."""

    def __init__(
        self,
        residency: Residency,
        promotions: Promotions,
        rates: Rates,
        prefill: PrefillSpeed,
        specs: Sequence[BlockSpec],
        sizes: Sequence[int],
        governed: bool,
    ) -> None:
        """governed: False leaves everything to the deadline."""
        self._directory = residency.directory
        self._promotions = promotions
        self._rates = rates
        self._prefill = prefill
        self._governed = governed
        self._goal = promotions.goal  # from here on nothing needs to be loaded
        self._sizes = tuple(sizes)
        self._step = lcm(*sizes)
        self._step_bytes = sum(spec.block_bytes * (self._step // size) for spec, size in zip(specs, sizes, strict=True))

    def choose(
        self, hits: Sequence[Sequence[int]], sources: Sequence[Sequence[int]], deadline_s: float, now_s: float
    ) -> Decision:
        """How many tokens of the blocks `hits`, whose fastest copies lie in tiers `sources`, to bring up."""
        found = min(len(row) * size for row, size in zip(hits, self._sizes, strict=True)) // self._step * self._step
        if not any(tier > self._goal for row in sources for tier in row):
            return Decision(found, found, 0.0, self.prefill_s(found), "resident")
        if not self._governed or not self._prefill.known:
            return Decision(found, found, None, self.prefill_s(found), "unmeasured" if self._governed else "off")
        return self._best(list(self._runs(hits, sources, found // self._step)), found, deadline_s - now_s, now_s)

    def measure_again(
        self, hits: Sequence[Sequence[int]], sources: Sequence[Sequence[int]], decision: Decision, now_s: float
    ) -> None:
        """After a decision against a disk: see to it that the next one does not rest on the same old measurement."""
        if decision.tokens_chosen == decision.tokens_found:
            return
        start = decision.tokens_chosen // self._sizes[0]
        declined = zip(hits[0][start:], sources[0][start:], strict=True)
        for handle, tier in ((h, t) for h, t in declined if self._promotions.is_persistent(t)):
            lane = self._promotions.path(tier)[0]
            measured_s = self._rates.measured_at_s(lane)
            old = measured_s is None or now_s - measured_s > REMEASURE_S
            if old and not self._rates.underway_bytes(lane) and not self._promotions.waiting_bytes(lane):
                self._promotions.sample(handle, tier)
            return

    def patience_s(self, decision: Decision) -> float:
        """How long waiting for the chosen part can be worth it: no longer than computing it."""
        governed = self._governed and self._prefill.known
        return self._prefill.seconds(decision.tokens_chosen) if governed else inf

    def prefill_s(self, tokens: int) -> float | None:
        """How long computing so many tokens takes; None if nobody knows."""
        return self._prefill.seconds(tokens) if self._prefill.known else None

    # ------------------------------------------------------------ inside

    def _best(self, runs: Sequence[_Run], found: int, patience_s: float, now_s: float) -> Decision:
        load_s, steps = 0.0, 0
        chosen, chosen_load_s, gain_s, late = 0, 0.0, 0.0, False
        loading: dict[Lane, int] = {}  # bytes of the prefix so far, by lane
        for run in runs:
            count = run.steps
            if run.tier > self._goal:
                self._add(loading, run)
                whole_s = self._load_s(loading, now_s)
                if whole_s is None:
                    return Decision(found, found, None, self.prefill_s(found), "unmeasured")
                if whole_s > patience_s:  # as much of this run as there is time for
                    share = (patience_s - load_s) / (whole_s - load_s) if whole_s > load_s else 0.0
                    count, late = int(max(0.0, share) * run.steps), True
                    whole_s = load_s + (whole_s - load_s) * count / run.steps
                load_s = whole_s
            steps += count
            saved_s = self._prefill.saved(steps * self._step, found)
            if saved_s - MARGIN * load_s > gain_s or (not load_s and not gain_s):
                chosen, chosen_load_s, gain_s = steps * self._step, load_s, saved_s - MARGIN * load_s
            if late:
                break
        why = "faster" if chosen == found else "deadline" if late and chosen == steps * self._step else "slower"
        known_s = chosen_load_s if chosen_load_s or chosen == found else self._all_s(runs, now_s)
        return Decision(found, chosen, known_s, self.prefill_s(found), why)

    def _all_s(self, runs: Sequence[_Run], now_s: float) -> float | None:
        """Until the whole prefix has come up; None if nobody knows."""
        loading: dict[Lane, int] = {}
        for run in runs:
            if run.tier > self._goal:
                self._add(loading, run)
        return self._load_s(loading, now_s)

    def _add(self, loading: dict[Lane, int], run: _Run) -> None:
        for lane in self._promotions.path(run.tier):
            loading[lane] = loading.get(lane, 0) + self._step_bytes * run.steps * (not run.joined)

    def _load_s(self, loading: dict[Lane, int], now_s: float) -> float | None:
        """Until all of this has come up, behind what is on its way; None if nobody knows."""
        total_s = 0.0
        for lane, length_bytes in loading.items():
            seconds = self._seconds_per_byte(lane, now_s)
            if seconds is None:
                return None
            ahead = self._rates.underway_bytes(lane) + self._promotions.waiting_bytes(lane)
            total_s += (ahead + length_bytes) * seconds
        return total_s

    def _seconds_per_byte(self, lane: Lane, now_s: float) -> float | None:
        """Measured, by this process or an earlier one; else, for a disk, what writing to it takes; else, for memory, a
        careful guess.

        Never less than a first read shows that has not come back yet.
        """
        source, _ = lane
        measured = self._rates.seconds_per_byte(lane, now_s)
        if measured is None:
            measured = self._rates.read_from(source)
        if measured is None:
            measured = self._rates.seconds_per_byte((source - 1, source), now_s)
        if measured is None and not self._promotions.is_persistent(source):
            measured = MEMORY_S_PER_BYTE
        stuck = self._rates.stuck_per_byte(lane, now_s)
        return max(measured or 0.0, stuck) if measured is not None or stuck else None

    def _runs(self, hits: Sequence[Sequence[int]], sources: Sequence[Sequence[int]], steps: int) -> Iterator[_Run]:
        ways = self._ways_of(hits[0], sources[0]) if len(hits) == 1 else self._slowest(hits, sources, steps)
        for (tier, joined), same in groupby(ways[:steps]):
            yield _Run(tier, joined, len(list(same)))

    def _ways_of(self, handles: Sequence[int], tiers: Sequence[int]) -> list[tuple[int, bool]]:
        state = self._directory.state
        return [
            (tier, tier > self._goal and state(handle, self._goal) is State.FILLING)
            for handle, tier in zip(handles, tiers, strict=True)
        ]

    def _slowest(
        self, hits: Sequence[Sequence[int]], sources: Sequence[Sequence[int]], steps: int
    ) -> list[tuple[int, bool]]:
        """With several groups, each step comes as its slowest block does."""
        rows = [self._ways_of(*row) for row in zip(hits, sources, strict=True)]
        counts = [self._step // size for size in self._sizes]
        return [
            max(
                (way for row, count in zip(rows, counts, strict=True) for way in row[i * count : (i + 1) * count]),
                key=lambda way: (way[0], not way[1]),
            )
            for i in range(steps)
        ]
