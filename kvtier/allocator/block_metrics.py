"""BlockMetrics: how long blocks live in the cache, how long they lie unused before they go, and how often they return.

Owns: the open lives of the blocks it drew, and the records of ended ones until they are fetched. Decides nothing.
Always:  a block has at most one open life, from when it is taken to when what it holds is evicted or it is taken again;
         memory is bounded: an open life keeps its latest uses, and of the records the latest stay.
Units:   seconds, by a clock that the caller hands in; blocks (index).

Drawn by chance, for reading the clock and keeping lives costs more than the pool's own work. Rates are small, so it is
not each block that is asked but the distance to the next drawn one that is drawn: a geometric number.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.errors import UsageError

USES_KEPT = 4  # of an open life, as vLLM 0.32 keeps: three gaps
DISTANCE_MAX = 1e18  # blocks; no pool takes so many


@dataclass(frozen=True, slots=True)
class BlockLife:
    """One life of a block.

    lifetime_s: since it was taken. idle_s: since it was last used, which being taken is, too. reuse_gaps_s: between
    the latest `USES_KEPT` requests that found it; being taken is none of them.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


@dataclass(slots=True)
class _OpenLife:
    taken_s: float
    uses_s: tuple[float, ...] = ()  # the latest ones; a deque for each would take ten times the memory

    def ended(self, now_s: float) -> BlockLife:
        uses = self.uses_s
        gaps = tuple([later - earlier for earlier, later in itertools.pairwise(uses)])
        return BlockLife(now_s - self.taken_s, now_s - (uses[-1] if uses else self.taken_s), gaps)


class BlockMetrics:
    """The lives of some blocks of one pool, which calls `taken`, `touched`, `evicted` and `reset`; you call `take`.

    dropped: records that were lost, ever, because nobody fetched them in time.
    """

    def __init__(
        self, now: Callable[[], float], sample_rate: float = 0.01, *, seed: int = 0, records_max: int = 10_000
    ) -> None:
        """now: seconds that never go back, such as `MonotonicClock().now`. sample_rate: the share of blocks, 0 to 1.

        seed: of the draws. records_max: kept between two calls of `take`. Raises UsageError for what cannot be meant.
        """
        if not callable(now):
            raise UsageError(f"now is {now!r}; give a function, such as kvtier.clock.MonotonicClock().now")
        if type(sample_rate) not in (int, float) or not 0.0 <= sample_rate <= 1.0:
            raise UsageError(f"sample_rate is {sample_rate!r}; give a share of the blocks, 0 to 1")
        if type(seed) is not int:
            raise UsageError(f"seed is {seed!r}; give an integer")
        if type(records_max) is not int or records_max < 1:
            raise UsageError(f"records_max is {records_max!r}; give a number of records from 1 on")
        self.sample_rate = sample_rate
        self.dropped = 0
        self._now = now
        self._random = Random(seed)
        self._open: dict[int, _OpenLife] = {}
        self._records: deque[BlockLife] = deque(maxlen=records_max)
        self._distance = self._draw()  # blocks to be taken before the next one that is drawn

    def taken(self, blocks: Sequence[int]) -> None:
        """These leave the free ones with nothing in them: what was open ends, and some begin a new life."""
        self.evicted(blocks)
        if self._distance >= len(blocks):
            self._distance -= len(blocks)
            return
        now_s, position = self._now(), self._distance
        while position < len(blocks):
            self._open[blocks[position]] = _OpenLife(now_s)
            position += 1 + self._draw()
        self._distance = position - len(blocks)

    def touched(self, blocks: Sequence[int]) -> None:
        """A request found these."""
        known = list(self._known(blocks))
        if known:
            now_s = self._now()
            for block in known:
                life = self._open[block]
                life.uses_s = (*life.uses_s[1 - USES_KEPT :], now_s)

    def evicted(self, blocks: Sequence[int]) -> None:
        """What these hold cannot be found any more; one without an open life is passed over."""
        known = dict.fromkeys(self._known(blocks))
        if known:
            now_s = self._now()
            for block in known:
                self._record(self._open.pop(block).ended(now_s))

    def reset(self) -> None:
        """All prefixes were forgotten at once, which tells nothing about eviction: lives and records go, too."""
        self._open.clear()
        self._records.clear()

    def take(self) -> list[BlockLife]:
        """The lives that ended since the last call, in that order."""
        records = list(self._records)
        self._records.clear()
        return records

    def _known(self, blocks: Sequence[int]) -> Iterator[int]:
        return filter(self._open.__contains__, blocks)

    def _record(self, life: BlockLife) -> None:
        self.dropped += len(self._records) == self._records.maxlen
        self._records.append(life)

    def _draw(self) -> int:
        """How many blocks are passed over before the next drawn one, if each is drawn with the same chance."""
        if self.sample_rate == 1.0:
            return 0
        if self.sample_rate == 0.0:
            return int(DISTANCE_MAX)
        passed = math.log(1.0 - self._random.random()) / math.log1p(-self.sample_rate)
        return int(min(passed, DISTANCE_MAX))
