"""Orders: handles in several orders, each handle in at most one of them; whoever is touched goes to the end.

Owns: the orders, nothing else. Each is a log that is only appended to: a handle that moves gets a new entry, and its
old one is struck out. That takes fewer stores than links to two neighbours, and none depends on the one before, so that
a long batch is a few assignments of numpy.
Always:  `where[handle]` names the order of a member and is NOWHERE for any other; a member has one entry, at
         `_places[handle]` in the log of its order; what stands before `_heads[order]` does not count, all else is
         STRUCK; `lens[order]` counts the members; after a move a log is at most twice as long, but for SLACK_ENTRIES.
Units:   handles, 0 <= handle <= INDEX_MAX. Five bytes per handle up to the largest one seen, four to eight per member.

Orders are numbered from 1, so that new cells, which are zero, are nowhere. What has to be put into the middle of an
order, or in front of it, needs links: `allocator.rings`.
"""

from array import array
from collections.abc import Container, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import NOWHERE, grown, stretch
from kvtier.errors import InvariantError

LONG_BATCH = 64  # handles; for fewer, a dozen calls of numpy cost more than a loop
SLACK_ENTRIES = 256  # so many struck ones are worth the ten microseconds in which numpy sweeps a short log
STRUCK = -1

Handles = Sequence[int] | NDArray[np.int64]


