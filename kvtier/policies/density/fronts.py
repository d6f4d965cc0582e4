"""`Fronts`: of each class the block that was used longest ago, and which of these is worth least.

Owns: a memory of what was found, so that a look costs as little as possible. All of it can be forgotten at any time.
Always:  unless its class is in `_changed`, `_heads[class]` is the first of the class's list, and its worth is right
         until its age reaches the next bucket, which `_until` knows.
Units:   handles, times in accesses.
"""

from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush

from kvtier.policies.density.classes import CLASSES
from kvtier.policies.density.hazards import Hazards
from kvtier.policies.orders import Orders

NOBODY = -1
_Front = tuple[float, int, int]  # worth, time, class: in this order they compete


class Fronts:
    """Hears of every block that leaves a class's list (`left`) or joins one (`came`)."""

    def __init__(self, rings: Orders, times: Sequence[int], hazards: Hazards) -> None:
        self._rings, self._times, self._hazards = rings, times, hazards
        self._heads = [NOBODY] * (CLASSES + 1)
        self._changed: set[int] = set(range(1, CLASSES + 1))
        self._fronts: list[_Front | None] = [None] * (CLASSES + 1)
        self._order: list[_Front] = []  # a heap; an entry counts if it is the class's own
        self._until: list[tuple[int, _Front]] = []  # a heap of times at which worths change

    def left(self, handles: Container[int], class_: int) -> None:
        """These are not in the list of that class any more, or at its end now."""
        if self._heads[class_] in handles:
            self._changed.add(class_)

    def came(self, class_: int) -> None:
        """There are more at the end of that class's list."""
        if self._heads[class_] == NOBODY:
            self._changed.add(class_)

    def least(self, now: int) -> int:
        """The handle that is worth least; NOBODY if there is none."""
        fronts, until, order = self._fronts, self._until, self._order
        while until and until[0][0] <= now:
            _, front = heappop(until)
            if fronts[front[2]] is front:
                self._changed.add(front[2])
        if self._changed:
            for class_ in self._changed:
                self._look(class_, now)
            self._changed.clear()
        while order and fronts[order[0][2]] is not order[0]:
            heappop(order)
        if len(order) > 16 * CLASSES:  # what does not count any more
            order[:] = [front for front in fronts if front is not None]
            heapify(order)
        return self._heads[order[0][2]] if order else NOBODY

    def _look(self, class_: int, now: int) -> None:
        head = next(iter(self._rings.first(class_)), NOBODY)
        self._heads[class_] = head
        if head == NOBODY:
            self._fronts[class_] = None
            return
        time = self._times[head]
        worth, changes_at = self._hazards.outlook(class_, now - time)
        self._fronts[class_] = front = (worth, time, class_)
        heappush(self._order, front)
        if changes_at is not None:
            heappush(self._until, (time + changes_at, front))
