"""`Fronts`: of each class the two blocks that compete, and which of all these is worth least.

Owns: a memory of what was found, so that a look costs as little as possible. All of it can be forgotten at any time.
Always:  unless it is in `_changed`, `_heads[front]` is the block that competes there, and its worth is right until its
         age reaches the next bucket, which `_until` knows; a run in `_runs` is the youngest of its class.
Units:   handles, times in accesses.

The two are the block that was used longest ago, and the deepest one of the youngest run: of those used last, one right
after the other. For a class may be worth more the older it is, as is what comes back at regular times: were the oldest
one to leave, it would always be the one that is about to come back. But what is learned is uncertain, and who was just
used leaves only if it is worth clearly less.

A front is a number: the class for its oldest, the class and CLASSES for its youngest.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from kvtier.policies.density.classes import CLASSES
from kvtier.policies.density.hazards import Hazards
from kvtier.policies.orders import Orders

NOBODY = -1
CLEARLY_LESS = 0.85  # with 1, much of what is gained where little fits is lost again to noise
_FRONTS_MAX = 2 * CLASSES + 1
_HEAP_MAX = 16 * _FRONTS_MAX  # entries, most of which do not count any more
_Front = tuple[float, int, int]  # worth, time, front: in this order they compete


class Fronts:
    """Hears of every block that leaves a class's list (`left`) or joins one (`came`), before it does."""

    def __init__(self, rings: Orders, times: Sequence[int], hazards: Hazards) -> None:
        self._rings, self._times, self._hazards = rings, times, hazards
        self._heads = [NOBODY] * _FRONTS_MAX
        self._runs: list[deque[int] | None] = [None] * (CLASSES + 1)  # shallow to deep; None: not known
        self._changed: set[int] = set(range(1, _FRONTS_MAX))
        self._fronts: list[_Front | None] = [None] * _FRONTS_MAX
        self._order: list[_Front] = []  # a heap; an entry counts if it is the front's own
        self._until: list[tuple[int, _Front]] = []  # a heap of times at which worths change

    # ------------------------------------------------------------ what changes

    def left(self, handles: Collection[int], class_: int) -> None:
        """These leave that class's list, or go to its end."""
        if self._heads[class_] in handles:
            self._changed.add(class_)
        run = self._runs[class_]
        if run is None:
            return
        deepest, leaving = run[-1], {*handles}
        while run and run[-1] in leaving:
            run.pop()
        if run and any(self._times[handle] >= self._times[run[-1]] for handle in leaving):
            run.clear()  # one goes from amidst them: what is above it is the run now
        self._runs[class_] = run or None
        if not run or run[-1] != deepest:
            self._changed.add(class_ + CLASSES)

    def came(self, class_: int, handles: Sequence[int], since: int) -> None:
        """These come to the end of that class's list, deepest first, the first of them used at this time."""
        if self._heads[class_] == NOBODY:
            self._changed.add(class_)
        run = self._runs[class_]
        if run is not None and since - self._times[run[0]] <= 1:
            run.extendleft(handles)  # its deepest is the same
            return
        if run is not None or not self._rings.lens[class_]:
            self._runs[class_] = deque(reversed(handles))
        self._changed.add(class_ + CLASSES)

    # ------------------------------------------------------------ who competes

    def least(self, now: int) -> int:
        """The handle that is worth least; NOBODY if there is none."""
        fronts, until, order = self._fronts, self._until, self._order
        while until and until[0][0] <= now:
            _, front = heappop(until)
            if fronts[front[2]] is front:
                self._changed.add(front[2])
        if self._changed:
            for number in self._changed:
                self._look(number, now)
            self._changed.clear()
        while order and fronts[order[0][2]] is not order[0]:
            heappop(order)
        if len(order) > _HEAP_MAX:
            order[:] = [front for front in fronts if front is not None]
            heapify(order)
        if len(until) > _HEAP_MAX:
            until[:] = [(at, front) for at, front in until if fronts[front[2]] is front]
            heapify(until)
        return self._heads[order[0][2]] if order else NOBODY

    def _look(self, number: int, now: int) -> None:
        class_ = number - CLASSES if number > CLASSES else number
        head = next(self.youngest(class_) if number > CLASSES else iter(self._rings.first(class_)), NOBODY)
        self._heads[number] = head
        if head == NOBODY:
            self._fronts[number] = None
            return
        time = self._times[head]
        worth, changes_at = self._hazards.outlook(class_, now - time)
        self._fronts[number] = front = (competing_worth(worth, number), time, number)
        heappush(self._order, front)
        if changes_at is not None:
            heappush(self._until, (time + changes_at, front))

    def is_one_run(self, class_: int) -> bool:
        """Whether all blocks of a class are known to be one run: then both its fronts name the same ones."""
        run = self._runs[class_]
        return run is not None and len(run) == self._rings.lens[class_]

    def youngest(self, class_: int) -> Iterator[int]:
        """The blocks of a class from its youngest run to its oldest, of each run the deepest first."""
        run = self._runs[class_]
        if run is None:
            back = self._rings.walk_back(class_)
            run = deque(self._next_run(back, next(back, NOBODY))[0])
            self._runs[class_] = run or None
        yield from reversed(run)
        back = islice(self._rings.walk_back(class_), len(run), None)
        following = next(back, NOBODY)
        while following != NOBODY:
            members, following = self._next_run(back, following)
            yield from reversed(members)

    def _next_run(self, back: Iterator[int], first: int) -> tuple[list[int], int]:
        """A run, shallow to deep, whose shallowest is `first`; and who comes after it, walking back."""
        run: list[int] = []
        while first != NOBODY and (not run or self._times[run[-1]] - self._times[first] <= 1):
            run.append(first)
            first = next(back, NOBODY)
        return run, first


def competing_worth(worth: float, number: int) -> float:
    """What a block of this worth is taken for in a front of this number."""
    return worth / CLEARLY_LESS if number > CLASSES else worth
