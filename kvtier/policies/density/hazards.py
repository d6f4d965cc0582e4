"""`Hazards`: how likely a block of a class is to be used again at an age, and what it is worth to keep it.

Owns: per class and bucket of ages, how many blocks were used again at that age, and how many were lost sight of
unused; and the table of worths made from these, which stays as it is until `learn` is called again.
Always:  counts are >= 0; a worth is expected uses per access of keeping, >= 0.
Units:   ages and times in accesses, counts in blocks.

Hazard. A block that ends at some age was exposed to all younger buckets. Uses over exposure would be the hazard, but
one class alone has seen too little. So neighbouring classes count with it; their sum is drawn, with the weight of a
few blocks, to the hazard of all classes together (a part of it where a hint says that nobody will come); and that one
to PRIOR / age, which says that a block becomes less likely to be used the longer it was not: with no data, the order
is that of LRU.

Worth. At age x it is the greatest, over all ages y > x, of expected uses by y over the expected time that the block is
kept until it is used or reaches y (the index of Gittins). With F(y) = P(used by y) and T(y) = that time, this is the
steepest line from (T(x), F(x)) to a later point of the curve.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.policies.density.ages import BUCKETS, EDGES
from kvtier.policies.density.classes import CLASSES, ENDED, ENDED_SHARED, neighbours

PRIOR = 0.3  # hazard times age of a block of which nothing is known
_POOL_BLOCKS = 1000.0  # what the prior weighs against all classes
_CLASS_BLOCKS = 100.0  # what all classes weigh against one
_BELIEVED = {ENDED: 0.05, ENDED_SHARED: 0.2}  # of the hazard of all classes, before anything was learned of these
_YOUNG_SHARE = 0.02  # the quantile of returns under which ages are young
_YOUNG_BUCKETS = 3  # so many of them are told apart, for who waits to come back at its time is worth less at first


Row = list[float]  # one number per bucket
Table = NDArray[np.float64]  # by class and bucket


def _nearness() -> Table:
    weights = np.zeros((CLASSES + 1, CLASSES + 1))
    for class_ in range(1, CLASSES + 1):
        for other, weight in neighbours(class_):
            weights[class_, other] = weight
    return weights


_NEAR = _nearness()  # what the second class weighs for the first


class Hazards:
    """Learns from `used` and `lost`; answers `worth`."""

    def __init__(self) -> None:
        self.used: dict[int, Row] = {}
        self.lost: dict[int, Row] = {}
        self.first, self.last = 0, BUCKETS - 1  # the buckets below and above are one with these
        self.edges: Sequence[int] = EDGES  # between first and last
        self.worths: dict[int, Row] = {}  # by class, of the buckets first .. last
        self.pooled: Row = []  # of classes that have none; empty before there is data

    def note_use(self, class_: int, age: int, blocks: int = 1) -> None:
        """So many blocks of this class were used again at this age."""
        self._row(self.used, class_)[bisect_right(EDGES, age)] += blocks

    def note_losses(self, class_: int, age: int, blocks: int) -> None:
        """Blocks of this class, of this age and each one access younger than the one before, are not watched any more,
        and were not used."""
        row = self._row(self.lost, class_)
        while blocks > 0:
            bucket = bisect_right(EDGES, age)
            count = min(blocks, age - EDGES[bucket - 1] + 1) if bucket else blocks
            row[bucket] += count
            age, blocks = age - count, blocks - count

    @staticmethod
    def _row(rows: dict[int, Row], class_: int) -> Row:
        row = rows.get(class_)
        if row is None:
            row = rows[class_] = [0.0] * BUCKETS
        return row

    def worth(self, class_: int, age: int) -> float:
        """Expected uses of such a block per access of keeping it."""
        row = self.worths.get(class_, self.pooled)
        return row[bisect_right(self.edges, age)] if row else 0.0

    def age_min(self, class_: int, age: int) -> int:
        """The youngest age at which such a block is worth as much as at this one."""
        at = bisect_right(self.edges, age)
        return self.edges[at - 1] if at and self.worths.get(class_, self.pooled) else 0

    def outlook(self, class_: int, age: int) -> tuple[float, int | None]:
        """What it is worth, and the age at which that changes (None: never)."""
        at = bisect_right(self.edges, age)
        row = self.worths.get(class_, self.pooled)
        return row[at] if row else 0.0, self.edges[at] if at < len(self.edges) else None

    # ------------------------------------------------------------ learning

    def learn(self, living: Iterable[tuple[int, int, int]], faded: float) -> None:
        """Make the table anew. living: (class, age, blocks) of all that are watched. faded: what counts keep."""
        alive: dict[int, Row] = {}
        for class_, age, blocks in living:
            self._row(alive, class_)[bisect_right(EDGES, age)] += blocks
        classes = sorted({*self.used, *self.lost, *alive})
        tables = [_table(rows, classes) for rows in (self.used, self.lost, alive)]
        self._set_span(*tables)
        widths = self._widths()
        used, lost, present = (self._folded(table) for table in tables)
        exposed = _exposed(used + lost + present, widths)
        prior = PRIOR / (np.array([0, *self.edges]) + widths / 2)
        pooled = _hazards(used.sum(0), exposed.sum(0), prior, _POOL_BLOCKS * widths)
        near = _NEAR[np.ix_(classes, classes)]
        expected = np.array([[_BELIEVED.get(class_, 1.0)] for class_ in classes]).reshape(-1, 1) * pooled
        by_class = _hazards(near @ used, near @ exposed, expected, _CLASS_BLOCKS * widths)
        self.pooled, *worths = _worths(np.vstack((pooled, by_class)), widths)
        self.worths = dict(zip(classes, worths, strict=True))
        for rows in (self.used, self.lost):
            for class_, row in rows.items():
                rows[class_] = [count * faded for count in row]

    def _set_span(self, used: Table, lost: Table, present: Table) -> None:
        """Which buckets are worth telling apart: not those where hardly anything returns, nor those nobody reaches."""
        returned = np.cumsum(used.sum(0))
        young = int(np.searchsorted(returned, _YOUNG_SHARE * returned[-1], side="right")) - _YOUNG_BUCKETS
        self.first = min(max(0, young), BUCKETS - 3)
        reached = np.flatnonzero((lost + present).any(0))
        farthest = int(reached[-1]) if len(reached) else self.first
        self.last = min(max(farthest + 1, self.first + 2), BUCKETS - 1)
        self.edges = EDGES[self.first : self.last]

    def _widths(self) -> NDArray[np.float64]:
        return np.diff([0.0, *self.edges, 1.5 * self.edges[-1]])

    def _folded(self, table: Table) -> Table:
        """The buckets below and above the span are one with its first and last."""
        first, last = self.first, self.last
        below, above = table[:, : first + 1].sum(1), table[:, last:].sum(1)
        return np.column_stack((below, table[:, first + 1 : last], above))


def _table(rows: dict[int, Row], classes: Sequence[int]) -> Table:
    nothing = [0.0] * BUCKETS
    return np.array([rows.get(class_, nothing) for class_ in classes]).reshape(-1, BUCKETS)


def _exposed(ending: Table, widths: NDArray[np.float64]) -> Table:
    """Accesses that blocks spent in each bucket: who ends later crosses all of it, who ends in it half."""
    not_younger = np.cumsum(ending[:, ::-1], axis=1)[:, ::-1]
    exposed: Table = (not_younger - ending / 2) * widths
    return exposed


def _hazards(used: Table, exposed: Table, prior: Table, prior_exposure: NDArray[np.float64]) -> Table:
    """Uses per block and access in each bucket."""
    hazards: Table = (used + prior_exposure * prior) / (exposed + prior_exposure)
    return hazards


def _worths(hazards: Table, widths: NDArray[np.float64]) -> list[Row]:
    """Per row and bucket the steepest line to a later point of the curve of uses over time kept."""
    used = -np.expm1(-hazards * widths)
    alive = np.cumprod(np.insert(1.0 - used, 0, 1.0, axis=1), axis=1)[:, :-1]
    kept = np.divide(used, hazards, out=np.broadcast_to(widths, used.shape).copy(), where=used > 0.0)
    uses, times = (np.cumsum(np.insert(alive * step, 0, 0.0, axis=1), axis=1) for step in (used, kept))
    rise = uses[:, None, 1:] - uses[:, :-1, None]
    run = times[:, None, 1:] - times[:, :-1, None]
    slopes = np.divide(rise, run, out=np.zeros(run.shape), where=run > 0.0)  # backwards there is no time
    worths: list[Row] = slopes.max(axis=2).tolist()
    return worths
