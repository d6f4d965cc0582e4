"""SIEVE: a hand goes from the oldest to the newest and takes the first that was not used since it came by.

Zhang et al. (NSDI '24, algorithm 1). A use only marks the block; new ones enter at the young end; the hand clears the
marks that it passes, stays where it took a block, and begins anew at the old end when it has passed the young one.
Owns: one list from oldest to newest, the marks, and the hand: the block that it looks at next (NOBODY: the oldest).
Always:  the hand is at a resident or at NOBODY; `_marked` counts the marked.
Units:   handles.

Choosing changes nothing: `evict` moves the hand on to the block that it takes. Who was marked can only have been
reached in a second round, when all were; any other was chosen by someone else, and the hand stays where it is.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain

from kvtier.allocator.rings import NOWHERE, Rings
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

_ORDER = 1
NOBODY = -1


class _Circle(Rings):
    """One ring that can be walked from any member."""

    def walk_from(self, index: int) -> Iterator[int]:
        """From this member, or from the head if it is NOBODY, to the tail."""
        cell = self._next[_ORDER] if index == NOBODY else index + self._first_cell
        while cell != _ORDER:
            yield cell - self._first_cell
            cell = self._next[cell]

    def one_behind(self, index: int) -> int:
        cell = self._next[index + self._first_cell]
        return NOBODY if cell == _ORDER else cell - self._first_cell


class SIEVE(ListPolicy):
    """Policy `sieve`. Candidates walk past the marked; a touch costs O(1)."""

    _rings: _Circle

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds, which does not matter here."""
        self._hand = NOBODY
        self._marked = 0
        super().__init__(blocks, "sieve", resident=1, columns=("B",))

    def _empty_lists(self) -> Rings:
        return _Circle(1)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """REUSE marks. FILL enters without a mark, MOVED, which was used elsewhere, with one. RELEASE is no use."""
        if access is Access.RELEASE:
            return
        if access is not Access.REUSE:
            self._assign(handles, size_class)
        for handle in handles:
            resident = self._rings.ring_of(handle) == _ORDER
            if not resident and access is not Access.REUSE:
                self._rings.move((handle,), _ORDER)
                self._columns[0][handle] = 0
            if access is Access.MOVED or (resident and access is Access.REUSE):
                self._mark(handle, 1)

    def _mark(self, handle: int, mark: int) -> None:
        self._marked += mark - self._columns[0][handle]
        self._columns[0][handle] = mark

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        marks = self._columns[0]

        def round_() -> Iterator[int]:
            return self._sizes.eligible(self._round(), pinned, size_class)

        return chain((h for h in round_() if not marks[h]), (h for h in round_() if marks[h]))

    def _round(self) -> Iterator[int]:
        """All residents, as the hand comes by."""
        yield from self._rings.walk_from(self._hand)
        for handle in self._rings.walk(_ORDER) if self._hand != NOBODY else ():
            if handle == self._hand:
                return
            yield handle

    def _left(self, handle: int, ring: int) -> None:
        marks = self._columns[0]
        if marks[handle] and self._marked == len(self):
            for other in self._rings.walk(_ORDER):
                self._mark(other, 0)
        if not marks[handle]:
            for passed in self._round():
                if passed == handle:
                    break
                self._mark(passed, 0)
            self._hand = self._rings.one_behind(handle)
        self._removed(handle)
        self._rings.remove(handle)

    def _removed(self, handle: int) -> None:
        self._mark(handle, 0)
        if handle == self._hand:
            self._hand = self._rings.one_behind(handle)

    def _extra(self) -> list[int]:
        return [] if self._hand == NOBODY else [self._hand]

    def _take_extra(self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]) -> None:
        marks, order = self._columns[0], list(lists[0])
        if len(extra) > 1 or not {*extra} <= {*order}:
            raise self._format.damaged("its hand is nowhere")
        if any(marks[handle] > 1 for handle in self._rings.walk(_ORDER)):
            raise self._format.damaged("a mark that is none")
        behind = order[order.index(extra[0]) :] if extra else []
        self._hand = next((names[handle] for handle in behind if handle in names), NOBODY)
        self._marked = sum(marks[handle] for handle in self._rings.walk(_ORDER))

    def _findings(self) -> list[str]:
        marked = sum(self._columns[0][handle] for handle in self._rings.walk(_ORDER))
        findings = [] if marked == self._marked else [f"{marked} are marked, {self._marked} were counted"]
        if self._hand != NOBODY and self._rings.ring_of(self._hand) == NOWHERE:
            findings.append("the hand is at a block that left")
        return findings
