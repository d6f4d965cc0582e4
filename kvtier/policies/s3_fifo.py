"""S3-FIFO: three queues, of which a small one lets most newcomers go before they take room from the others.

Yang et al. (SOSP '23, section 4.1 and algorithm 1). S is the small queue, a tenth of what the tier holds; M the main
one; G remembers as many ghosts as M may hold. A use only counts, up to 3. From S, who was used more than once moves on
to M, with its count cleared, and the others leave to G; from M, who was used goes round once more for each use.
Owns: the three lists, oldest first, and each resident's count. Always: G holds at most nine tenths of `blocks`.
Units:   handles, blocks.

One block leaves at a time: if those that move on make M too long, M gives the next ones, for S is short then.
Choosing changes nothing: `evict` carries out what the choice passed by. Who has more uses left than another in M was
not passed by, but chosen by someone else.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile

from kvtier.allocator.rings import NOWHERE
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

_SMALL, _MAIN, _GHOSTS = 1, 2, 3
_USES_MAX = 3
_SMALL_SHARE = 10  # one part in so many


class S3FIFO(ListPolicy):
    """Policy `s3_fifo`. Candidates walk past what was used; a touch costs O(1)."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        super().__init__(blocks, "s3_fifo", resident=2, ghost=1, columns=("B",))

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """REUSE counts. FILL enters S, or M if it was remembered; so does MOVED, which was used elsewhere."""
        if access is Access.RELEASE:
            return
        uses = self._columns[0]
        if access is Access.REUSE:
            for handle in handles:
                if self._rings.ring_of(handle) in self._resident:
                    uses[handle] = min(_USES_MAX, uses[handle] + 1)
            return
        self._assign(handles, size_class)
        uses = self._columns[0]
        for handle in handles:
            ring = self._rings.ring_of(handle)
            if ring not in self._resident:
                uses[handle] = 0
                self._rings.move((handle,), _SMALL if ring == NOWHERE and access is Access.FILL else _MAIN)

    @property
    def _small_max(self) -> int:
        return max(1, self._blocks // _SMALL_SHARE)

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        """`evict` of algorithm 1 again and again; what it would move is kept in mind."""
        uses = self._columns[0]
        small = self._sizes.eligible(self._rings.walk(_SMALL), pinned, size_class)
        in_main = self._sizes.eligible(self._rings.walk(_MAIN), pinned, size_class)
        main: Iterator[tuple[int, int]] = ((handle, uses[handle]) for handle in in_main)
        moved: list[tuple[int, int]] = []  # to the young end of M, with the uses left
        small_left = self._rings.lens[_SMALL]
        main_ended = False
        while True:
            handle = next(small, None) if main_ended or small_left >= self._small_max else None
            if handle is not None:
                small_left -= 1
                if uses[handle] > 1:
                    moved.append((handle, 0))
                else:
                    yield handle
                continue
            entry = next(main, None)
            if entry is not None and entry[1]:
                moved.append((entry[0], entry[1] - 1))
            elif entry is not None:
                yield entry[0]
            elif moved:
                main, moved = iter(moved), []
            elif main_ended:
                return
            else:
                main_ended = True  # S gives what it has, however short it is

    # ------------------------------------------------------------ what a choice passed by

    def _left(self, handle: int, ring: int) -> None:
        uses = self._columns[0]
        if ring == _SMALL and uses[handle] <= 1:
            self._promote(h for h in takewhile(handle.__ne__, self._rings.walk(_SMALL)) if uses[h] > 1)
            self._rings.move((handle,), _GHOSTS)
            return
        if ring == _MAIN or all(uses[h] for h in self._rings.walk(_MAIN)):
            surplus = max(0, self._rings.lens[_SMALL] - self._small_max + 1)
            self._promote(takewhile(lambda h: uses[h] > 1, islice(self._rings.walk(_SMALL), surplus)))
            if self._rings.ring_of(handle) == _MAIN:
                self._pass_main(handle)
        self._rings.remove(handle)

    def _promote(self, handles: Iterable[int]) -> None:
        """From S to M."""
        passed = list(handles)
        for handle in passed:
            self._columns[0][handle] = 0
        self._rings.move(passed, _MAIN)

    def _pass_main(self, handle: int) -> None:
        """Who was used, ahead of this one, goes round. If this one was used itself, then all did as often."""
        uses, rounds = self._columns[0], self._columns[0][handle]
        if rounds:
            members = list(self._rings.walk(_MAIN))
            if any(uses[h] < rounds for h in members):
                return
            for member in members:
                uses[member] -= rounds
        passed = [h for h in takewhile(handle.__ne__, self._rings.walk(_MAIN)) if uses[h]]
        for member in passed:
            uses[member] -= 1
        self._rings.move(passed, _MAIN)

    def _trim(self, incoming: int | None = None) -> None:
        while self._rings.lens[_GHOSTS] > self._ghosts_max:
            self._drop(_GHOSTS)

    @property
    def _ghosts_max(self) -> int:
        return self._blocks - self._blocks // _SMALL_SHARE

    def _take_extra(self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]) -> None:
        if findings := self._wrong_uses():
            raise self._format.damaged(findings[0])

    def _findings(self) -> list[str]:
        ghosts = self._rings.lens[_GHOSTS]
        too_long = [f"G of {ghosts} is too long for {self._blocks} blocks"] if ghosts > self._ghosts_max else []
        return too_long + self._wrong_uses()

    def _wrong_uses(self) -> list[str]:
        residents = chain(self._rings.walk(_SMALL), self._rings.walk(_MAIN))
        return ["a block with too many uses"] if any(self._columns[0][h] > _USES_MAX for h in residents) else []
