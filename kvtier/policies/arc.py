"""ARC: the adaptive replacement cache of Megiddo and Modha (FAST '03, figure 4), with its p as a real number.

Owns: four lists of handles, from least to most recently used. T1 holds residents seen once, T2 those seen again; B1
and B2 hold the ghosts of what left T1 and T2. `p` is how large T1 should be: the return of a ghost from B1 says that
T1 was too small, one from B2 that T2 was. c is the number of blocks that the tier holds.
Always:  a handle is in one list at most; |T1| + |B1| <= max(c, |T1|) and all lists <= max(2c, residents), for a tier
         that is being shrunk, or whose blocks are pinned, may hold more than c; 0 <= p <= c; `_counted` are ghosts.
Units:   handles, blocks.

The paper serves one access at a time. The same access in our verbs, where x is the handle that needs room:

    x is resident       touch([x], REUSE)                                                          case I
    x is not            if c are resident: victim = candidates(1, incoming=x); evict(victim, incoming=x)
                        touch([x], FILL)                                                           cases II to IV

`candidates` and `evict` do REPLACE and, for a ghost, the adaptation before it, with the sizes that the lists have
before anything moves; FILL moves x, and trims the ghosts. If the paper's order is another, the lists are the same:

* Cases II and III put x into T2 after REPLACE: so do we. The ghost stays in its list until FILL; `_counted`
  remembers that its return was noted, so that a second `evict` for it, or FILL, does not note it twice.
* Case IV trims before REPLACE, we after it. Moving T1 to B1 leaves |T1| + |B1| as it was, moving T2 to B2 leaves all
  four, so both find the same excess; REPLACE looks at |T1|, p and whether x is in B2, never at B1, and x is in
  neither. What is trimmed is the oldest ghost, and REPLACE appends the youngest; only where the list to trim is empty
  could these be the same one. B2 is not empty then: with c residents, 2c in all and |T1| + |B1| < c, |T2| + |B2| > c
  >= |T2|. B1 is if |T1| = c, and then the paper drops the head of T1 without a ghost: we move it to B1 (T2 is empty,
  so REPLACE has no other choice) and trim it from there.

Beside the paper: those of which a hint says that they are not expected again wait in a list until somebody touches
them, in E1 what one session alone had named, in E2 what several had. E1 leaves first, then E2, of each who was hinted
longest ago, and no ghost stays of them: their return would say something about the hint, and nothing about T1 and T2.
Without hints both are empty.

Snapshot (framed as in `snapshot.py`): f64 p, u32 c; T1, T2, E1, E2, B1, B2, the size classes of the first four,
`_counted`.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import NOWHERE
from kvtier.errors import InvariantError
from kvtier.policies.base import Access, Hint
from kvtier.policies.orders import Orders
from kvtier.policies.size_classes import SizeClasses
from kvtier.policies.snapshot import NO_NAME, SnapshotFormat

_FORMAT = SnapshotFormat("arc", b"KVTARC\x00\x02", head="dI", columns=8)
_LISTS = _T1, _T2, _E1, _E2, _B1, _B2 = 1, 2, 3, 4, 5, 6  # residents first
_ENDED = _E1, _E2
_RESIDENT, _GHOST = (_T1, _T2, *_ENDED), (_B1, _B2)
_FILL, _REUSE, _RELEASE = Access.FILL, Access.REUSE, Access.RELEASE  # asking the Enum takes 100 ns each time


class ARC:
    """Policy `arc`. Touching costs O(1) per handle; candidates walk past what is pinned or of another class."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        self.p = 0.0
        self._blocks = 0
        self._orders = Orders(len(_LISTS))
        self._sizes = SizeClasses()
        self._counted: set[int] = set()
        self._dropped: dict[int, None] = {}  # ghosts given up that `forgotten` has not told of, in order
        self.resize(blocks)

    def __len__(self) -> int:
        lens = self._orders.lens
        return lens[_T1] + lens[_T2] + lens[_E1] + lens[_E2]

    # ------------------------------------------------------------ what happened

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Note accesses, in the given order. Only FILL and MOVED make handles resident and set their size class.

        FILL and RELEASE of a resident are no second access: it becomes the most recent of its own list.
        Raises InvariantError for a size class that is not a u32.
        """
        orders = self._orders
        if access is _REUSE:
            # Case I, x in T1 or T2: a hit. It has been seen at least twice now: to the young end of T2.
            orders.move(handles, _T2, sources=_RESIDENT)
            return
        back = orders.lens[_E1] + orders.lens[_E2] > 0  # of these some may come back into T1, which trims nothing
        if access is _RELEASE:
            orders.move(handles, _T1, sources=_ENDED)
            orders.move(handles, _T2, sources=())
        else:
            self._sizes.assign(handles, size_class)
            entrance = _T1 if access is _FILL else _T2
            if len(handles) == 1 or len(set(handles)) == len(handles):
                self._enter(handles, entrance)
            else:
                for handle in handles:
                    self._enter((handle,), entrance)
        if back:
            self._trim()

    def _enter(self, handles: Sequence[int], entrance: int) -> None:
        """Handles with new content, all different, enter a list; room is made, and the return of ghosts noted."""
        for ring, run in self._runs(handles):
            if ring == NOWHERE:
                # Case IV, x in none of the lists: to the young end of T1. If it was used in another tier, then to that
                # of T2, as if it had been in T1 meanwhile; T1 and B1 have nothing to do with it.
                self._orders.move(run, entrance)
                self._trim()
            elif ring in _GHOST:
                # Cases II and III, x in B1 or B2: a hit in a larger T1 or T2. To the young end of T2.
                for gone, handle in enumerate(run):
                    self.p = self._adapted(handle, ring, gone)
                    self._counted.discard(handle)
                self._orders.move(run, _T2)
            elif ring in _ENDED:
                self._orders.move(run, entrance)
            else:  # resident: in its own list, or in T2 once it brings its frequency along
                self._orders.move(run, max(ring, entrance))

    def _runs(self, handles: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        """Neighbours in the same list, as it is when their turn comes: what precedes them may have trimmed a ghost."""
        if len(handles) == 1:
            return ((self._orders.ring_of(handles[0]), handles),)
        return self._runs_of_many(handles)

    def _runs_of_many(self, handles: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        start = at = 0
        while start < len(handles):
            where, known = self._orders.where, len(self._orders.where)
            ring = self._orders.ring_of(handles[start])
            for at in range(start + 1, len(handles)):
                handle = handles[at]
                if (where[handle] if 0 <= handle < known else NOWHERE) != ring:
                    break
            else:
                at = len(handles)
            yield ring, handles[start:at]
            start = at

    def _adapted(self, ghost: int, ring: int, gone: int = 0) -> float:
        """What p becomes at the return of a ghost in B1 or B2: it moves by more, the smaller that list is.

        gone: as if so many had left that list already.
        """
        if ghost in self._counted:
            return self.p
        recent, frequent = self._orders.lens[_B1], self._orders.lens[_B2]
        if ring == _B1:
            return min(float(self._blocks), self.p + max(frequent / (recent - gone), 1.0))
        return max(0.0, self.p - max(recent / (frequent - gone), 1.0))

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        """Residents that are not expected again join E1 or E2; when others return does not matter here."""
        if not hint.ends:
            return 0
        ended = [handle for handle in dict.fromkeys(handles) if self._orders.ring_of(handle) in _RESIDENT]
        self._orders.move(ended, _E2 if hint.shared else _E1)
        return len(ended)

    # ------------------------------------------------------------ who leaves

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The `count` handles next to leave for `incoming`, first to leave first, or none. Does not change state.

        E1 and E2, then the paper's REPLACE, as often as needed with one p. Where the list it chooses has none to give,
        the other does.
        """
        if not 0 < count <= len(self):
            return []
        lens, ring, p = self._orders.lens, NOWHERE, self.p
        if incoming is not None and (ring := self._orders.ring_of(incoming)) in _GHOST:
            p = self._adapted(incoming, ring)
        # REPLACE: T1 gives if it is larger than p, or just as large and x comes from B2; else T2.
        kept = int(p) - 1 if ring == _B2 and p == int(p) else int(p)
        surplus = lens[_T1] - max(0, kept)
        if count == 1 and pinned == () and size_class is None:
            return self._orders.first(*_ENDED, *((_T1, _T2) if surplus > 0 else (_T2, _T1)))
        ended: list[int] = []
        if lens[_E1] or lens[_E2]:
            waiting = chain(self._orders.walk(_E1), self._orders.walk(_E2))
            ended = list(islice(self._sizes.eligible(waiting, pinned, size_class), count))
            count -= len(ended)
        from_t1 = min(count, max(0, surplus))
        eligible = self._sizes.eligible(self._orders.walk(_T1), pinned, size_class)
        chosen = list(islice(eligible, from_t1))
        if len(chosen) < count:
            in_t2 = self._sizes.eligible(self._orders.walk(_T2), pinned, size_class)
            chosen += islice(in_t2, count - len(chosen))
        chosen += islice(eligible, count - len(chosen))
        return ended + chosen if len(chosen) == count else []

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        """These become ghosts, the youngest of their kind (of E1, E2: none). The return of `incoming` is noted.

        Raises InvariantError for one that is not resident.
        """
        orders = self._orders
        if incoming is not None and (ring := orders.ring_of(incoming)) in _GHOST:
            self.p = self._adapted(incoming, ring)
            self._counted.add(incoming)
        overfull = len(self) > self._blocks
        for ring, run in self._runs(handles):
            if ring not in _RESIDENT:
                raise InvariantError(f"arc: {run[0]} is not resident")
            left = orders.lens[ring] - len(run)
            if ring in _ENDED:
                orders.remove_all(run)
            else:
                orders.move(run, _B1 if ring == _T1 else _B2)
            if orders.lens[ring] != left:
                raise InvariantError(f"arc: one of {len(run)} handles leaves twice")
        if overfull:  # else the ghosts had room before, and have it still
            self._trim()

    # ------------------------------------------------------------ what is remembered

    def forget(self, handles: Sequence[int]) -> None:
        """These are gone, residents and ghosts; unknown ones are ignored."""
        for handle in handles:
            self._dropped.pop(handle, None)
            if self.remembers(handle):
                self._orders.remove(handle)
                self._counted.discard(handle)

    def remembers(self, handle: int) -> bool:
        """Whether the handle is resident or a ghost."""
        return self._orders.ring_of(handle) != NOWHERE

    def ghosts(self) -> list[int]:
        """Those of B1, then those of B2, oldest first of each."""
        return [*self._orders.members(_B1).tolist(), *self._orders.members(_B2).tolist()]

    def forgotten(self) -> list[int]:
        """Ghosts given up since the last call, oldest first; one that came back meanwhile is not among them."""
        where, known = self._orders.where, len(self._orders.where)
        gone = [handle for handle in self._dropped if handle >= known or where[handle] == NOWHERE]
        self._dropped.clear()
        return gone

    def resize(self, blocks: int) -> None:
        """c changes. Raises InvariantError if it is negative."""
        if blocks < 0:
            raise InvariantError(f"arc: a tier cannot hold {blocks} blocks")
        self._blocks = blocks
        self.p = min(self.p, float(blocks))
        self._trim()

    def _trim(self) -> None:
        """Give up the oldest ghosts until |T1| + |B1| <= c and all lists <= 2c."""
        lens, blocks = self._orders.lens, self._blocks
        # Case IV A, |T1| + |B1| > c: the oldest of B1 go.
        if (surplus := lens[_T1] + lens[_B1] - blocks) > 0:
            self._drop(_B1, surplus)
        # Case IV B, |T1| + |B1| <= c and more than 2c in all: the oldest of B2 go.
        if (surplus := sum(lens) - 2 * blocks) > 0:
            self._drop(_B1, surplus - self._drop(_B2, surplus))

    def _drop(self, ring: int, count: int) -> int:
        """Give up so many of a list, or all if there are fewer; returns how many."""
        ghosts = self._orders.pop(ring, count) if self._orders.lens[ring] else ()
        for ghost in ghosts:
            self._counted.discard(ghost)
            self._dropped[ghost] = None
        return len(ghosts)

    # ------------------------------------------------------------ snapshots

    def snapshot(self) -> bytes:
        """p, c, the lists and the size classes, in the format above."""
        lists = [self._orders.members(ring) for ring in _LISTS]
        classes = self._sizes.of(np.concatenate(lists[:4]))
        return _FORMAT.pack((self.p, self._blocks), [*lists, classes, sorted(self._counted)])

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        """Become what `snapshot` saw, within this c. Raises ValueError, and changes nothing, if `state` is no ARC's.

        renamed: the handles of now, by those of then; what is not in it is left out. None: they are the same.
        Ghosts that find no room any more, and those of before, are told of by `forgotten`.
        """
        (p, blocks), (*lists, classes, counted) = _FORMAT.unpack(state)
        names = _FORMAT.names(lists, renamed)
        count = sum(map(len, lists[:4]))
        if len(classes) != count:
            raise _FORMAT.damaged(f"{count} residents with {len(classes)} size classes")
        if not 0.0 <= p <= blocks or not set(counted) <= {*lists[4], *lists[5]}:
            raise _FORMAT.damaged("its p is not within 0 .. c, or a ghost that came back is none")
        before = dict.fromkeys(chain(self._dropped, self.ghosts()))
        self._orders, self._sizes = Orders(len(_LISTS)), SizeClasses()
        named = names != NO_NAME
        for ring, part, there in zip(_LISTS, *(_by_list(column, lists) for column in (names, named)), strict=True):
            self._orders.move(part[there], ring)
        residents = named[: len(classes)]
        self._sizes.assign_each(names[: len(classes)][residents], np.asarray(classes)[residents])
        self.p = p
        ghosts = dict(zip(chain(lists[4], lists[5]), names[len(classes) :].tolist(), strict=True)) if counted else {}
        self._counted = {ghosts[handle] for handle in counted} - {NO_NAME}
        self._dropped = before
        self.resize(self._blocks)

    def sizes_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """The size class of each, -1 for one that is not resident."""
        return self._sizes.of_residents(handles, self._orders.marked(handles, _RESIDENT))

    # ------------------------------------------------------------ checks

    def check(self) -> list[str]:
        """Recount the lists, and hold p, the ghosts and the size classes to what is promised above."""
        findings = [f"arc: {finding}" for finding in self._orders.check()]
        if findings:
            return findings
        lens, blocks = self._orders.lens, self._blocks
        if lens[_T1] + lens[_B1] > max(blocks, lens[_T1]) or sum(lens) > max(2 * blocks, len(self)):
            findings.append(f"arc: lists of {lens[1:]} are too long for {blocks} blocks")
        if not 0.0 <= self.p <= blocks:
            findings.append(f"arc: p is {self.p}, not within 0 .. {blocks}")
        if not self._counted <= set(self.ghosts()):
            findings.append("arc: the return of a handle that is no ghost was noted")
        if any(handle >= len(self._sizes) for ring in _RESIDENT for handle in self._orders.walk(ring)):
            findings.append("arc: a resident handle without a size class")
        return findings


def _by_list(column: NDArray[Any], lists: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
    """The parts of a column that belong to each of the lists."""
    return np.split(column, np.cumsum([len(handles) for handles in lists])[:-1])
