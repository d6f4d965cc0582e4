"""LRU: whoever was touched longest ago leaves first.

Owns: the order of the resident handles and the size class of each. No ghosts, no adaptation, no limit of its own.
Always:  every resident has the size class of its last FILL or MOVED; head = next to leave.

Those of which a hint says that they are not expected again are in lists of their own until somebody touches them:
what one session alone had named leaves first, then what several had, and of each who was hinted longest ago. For a hint
may be wrong, and another session may come: they are found as long as there is room for them.

Snapshot (framed as in `snapshot.py`): no head; the handles of the two lists and of the order, each from head to tail;
the size classes of all.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.rings import NOWHERE
from kvtier.policies.base import Access, Hint
from kvtier.policies.orders import Orders
from kvtier.policies.size_classes import SizeClasses
from kvtier.policies.snapshot import NO_NAME, SnapshotFormat

_FORMAT = SnapshotFormat("lru", b"KVTLRU\x00\x03", head="", columns=4)
_LISTS = _ENDED, _SHARED, _ORDER = 1, 2, 3
_REUSE, _RELEASE = Access.REUSE, Access.RELEASE  # asking the Enum takes 100 ns, a third of a touch


class LRU:
    """Policy `lru`. Touching costs O(1) per handle; candidates walk past what is pinned or of another class."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds, which does not matter here."""
        self._orders = Orders(len(_LISTS))
        self._sizes = SizeClasses()

    def __len__(self) -> int:
        return sum(self._orders.lens)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Move handles to the end, in the given order. FILL and MOVED make them resident and set their size class.

        Raises InvariantError for a size class that is not a u32.
        """
        if access is _REUSE or access is _RELEASE:
            self._orders.move(handles, _ORDER, sources=_LISTS)
        else:
            self._sizes.assign(handles, size_class)
            self._orders.move(handles, _ORDER)

    def hint(self, handles: Sequence[int], hint: Hint) -> int:
        """Those that are not expected again leave before all others; when others return does not matter here."""
        if not hint.ends:
            return 0
        ended = [handle for handle in dict.fromkeys(handles) if self.remembers(handle)]
        self._orders.move(ended, _SHARED if hint.shared else _ENDED)
        return len(ended)

    def _walk(self) -> Iterator[int]:
        """From the first to leave to the last."""
        orders = self._orders
        if len(self) == orders.lens[_ORDER]:
            return orders.walk(_ORDER)
        return chain.from_iterable(map(orders.walk, _LISTS))

    def candidates(
        self, count: int, pinned: Container[int] = (), size_class: int | None = None, incoming: int | None = None
    ) -> list[int]:
        """The `count` handles next to leave, first to leave first, or none. Does not change state."""
        if not 0 < count <= len(self):
            return []
        if count == 1 and pinned == () and size_class is None:
            return self._orders.first(*_LISTS)
        chosen = list(islice(self._sizes.eligible(self._walk(), pinned, size_class), count))
        return chosen if len(chosen) == count else []

    def evict(self, handles: Sequence[int], incoming: int | None = None) -> None:
        """These leave. Raises InvariantError for one that is not resident."""
        self._orders.remove_all(handles)

    def forget(self, handles: Sequence[int]) -> None:
        """These are gone; unknown ones are ignored."""
        self._orders.remove_all([handle for handle in dict.fromkeys(handles) if self.remembers(handle)])

    def remembers(self, handle: int) -> bool:
        """Whether the handle is resident."""
        return self._orders.ring_of(handle) != NOWHERE

    def ghosts(self) -> list[int]:
        """None: who leaves is not remembered."""
        return []

    def forgotten(self) -> list[int]:
        """None: there are no ghosts to give up."""
        return []

    def resize(self, blocks: int) -> None:
        """The order is the same for any number of blocks."""

    def snapshot(self) -> bytes:
        """The order and the size classes, in the format above."""
        lists = [self._orders.members(ring) for ring in _LISTS]
        return _FORMAT.pack((), [*lists, self._sizes.of(np.concatenate(lists))])

    def restore(self, state: bytes, renamed: Mapping[int, int] | None = None) -> None:
        """Become what `snapshot` saw. Raises ValueError, and changes nothing, if `state` is none of an LRU's.

        renamed: the handles of now, by those of then; what is not in it is left out. None: they are the same.
        """
        _, (*lists, classes) = _FORMAT.unpack(state)
        names = _FORMAT.names(lists, renamed)
        if len(names) != len(classes):
            raise _FORMAT.damaged(f"{len(names)} handles with {len(classes)} size classes")
        named = names != NO_NAME
        self._orders, self._sizes = Orders(len(_LISTS)), SizeClasses()
        ends = np.cumsum([len(members) for members in lists])[:-1]
        for ring, part, there in zip(_LISTS, np.split(names, ends), np.split(named, ends), strict=True):
            self._orders.move(part[there], ring)
        self._sizes.assign_each(names[named], np.asarray(classes)[named])

    def sizes_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """The size class of each, -1 for one that is not resident."""
        return self._sizes.of_residents(handles, self._orders.marked(handles, _LISTS))

    def check(self) -> list[str]:
        """Recount the order; every member needs a size class."""
        findings = [f"lru: {finding}" for finding in self._orders.check()]
        if not findings and any(handle >= len(self._sizes) for handle in self._walk()):
            findings.append("lru: a resident handle without a size class")
        return findings
