"""`ListPolicy`: what policies have in common that keep their blocks in several lists.

Owns: the lists (`Rings`, or `Orders`), the size classes, columns of numbers by handle, and which ghosts were given up.
A policy adds what happens at a touch, the order of leaving, and where those go that leave.
Always:  a handle is in one list at most; residents have a size class; ghosts are bounded by whoever adds them.
Units:   handles, blocks.

Snapshot (framed as in `snapshot.py`): u32 blocks; the handles of each list, in order; the size classes of residents,
in the order of the lists; each column for residents and ghosts, in the order of the lists; and what the policy adds.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import NOWHERE, Rings, grown, stretch
from kvtier.errors import InvariantError
from kvtier.policies.base import Access
from kvtier.policies.orders import Orders
from kvtier.policies.size_classes import SizeClasses
from kvtier.policies.snapshot import NO_NAME, SnapshotFormat


class ListPolicy(ABC):
    """Implements Policy but for `touch` and `_leaving`. Lists are numbered from 1, those of residents first."""

    def __init__(self, blocks: int, name: str, resident: int, ghost: int = 0, columns: Sequence[str] = ()) -> None:
        """resident, ghost: how many lists there are of each. columns: type codes, as in `array`; B, I or q.

        Raises InvariantError if `blocks` is negative.
        """
        self._name = name
        self._lists = range(1, resident + ghost + 1)
        self._resident, self._ghost = range(1, resident + 1), range(resident + 1, resident + ghost + 1)
        cells = len(self._lists) + 1 + sum(2 if code == "q" else 1 for code in columns) + 1
        self._format = SnapshotFormat(name, f"KV{name[:4].upper():_<4}\0\1".encode(), head="I", columns=cells)
        self._rings = self._empty_lists()
        self._sizes = SizeClasses()
        self._columns = [array(code) for code in columns]
        self._dropped: dict[int, None] = {}  # ghosts given up that `forgotten` has not told of, in order
        self._blocks = 0
        self.resize(blocks)

    def __len__(self) -> int:
        return sum(self._rings.lens[self._resident.start : self._resident.stop])

    # ------------------------------------------------------------ for each policy to say

    @abstractmethod
    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """As `Policy.touch`."""

    @abstractmethod
    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        """The residents that may leave, in order. Changes nothing."""

    def _left(self, handle: int, ring: int) -> None:
        """A resident of that list leaves by choice: make it a ghost, or nothing."""
        self._rings.remove(handle)

    def _removed(self, handle: int) -> None:  # noqa: B027  many need none
        """A handle is about to go, resident or ghost, without being chosen."""

    def _trim(self, incoming: int | None = None) -> None:  # noqa: B027  many need none
        """Give up ghosts until they are within bounds, before `incoming` enters if that is known."""

    def _empty_lists(self) -> Rings | Orders:
        """Of the kind that this policy needs."""
        return Rings(len(self._lists))

    def _extra(self) -> list[int]:
        """What else a snapshot must tell, as u32."""
        return []

    def _take_extra(  # noqa: B027  many need none
        self, extra: Sequence[int], lists: Sequence[Sequence[int]], names: Mapping[int, int]
    ) -> None:
        """Lists and columns are restored: what else there is. Raises ValueError, and changes nothing."""

    def _findings(self) -> list[str]:
        """What `check` must hold besides."""
        return []

    # ------------------------------------------------------------ who leaves

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The `count` handles next to leave, first to leave first, or none. Does not change state."""
        if count <= 0:
            return []
        chosen = list(islice(self._leaving(pinned, size_class, incoming), count))
        return chosen if len(chosen) == count else []

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        """These leave. Raises InvariantError for one that is not resident."""
        for handle in handles:
            ring = self._rings.ring_of(handle)
            if ring not in self._resident:
                raise InvariantError(f"{self._name}: {handle} is not resident")
            self._left(handle, ring)
        self._trim(incoming)

    # ------------------------------------------------------------ what is remembered

    def forget(self, handles: Sequence[int]) -> None:
        """These are gone, residents and ghosts; unknown ones are ignored."""
        for handle in handles:
            self._dropped.pop(handle, None)
            if self.remembers(handle):
                self._removed(handle)
                self._rings.remove(handle)

    def remembers(self, handle: int) -> bool:
        """Whether the handle is resident or a ghost."""
        return self._rings.ring_of(handle) != NOWHERE

    def ghosts(self) -> list[int]:
        """List by list, oldest first of each."""
        return list(chain.from_iterable(map(self._rings.walk, self._ghost)))

    def forgotten(self) -> list[int]:
        """Ghosts given up since the last call, oldest first; one that came back meanwhile is not among them."""
        gone = [handle for handle in self._dropped if not self.remembers(handle)]
        self._dropped.clear()
        return gone

    def _drop(self, ring: int) -> None:
        """Give up the oldest ghost of a list that has some."""
        ghost = next(self._rings.walk(ring))
        self._removed(ghost)
        self._rings.remove(ghost)
        self._dropped[ghost] = None

    def resize(self, blocks: int) -> None:
        """The tier holds so many blocks from now on. Raises InvariantError if that is negative."""
        if blocks < 0:
            raise InvariantError(f"{self._name}: a tier cannot hold {blocks} blocks")
        self._blocks = blocks
        self._trim()

    # ------------------------------------------------------------ columns

    def _assign(self, handles: Sequence[int], size_class: int) -> None:
        """These are about to enter, with this size class: their cells exist from now on."""
        self._sizes.assign(handles, size_class)
        if self._columns and len(self._columns[0]) < len(self._sizes):
            for column in self._columns:
                stretch(column, grown(len(column), len(self._sizes) - 1))

    # ------------------------------------------------------------ snapshots

    def snapshot(self) -> bytes:
        """The whole state, in the format above."""
        lists = [self._rings.members(ring) for ring in self._lists]
        members = np.concatenate(lists)
        classes = self._sizes.of(np.concatenate(lists[: len(self._resident)]))
        cells = [half for column in self._columns for half in _as_u32(column, members)]
        return self._format.pack((self._blocks,), [*lists, classes, *cells, self._extra()])

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        """Become what `snapshot` saw, within this one's number of blocks.

        renamed: the handles of now, by those of then; what is not in it is left out. None: they are the same.
        Ghosts that find no room any more, and those of before, are told of by `forgotten`.
        Raises ValueError, and changes nothing, if `state` is none of this policy's.
        """
        _, columns = self._format.unpack(state)
        lists, (classes, *cells, extra) = columns[: len(self._lists)], columns[len(self._lists) :]
        found = self._format.names(lists, renamed).tolist()
        members = list(chain.from_iterable(lists))
        names = {then: now for then, now in zip(members, found, strict=True) if now != NO_NAME}
        residents = sum(map(len, lists[: len(self._resident)]))
        if len(classes) != residents or any(len(column) != len(members) for column in cells):
            raise self._format.damaged("its columns are not as long as its lists")
        before = self._rings, self._sizes, self._columns, self._dropped
        ghosts = self.ghosts()
        self._rings, self._sizes = self._empty_lists(), SizeClasses()
        self._columns = [array(column.typecode) for column in self._columns]
        try:
            self._refill(lists, classes, cells, names)
            self._take_extra(extra, lists, names)
        except ValueError:
            self._rings, self._sizes, self._columns, self._dropped = before
            raise
        self._dropped = dict.fromkeys(chain(before[-1], ghosts))
        self.resize(self._blocks)

    def _refill(
        self,
        lists: Sequence[Sequence[int]],
        classes: Sequence[int],
        cells: Sequence[Sequence[int]],
        names: Mapping[int, int],
    ) -> None:
        for ring, handles in zip(self._lists, lists, strict=True):
            self._rings.move([names[handle] for handle in handles if handle in names], ring)
        members = list(chain.from_iterable(lists))
        if names:
            self._assign((max(names.values()),), 0)
        for handle, size_class in zip(members, classes, strict=False):  # residents come first
            if handle in names:
                self._assign((names[handle],), size_class)
        halves = iter(cells)
        for column in self._columns:
            low, high = next(halves), next(halves) if column.typecode == "q" else None
            top = 255 if column.typecode == "B" else 2**32 - 1
            for at, handle in enumerate(members):
                if low[at] > top:
                    raise self._format.damaged(f"a cell of {low[at]}")
                if handle in names:
                    column[names[handle]] = low[at] + (high[at] << 32 if high else 0)

    def sizes_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """The size class of each, -1 for one that is not resident."""
        return self._sizes.of_residents(handles, self._rings.marked(handles, self._resident))

    # ------------------------------------------------------------ checks

    def check(self) -> list[str]:
        """Recount the lists; every resident needs a size class."""
        findings = [f"{self._name}: {finding}" for finding in self._rings.check()]
        if findings:
            return findings
        residents = chain.from_iterable(map(self._rings.walk, self._resident))
        if any(handle >= len(self._sizes) for handle in residents):
            findings.append(f"{self._name}: a resident handle without a size class")
        return findings + [f"{self._name}: {finding}" for finding in self._findings()]


def _as_u32(column: "array[int]", handles: NDArray[np.integer]) -> Iterator[NDArray[np.integer]]:
    """The cells of these handles: one column, or two with the low and the high halves of 64 bits."""
    cells = np.frombuffer(column, column.typecode)[handles]
    if column.typecode == "q":
        yield cells & 0xFFFF_FFFF
        yield cells >> 32
    else:
        yield cells
