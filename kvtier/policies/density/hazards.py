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
steepest line from (T(x), F(x)) to a later point of the curve: one upper hull, built from the right, gives all ages.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import expm1

from kvtier.policies.density.ages import BUCKETS, EDGES
from kvtier.policies.density.classes import ENDED, ENDED_SHARED, neighbours

PRIOR = 0.3  # hazard times age of a block of which nothing is known
_POOL_BLOCKS = 1000.0  # what the prior weighs against all classes
_CLASS_BLOCKS = 100.0  # what all classes weigh against one
_BELIEVED = {ENDED: 0.05, ENDED_SHARED: 0.2}  # of the hazard of all classes, before anything was learned of these
_YOUNG_SHARE = 0.02  # ages under this quantile of returns are one bucket

Row = list[float]  # one number per bucket


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

    def note_loss(self, class_: int, age: int) -> None:
        """A block of this class is not watched any more, and was not used up to this age."""
        self._row(self.lost, class_)[bisect_right(EDGES, age)] += 1.0

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
        self._set_span(alive)
        widths = self._widths()
        tables = {class_: self._exposed(class_, alive, widths) for class_ in sorted({*self.used, *self.lost, *alive})}
        prior = [PRIOR / middle for middle in _middles(self.edges, widths)]
        pooled = _hazard([(1.0, *table) for table in tables.values()], prior, _POOL_BLOCKS, widths)
        self.pooled = _worths(pooled, widths)
        self.worths = {}
        for class_ in tables:
            near = [(weight, *tables[other]) for other, weight in neighbours(class_) if other in tables]
            expected = [_BELIEVED.get(class_, 1.0) * rate for rate in pooled]
            self.worths[class_] = _worths(_hazard(near, expected, _CLASS_BLOCKS, widths), widths)
        for rows in (self.used, self.lost):
            for class_, row in rows.items():
                rows[class_] = [count * faded for count in row]

    def _set_span(self, alive: dict[int, Row]) -> None:
        """Which buckets are worth telling apart: not those where hardly anything returns, nor those nobody reaches."""
        returns = [sum(column) for column in zip(*self.used.values(), strict=True)] or [0.0] * BUCKETS
        few, below, first = _YOUNG_SHARE * sum(returns), 0.0, 0
        while first < BUCKETS - 3 and below + returns[first] <= few:
            below += returns[first]
            first += 1
        reached = (b for rows in (self.lost, alive) for row in rows.values() for b in range(BUCKETS) if row[b])
        self.first, self.last = first, min(max(max(reached, default=first) + 1, first + 2), BUCKETS - 1)
        self.edges = EDGES[self.first : self.last]

    def _widths(self) -> Row:
        edges = self.edges
        between = (float(after - before) for before, after in pairwise(edges))
        return [float(edges[0]), *between, edges[-1] / 2]

    def _exposed(self, class_: int, alive: dict[int, Row], widths: Row) -> tuple[Row, Row]:
        """Uses per bucket, and accesses that blocks of this class spent in it."""
        used, lost, living = (self._folded(rows.get(class_)) for rows in (self.used, self.lost, alive))
        exposure, above = [0.0] * len(widths), 0.0
        for at in reversed(range(len(widths))):  # who ends later crosses all of a bucket, who ends in it half
            ending = used[at] + lost[at] + living[at]
            exposure[at] = (above + ending / 2) * widths[at]
            above += ending
        return used, exposure

    def _folded(self, row: Row | None) -> Row:
        if row is None:
            return [0.0] * (self.last - self.first + 1)
        return [sum(row[: self.first + 1]), *row[self.first + 1 : self.last], sum(row[self.last :])]


def _middles(edges: Sequence[int], widths: Row) -> Row:
    begins = [0, *edges]
    return [begin + width / 2 for begin, width in zip(begins, widths, strict=True)]


def _hazard(members: list[tuple[float, Row, Row]], prior: Row, prior_blocks: float, widths: Row) -> Row:
    """Uses per block and access in each bucket. members: (weight, uses, exposure)."""
    hazard = []
    for at, (width, expected) in enumerate(zip(widths, prior, strict=True)):
        uses = exposure = 0.0
        for weight, used, exposed in members:
            uses += weight * used[at]
            exposure += weight * exposed[at]
        hazard.append((uses + prior_blocks * width * expected) / (exposure + prior_blocks * width))
    return hazard


def _worths(hazard: Row, widths: Row) -> Row:
    """Per bucket the steepest line to a later point of the curve of uses over time kept."""
    uses, kept, alive = [0.0], [0.0], 1.0
    for rate, width in zip(hazard, widths, strict=True):
        used = -expm1(-rate * width)
        uses.append(uses[-1] + alive * used)
        kept.append(kept[-1] + alive * (used / rate if used > 0.0 else width))
        alive *= 1.0 - used
    worths, hull = [0.0] * len(widths), [len(widths)]
    for at in reversed(range(len(widths))):
        steepest = _slope(uses, kept, at, hull[-1])
        while len(hull) > 1 and (next_ := _slope(uses, kept, at, hull[-2])) >= steepest:
            hull.pop()
            steepest = next_
        worths[at] = steepest
        hull.append(at)
    return worths


def _slope(uses: Row, kept: Row, begin: int, end: int) -> float:
    time = kept[end] - kept[begin]
    return (uses[end] - uses[begin]) / time if time > 0.0 else 0.0