class Orders:
    """Verbs cost O(1) per handle, but for walking and `check`; the sweeps of a long log are among that.

    `where` and `lens` may be read directly, where a call per handle would cost more than the answer.
    """

    def __init__(self, orders: int) -> None:
        """Empty orders 1 .. `orders`."""
        self.where = bytearray()
        self.lens = [0] * (orders + 1)
        self._places = array("i")
        self._logs = [array("i") for _ in self.lens]
        self._heads = [0] * (orders + 1)

    def ring_of(self, handle: int) -> int:
        """The order that has it, or NOWHERE."""
        return self.where[handle] if 0 <= handle < len(self.where) else NOWHERE

    def walk(self, order: int) -> Iterator[int]:
        """The members from first to last. The order must not change meanwhile."""
        log, start, entries = self._logs[order], self._head(order), 8
        while start < len(log):
            for handle in log[start : start + entries]:  # a slice costs 200 ns, and saves 50 for each entry
                if handle >= 0:
                    yield handle
            start += entries
            entries = 64

    def members(self, order: int) -> NDArray[np.int32]:
        """As `walk`, all at once."""
        entries = _ints(self._logs[order])[self._heads[order] :]
        members: NDArray[np.int32] = entries[entries != STRUCK]
        return members

    def walk_back(self, order: int) -> Iterator[int]:
        """The members from last to first. The order must not change meanwhile."""
        log, head = self._logs[order], self._heads[order]
        for at in range(len(log) - 1, head - 1, -1):
            if log[at] >= 0:
                yield log[at]

    def first(self, *orders: int) -> list[int]:
        """The first member of the first of these orders that has one, alone in a list; an empty one if none has."""
        for order in orders:
            if self.lens[order]:
                return [self._logs[order][self._head(order)]]
        return []

    def _head(self, order: int) -> int:
        """Where the first member stands, or would be appended."""
        log, head = self._logs[order], self._heads[order]
        if head < len(log) and log[head] < 0:
            while head < len(log) and log[head] < 0:
                head += 1
            self._heads[order] = head
        return head

    def move(self, handles: Handles, order: int, sources: Container[int] | None = None) -> None:
        """Each becomes the last of `order`, in the given order, wherever it was before.

        sources: of those that are elsewhere only who is in one of these, the others are passed over. None: all, and
        who is nowhere becomes a member; raises InvariantError if one is no handle.
        """
        if len(handles) >= LONG_BATCH:
            self._move_many(np.asarray(handles, np.int64), order, sources)
            return
        where, places, lens, log = self.where, self._places, self.lens, self._logs[order]
        known, at, append = len(where), len(log), log.append
        for handle in handles:
            if not 0 <= handle < known:
                if sources is not None:
                    continue
                self._make_room(handle)
                known = len(where)
            left = where[handle]
            if left == order:
                log[places[handle]] = STRUCK
            else:
                if sources is not None and left not in sources:
                    continue
                if left:
                    self._logs[left][places[handle]] = STRUCK
                    lens[left] -= 1
                where[handle] = order
                lens[order] += 1
            places[handle] = at
            append(handle)
            at += 1
        if at > 2 * lens[order] + SLACK_ENTRIES:
            self._sweep(order)

    def _move_many(self, handles: NDArray[np.int64], order: int, sources: Container[int] | None) -> None:
        lowest, top = int(handles.min()), int(handles.max())
        if sources is None:
            self._make_room(lowest if lowest < 0 else top)
        elif lowest < 0 or top >= len(self.where):
            handles = handles[(handles >= 0) & (handles < len(self.where))]
        where, places, lens, log = _bytes(self.where), _ints(self._places), self.lens, self._logs[order]
        left = where[handles]
        if sources is not None and not (left == order).all():
            may = np.array([origin == order or origin in sources for origin in range(len(lens))])[left]
            handles, left = handles[may], left[may]
        before, begin = places[handles], len(log)
        places[handles] = ats = np.arange(begin, begin + len(handles), dtype=np.int32)
        if not (last := places[handles] == ats).all():  # of equal ones the last counts
            handles, left, before = handles[last], left[last], before[last]
            places[handles] = np.arange(begin, begin + len(handles), dtype=np.int32)
        for origin, count in enumerate(np.bincount(left).tolist()):
            if count and origin:
                _ints(self._logs[origin])[before[left == origin]] = STRUCK
                lens[origin] -= count
        where[handles] = order
        lens[order] += len(handles)
        log.frombytes(handles.astype(np.int32).tobytes())
        if len(log) > 2 * lens[order] + SLACK_ENTRIES:
            self._sweep(order)

    def marked(self, handles: NDArray[np.integer], orders: Container[int]) -> NDArray[np.bool_]:
        """Which of these are members of one of those orders."""
        known = handles < len(self.where)
        wanted = np.array([order in orders for order in range(256)], np.bool_)
        known[known] = wanted[_bytes(self.where)[handles[known]]]
        return known

    def remove(self, handle: int) -> None:
        """Take out a member. Raises InvariantError if it is none."""
        self.remove_all((handle,))

    def remove_all(self, handles: Handles) -> None:
        """Take out members. Raises InvariantError if one is none; those before it may be out by then."""
        if len(handles) >= LONG_BATCH:
            self._remove_many(np.asarray(handles, np.int64))
            return
        where, places, lens, logs, known = self.where, self._places, self.lens, self._logs, len(self.where)
        for handle in handles:
            order = where[handle] if 0 <= handle < known else NOWHERE
            if order == NOWHERE:
                raise InvariantError(f"orders: {handle} is not a member")
            where[handle] = NOWHERE
            logs[order][places[handle]] = STRUCK
            lens[order] -= 1

    def _remove_many(self, handles: NDArray[np.int64]) -> None:
        known, ordered = len(self.where), np.sort(handles)
        left = _bytes(self.where)[handles] if ordered[0] >= 0 and ordered[-1] < known else np.zeros(1, np.uint8)
        if not left.all() or (ordered[1:] == ordered[:-1]).any():
            raise InvariantError(f"orders: one of {len(handles)} is not a member, or is there twice")
        for order, count in enumerate(np.bincount(left).tolist()):
            if count:
                _ints(self._logs[order])[_ints(self._places)[handles[left == order]]] = STRUCK
                self.lens[order] -= count
        _bytes(self.where)[handles] = NOWHERE

    def pop(self, order: int, count: int) -> list[int]:
        """Take out the first `count` members, or all if there are fewer."""
        log, at, where = self._logs[order], self._head(order), self.where
        taken: list[int] = []
        while len(taken) < count and at < len(log):
            handle = log[at]
            at += 1
            if handle >= 0:
                where[handle] = NOWHERE
                taken.append(handle)
        self._heads[order] = at
        self.lens[order] -= len(taken)
        return taken

    def check(self) -> list[str]:
        """Read the logs and count the members."""
        findings = []
        for order in range(1, len(self.lens)):
            log, head = self._logs[order], self._heads[order]
            entries = [(at, log[at]) for at in range(head, len(log)) if log[at] != STRUCK]
            marked = self.where.count(order)
            if not len(entries) == marked == self.lens[order]:
                findings.append(f"order {order}: {len(entries)} entries, {marked} marked, {self.lens[order]} counted")
            if any(self.ring_of(handle) != order or self._places[handle] != at for at, handle in entries):
                findings.append(f"order {order}: an entry of a handle whose own is elsewhere")
        return findings

    def _make_room(self, handle: int) -> None:
        cells = grown(len(self.where), handle)
        if handle >= len(self.where):
            self.where.extend(bytes(cells - len(self.where)))
            stretch(self._places, cells)

    def _sweep(self, order: int) -> None:
        """Write the log anew, without what is struck out."""
        entries = np.array(self._logs[order][self._heads[order] :], np.int32)
        kept = entries[entries != STRUCK]
        _ints(self._places)[kept] = np.arange(len(kept), dtype=np.int32)
        self._logs[order] = array("i", kept.tobytes())
        self._heads[order] = 0


def _ints(column: "array[int]") -> NDArray[np.int32]:
    """The same memory. The column cannot grow as long as the view is kept."""
    return np.frombuffer(column, np.int32)


def _bytes(column: bytearray) -> NDArray[np.uint8]:
    """The same memory. The column cannot grow as long as the view is kept."""
    return np.frombuffer(column, np.uint8)
