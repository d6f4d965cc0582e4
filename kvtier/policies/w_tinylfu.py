"""W-TinyLFU: a newcomer stays only if it was used more often than the one that would leave for it.

Einziger, Friedman and Manes (TOS 2017, sections 3 and 4). A window, 1 % of the tier, is an LRU of newcomers. Who falls
out of it competes with the next to leave of the main part, a segmented LRU: used again there, a block moves from
probation to the protected list, at most 80 % of the main part. The one used less often lately leaves (the newcomer, if
they are equal). All counts are halved each time that ten times as many accesses were made as the tier holds blocks.
Owns: the three lists, least recently used first; one list of ghosts, in the order of leaving; a count for each handle.
Always:  counts are at most COUNT_MAX; ghosts at most GHOSTS_PER_BLOCK for each block.
Units:   handles, blocks, accesses.

The paper estimates counts by a sketch over all keys. A sketch over handles would mix up keys, since handles are used
again; so there is an exact count for each block that is remembered, and none for others.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain

from kvtier.allocator.rings import NOWHERE
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

GHOSTS_PER_BLOCK = 4
COUNT_MAX = 15
_WINDOW, _PROBATION, _PROTECTED, _GHOSTS = 1, 2, 3, 4
_SAMPLE = 10  # accesses for each block between two halvings
_HALVED = bytes(count // 2 for count in range(256))


class WTinyLFU(ListPolicy):
    """Policy `w_tinylfu`. A touch costs O(1), and the halving O(handles) now and then."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        self._accesses = 0  # since the last halving
        super().__init__(blocks, "w_tinylfu", resident=3, ghost=1, columns=("B",))

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """REUSE counts, and so does FILL of a ghost. MOVED, which was used elsewhere, counts twice and is on probation.

        RELEASE is no use: it becomes the most recent of its own list.
        """
        enters = access is Access.FILL or access is Access.MOVED
        if enters:
            self._assign(handles, size_class)
        for handle in handles:
            ring = self._rings.ring_of(handle)
            if ring in self._resident:
                if access is Access.REUSE:
                    self._count(handle)
                    ring = _WINDOW if ring == _WINDOW else _PROTECTED
                self._rings.move((handle,), ring)
            elif enters:
                if ring == NOWHERE:
                    self._columns[0][handle] = 0
                for _ in range(1 if access is Access.FILL else 2):
                    self._count(handle)
                self._rings.move((handle,), _WINDOW if access is Access.FILL else _PROBATION)
        self._balance()

    def _count(self, handle: int) -> None:
        counts = self._columns[0]
        counts[handle] = min(COUNT_MAX, counts[handle] + 1)
        self._accesses += 1
        if self._accesses >= _SAMPLE * max(1, self._blocks):
            self._accesses = 0
            halved = counts.tobytes().translate(_HALVED)
            counts[:] = type(counts)("B", halved)

    def _balance(self) -> None:
        """Who falls out of the window is on probation, and who falls out of the protected list is again."""
        lens = self._rings.lens
        for ring, most in ((_WINDOW, self._window_max), (_PROTECTED, self._protected_max)):
            while lens[ring] > most:
                self._rings.move((next(self._rings.walk(ring)),), _PROBATION)

    @property
    def _window_max(self) -> int:
        return max(1, self._blocks // 100)

    @property
    def _protected_max(self) -> int:
        return max(0, self._blocks - self._window_max) * 4 // 5

    # ------------------------------------------------------------ who leaves

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        """As long as the window is full, its oldest compete with those of the main part; then that gives."""
        counts = self._columns[0]
        newcomers = self._sizes.eligible(self._rings.walk(_WINDOW), pinned, size_class)
        main = self._sizes.eligible(
            chain(self._rings.walk(_PROBATION), self._rings.walk(_PROTECTED)), pinned, size_class
        )
        surplus = self._rings.lens[_WINDOW] - self._window_max + 1  # one more is about to come
        resident = next(main, None)
        won: list[int] = []  # newcomers that stay, on probation
        newcomer = next(newcomers, None) if surplus > 0 else None
        while resident is not None:
            if newcomer is None:
                yield resident
                resident = next(main, None)
                continue
            if counts[newcomer] > counts[resident]:
                won.append(newcomer)
                yield resident
                resident = next(main, None)
            else:
                yield newcomer
            surplus -= 1
            newcomer = next(newcomers, None) if surplus > 0 else None
        yield from won
        if newcomer is not None:
            yield newcomer
        yield from newcomers

    def _left(self, handle: int, ring: int) -> None:
        self._rings.move((handle,), _GHOSTS)

    def _trim(self, incoming: int | None = None) -> None:
        while self._rings.lens[_GHOSTS] > GHOSTS_PER_BLOCK * self._blocks:
            self._drop(_GHOSTS)

    def resize(self, blocks: int) -> None:
        """The tier holds so many blocks from now on. Raises InvariantError if that is negative."""
        super().resize(blocks)
        self._balance()

    # ------------------------------------------------------------ snapshots and checks

    def _extra(self) -> list[int]:
        return [self._accesses]

    def _take_extra(self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]) -> None:
        if len(extra) != 1 or self._wrong_counts():
            raise self._format.damaged("a count is too large, or that of accesses is missing")
        self._accesses = extra[0]

    def _findings(self) -> list[str]:
        lens, findings = self._rings.lens, self._wrong_counts()
        if lens[_GHOSTS] > GHOSTS_PER_BLOCK * self._blocks:
            findings.append(f"{lens[_GHOSTS]} ghosts are too many for {self._blocks} blocks")
        if lens[_WINDOW] > self._window_max or lens[_PROTECTED] > self._protected_max:
            findings.append(f"lists of {lens[1:]} for {self._blocks} blocks")
        return findings

    def _wrong_counts(self) -> list[str]:
        members = chain.from_iterable(map(self._rings.walk, self._lists))
        return ["a count is too large"] if any(self._columns[0][h] > COUNT_MAX for h in members) else []
