"""LFU: whoever was used least often leaves first; of those alike, the one that reached its count first.

Owns: one list in the order of leaving, the uses of each resident, and of each number of uses the last block that has
it, behind which the next one is put. Uses are counted while a block is resident: who comes back starts anew.
Always:  the list is in the order of uses; `_last` names the last block of each number of uses that occurs.
Units:   handles, uses.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise

from kvtier.allocator.rings import NOWHERE, Rings
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

_ORDER = 1
_USES_MAX = 2**32 - 1


class _Order(Rings):
    """One ring into whose middle can be put."""

    def put_behind(self, index: int, other: int | None) -> None:
        """None: in front of all."""
        self._insert(index, _ORDER, before=self._next[_ORDER if other is None else other + self._first_cell])

    def one_before(self, index: int) -> int | None:
        cell = self._prev[index + self._first_cell]
        return None if cell == _ORDER else cell - self._first_cell


class LFU(ListPolicy):
    """Policy `lfu`. A touch costs O(1)."""

    _rings: _Order

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds, which does not matter here."""
        self._last: dict[int, int] = {}
        super().__init__(blocks, "lfu", resident=1, columns=("I",))

    def _empty_lists(self) -> Rings:
        return _Order(1)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """REUSE counts. FILL begins with one use, MOVED with two, for it was used elsewhere. RELEASE is no use."""
        if access is Access.RELEASE:
            return
        if access is not Access.REUSE:
            self._assign(handles, size_class)
        uses = self._columns[0]
        for handle in handles:
            if self._rings.ring_of(handle) == NOWHERE:
                if access is not Access.REUSE:
                    self._put(handle, 0, 1 if access is Access.FILL else 2)
            elif access is Access.REUSE and uses[handle] < _USES_MAX:
                self._put(handle, uses[handle], uses[handle] + 1)

    def _put(self, handle: int, before: int, now: int) -> None:
        """Behind those that were used as often; if there are none, behind those used once less."""
        behind = self._last.get(now, self._last.get(now - 1))
        if before:
            self._removed(handle)
            if behind != handle:
                self._rings.remove(handle)
        if behind != handle:
            self._rings.put_behind(handle, behind)
        self._columns[0][handle] = now
        self._last[now] = handle

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        return self._sizes.eligible(self._rings.walk(_ORDER), pinned, size_class)

    def _left(self, handle: int, ring: int) -> None:
        self._removed(handle)
        self._rings.remove(handle)

    def _removed(self, handle: int) -> None:
        """Another one is the last of its number of uses now, or none."""
        uses = self._columns[0]
        if self._last[uses[handle]] == handle:
            other = self._rings.one_before(handle)
            if other is not None and uses[other] == uses[handle]:
                self._last[uses[handle]] = other
            else:
                del self._last[uses[handle]]

    def _take_extra(self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]) -> None:
        if disorder := self._disorder():
            raise self._format.damaged(disorder[0])
        self._last = self._last_of_each()

    def _findings(self) -> list[str]:
        wrong = [] if self._last == self._last_of_each() else ["the last blocks of each number of uses are others"]
        return self._disorder() + wrong

    def _last_of_each(self) -> dict[int, int]:
        return {self._columns[0][handle]: handle for handle in self._rings.walk(_ORDER)}

    def _disorder(self) -> list[str]:
        uses = [self._columns[0][handle] for handle in self._rings.walk(_ORDER)]
        ordered = all(one <= next_ for one, next_ in pairwise(uses)) and 0 not in uses
        return [] if ordered else ["the list is not in the order of uses"]
