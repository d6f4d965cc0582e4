"""hit_density: whoever promises the fewest uses for the room that it takes leaves first.

Owns: a list of residents for each class (`density.classes`: how often a block was used, and after how long a gap), from
least to most recently used; one list of ghosts, in the order in which they left; the time of each block's last use.
What is learned about the classes, and what it makes a block worth at its age, is told in `density.hazards`.
Always:  a list is in the order of times; ghosts are at most GHOSTS_PER_BLOCK for each block that the tier holds;
         `_census` counts all that are watched, residents and ghosts alike.
Units:   handles (22 bytes each), blocks. Time is counted in accesses, so that it needs no clock and has no scale.

Blocks of a class are alike, so of each only two compete (`density.fronts`): the one that was used longest ago, and of
those that were used last the deepest; and the one of the lowest worth at its age leaves. A request's blocks are touched
deepest first, so of those used together the deep ones leave first. A block that has just come competes as well, for its
class may be worth nothing, or what has just been used be the last to come back. Those that leave are watched on as
ghosts: else a class that is never kept could not prove itself.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, compress, groupby, pairwise
from math import exp, inf

import numpy as np

from kvtier.allocator.rings import NOWHERE
from kvtier.errors import InvariantError
from kvtier.policies.base import Access, Hint
from kvtier.policies.density.census import Census
from kvtier.policies.density.classes import CLASSES, FIRST, MOVED, class_after, class_hinted
from kvtier.policies.density.fronts import NOBODY, Fronts, competing_worth
from kvtier.policies.density.hazards import Hazards
from kvtier.policies.density.keeping import pack_hazards, unpack_hazards
from kvtier.policies.list_policy import ListPolicy
from kvtier.policies.orders import LONG_BATCH, Orders

GHOSTS_PER_BLOCK = 4  # with 2, a tenth of the gain is lost
_LEARN_EVERY_MIN = 2500  # accesses; the table takes milliseconds to make
_LEARN_SHARE = 4  # or when so large a part of what the tier holds was accessed
_HISTORY = 50  # what was learned fades over as many accesses as the tier holds blocks, times this
_HISTORY_MIN = 400_000  # accesses; a small tier sees little of each class
_GHOSTS = CLASSES + 1
_RESIDENT = frozenset(range(1, CLASSES + 1))
_UNKNOWN = -1
_NO_OTHER = (inf, 0, 0)
_REUSE, _RELEASE = Access.REUSE, Access.RELEASE  # asking the Enum takes 100 ns each time


class HitDensity(ListPolicy):
    """Policy `hit_density`. Touching costs O(1) per handle, candidates O(classes) and O(log classes) for each."""

    _rings: Orders

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        self._now = 0
        self._learn_at = 0
        self._hazards = Hazards()
        super().__init__(blocks, "hit_density", resident=CLASSES, ghost=1, columns=("B", "q"))
        self._learn_at = self._learn_every

    def _empty_lists(self) -> Orders:
        return Orders(len(self._lists))

    @property
    def _learn_every(self) -> int:
        return max(_LEARN_EVERY_MIN, self._blocks // _LEARN_SHARE)

    # ------------------------------------------------------------ what happened

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Note uses, in the given order. Only FILL and MOVED make handles resident and set their size class.

        A ghost that is filled is used again. FILL of a resident is no use: it becomes the most recent of its class.
        RELEASE is nothing: gaps are counted from use to use, so an age that began anew would promise what was not
        learned. Raises InvariantError for a size class that is not a u32.
        """
        if access is _RELEASE:
            return
        handles = handles if len(handles) == 1 else list(dict.fromkeys(handles))
        if access is not _REUSE:
            self._assign(handles, size_class)
        self._note(handles, access)
        self._now += len(handles)
        if self._now >= self._learn_at:
            self._learn()

    def _note(self, handles: Sequence[int], access: Access) -> None:
        """One after the other. Neighbours mostly have one history: such a run is counted and moved as one."""
        where, (classes, times) = self._rings.where, self._columns
        known, reuse = len(where), access is _REUSE
        run: list[int] = []
        run_class, run_gap, run_used = NOWHERE, 0, False
        begin = now = self._now + 1
        for now, handle in enumerate(handles, begin):
            ring = where[handle] if 0 <= handle < known else NOWHERE
            if ring in _RESIDENT or (ring == _GHOSTS and not reuse):
                class_, gap, used = classes[handle], now - times[handle], reuse or ring == _GHOSTS
            elif reuse:
                class_, gap, used = _UNKNOWN, 0, False
            else:
                class_, gap, used = NOWHERE, 0, False
            if gap != run_gap or class_ != run_class or used != run_used:
                self._note_run(run, begin, run_class, run_gap, run_used, access)
                run, begin, run_class, run_gap, run_used = [], now, class_, gap, used
            run.append(handle)
        self._note_run(run, begin, run_class, run_gap, run_used, access)

    def _note_run(self, run: list[int], begin: int, class_: int, gap: int, used: bool, access: Access) -> None:
        """Accessed from time `begin` on, each `gap` accesses after its last use. class_: NOWHERE if they are new."""
        if not run or class_ == _UNKNOWN:
            return
        if class_ == NOWHERE:
            after = FIRST if access is Access.FILL else MOVED
        else:
            after = class_
            if used:
                self._hazards.note_use(class_, gap, len(run))
                after = class_after(class_, gap)
            elif access is Access.MOVED and class_ == FIRST:
                after = MOVED
            self._census.remove_run(class_, begin - gap, len(run))
            self._fronts.left(run, class_)
        self._census.add_run(after, begin, len(run))
        self._put(run, after, range(begin, begin + len(run)))

    def _put(self, handles: Sequence[int], class_: int, when: Sequence[int]) -> None:
        """These are of this class, used last at these times, and in no front. The census knows."""
        classes, times = self._columns
        if len(handles) >= LONG_BATCH:
            many = np.array(handles, np.int64)
            np.frombuffer(classes, np.uint8)[many] = class_
            np.frombuffer(times, np.int64)[many] = when
        else:
            for handle, time in zip(handles, when, strict=True):
                classes[handle], times[handle] = class_, time
        self._fronts.came(class_, handles, when[0])
        self._rings.move(handles, class_)

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        """The residents among these are of a class of their own until they are used again. Returns how many."""
        classes, times = self._columns
        residents = [h for h in dict.fromkeys(handles) if self._rings.ring_of(h) in self._resident]
        for handle in residents:
            self._census.remove(classes[handle], times[handle])
            self._fronts.left((handle,), classes[handle])
        if residents:
            class_ = class_hinted(hint.returns_in, hint.shared)
            self._census.add(class_, self._now, len(residents))
            self._put(residents, class_, [self._now] * len(residents))
        return len(residents)

    def _learn(self) -> None:
        every, history = self._learn_every, max(_HISTORY_MIN, _HISTORY * self._blocks)
        self._hazards.learn(self._census.living(self._now), exp(-every / history))
        self._learn_at = self._now + every
        self._fronts = Fronts(self._rings, self._columns[1], self._hazards)

    # ------------------------------------------------------------ who leaves

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The `count` handles next to leave, first to leave first, or none. Does not change state."""
        if count == 1 and pinned == () and size_class is None:
            least = self._fronts.least(self._now)
            return [] if least == NOBODY else [least]
        return super().candidates(count, pinned, size_class, incoming)

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        now, (_, times), worth = self._now, self._columns, self._hazards.worth
        fronts: list[tuple[float, int, int, int, Iterator[int]]] = []
        for class_ in compress(self._resident, self._rings.lens[1:]):
            ends = {class_: self._rings.walk(class_)}
            if not self._fronts.is_one_run(class_):
                ends[class_ + CLASSES] = self._fronts.youngest(class_)
            for front, blocks in ends.items():
                members = self._sizes.eligible(blocks, pinned, size_class)
                for handle in members:
                    age = now - times[handle]
                    fronts.append((competing_worth(worth(class_, age), front), times[handle], front, handle, members))
                    break
        heapify(fronts)
        chosen: set[int] = set()  # a block may come from both ends of its class
        while fronts:
            least, begin, front, handle, members = fronts[0]
            if handle not in chosen:
                chosen.add(handle)
                yield handle
            class_ = front - CLASSES if front > CLASSES else front
            next_least = min((other[:3] for other in fronts[1:3]), default=_NO_OTHER)
            since = now - self._hazards.age_min(class_, now - begin)  # who was used last until then is worth the same
            for following in members:
                time = times[following]
                if not begin <= time <= since or (least, time, front) > next_least:
                    worth_then = competing_worth(worth(class_, now - time), front)
                    heapreplace(fronts, (worth_then, time, front, following, members))
                    break
                if following not in chosen:
                    chosen.add(following)
                    yield following
            else:
                heappop(fronts)

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        """These become ghosts. Raises InvariantError, and changes nothing, for one that is not resident."""
        where, known, leaving = self._rings.where, len(self._rings.where), set(handles)
        rings = {where[handle] if 0 <= handle < known else NOWHERE for handle in handles}
        if len(leaving) != len(handles) or not rings <= _RESIDENT:
            raise InvariantError(f"hit_density: one of {len(handles)} is not resident, or leaves twice")
        for ring in rings:
            self._fronts.left(leaving, ring)
        self._rings.move(handles, _GHOSTS)
        self._trim(incoming)

    def _removed(self, handle: int) -> None:
        class_, time = self._columns[0][handle], self._columns[1][handle]
        self._lose(class_, time, 1)
        self._fronts.left((handle,), class_)

    def _lose(self, class_: int, begin: int, blocks: int) -> None:
        """So many, used last one after the other from `begin` on, are not watched any more."""
        self._hazards.note_losses(class_, self._now - begin, blocks)
        self._census.remove_run(class_, begin, blocks)

    def _trim(self, incoming: int | None = None) -> None:
        surplus = self._rings.lens[_GHOSTS] - GHOSTS_PER_BLOCK * self._blocks
        if surplus > 0:
            ghosts = self._rings.pop(_GHOSTS, surplus)
            self._dropped.update(dict.fromkeys(ghosts))
            classes, times = self._columns
            runs = groupby(enumerate(ghosts), lambda placed: (classes[placed[1]], times[placed[1]] - placed[0]))
            for (class_, before), run in runs:
                first, *others = (at for at, _ in run)
                self._lose(class_, before + first, 1 + len(others))

    def resize(self, blocks: int) -> None:
        """The tier holds so many blocks from now on. Raises InvariantError if that is negative."""
        if blocks >= 0:
            self._blocks = blocks
            self._count_anew()  # before ghosts are given up, for they are counted
        super().resize(blocks)

    # ------------------------------------------------------------ snapshots and checks

    def _extra(self) -> list[int]:
        return [*_halves(self._now), *_halves(self._learn_at), *pack_hazards(self._hazards)]

    def _take_extra(self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]) -> None:
        if len(extra) < 4:
            raise self._format.damaged("its time is missing")
        try:
            hazards = unpack_hazards(extra[4:])
        except ValueError as error:
            raise self._format.damaged(str(error)) from None
        now, learn_at = extra[0] | extra[1] << 32, extra[2] | extra[3] << 32
        if findings := self._disorder(now):
            raise self._format.damaged(findings[0])
        self._now, self._learn_at, self._hazards = now, learn_at, hazards

    def _findings(self) -> list[str]:
        findings = self._disorder(self._now)
        classes, times = self._columns
        census = Census(self._blocks)
        for handle in chain.from_iterable(map(self._rings.walk, self._lists)):
            census.add(classes[handle], times[handle])
        if (census.span, census.counts) != (self._census.span, self._census.counts):
            findings.append("the census has counted other blocks than there are")
        if self._rings.lens[_GHOSTS] > GHOSTS_PER_BLOCK * self._blocks:
            findings.append(f"{self._rings.lens[_GHOSTS]} ghosts are too many for {self._blocks} blocks")
        least = self._fronts.least(self._now)
        if [least] != (super().candidates(1) or [NOBODY]):
            findings.append(f"the fronts say that {least} is worth least")
        return findings

    def _disorder(self, now: int) -> list[str]:
        """Residents in the list of another class, or not in the order of their times."""
        classes, times = self._columns
        findings = []
        for ring in (ring for ring in self._lists if self._rings.lens[ring]):
            members = list(self._rings.walk(ring))
            if ring != _GHOSTS and any(classes[handle] != ring for handle in members):
                findings.append(f"a block of another class in list {ring}")
            if ring != _GHOSTS and any(times[one] > times[next_] for one, next_ in pairwise(members)):
                findings.append(f"list {ring} is not in the order of times")
            if any(not 1 <= classes[handle] <= CLASSES or not 0 <= times[handle] <= now for handle in members):
                findings.append(f"a block of list {ring} without class, or used in the future")
        return findings

    def _count_anew(self) -> None:
        classes, times = self._columns
        self._census = Census(self._blocks)
        for handle in chain.from_iterable(map(self._rings.walk, self._lists)):
            self._census.add(classes[handle], times[handle])
        self._fronts = Fronts(self._rings, times, self._hazards)


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFF_FFFF, number >> 32
