"""FIFO: whoever came first leaves first.

Owns: one list, in the order of arrival. Uses change nothing, nor does new content of a resident.
Units:   handles.
"""

from collections.abc import Container, Iterator, Sequence

from kvtier.allocator.rings import NOWHERE
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

_ORDER = 1


class FIFO(ListPolicy):
    """Policy `fifo`."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds, which does not matter here."""
        super().__init__(blocks, "fifo", resident=1)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """Only FILL and MOVED do anything: what is not resident arrives, and the size class is set."""
        if access is Access.FILL or access is Access.MOVED:
            self._assign(handles, size_class)
            self._rings.move([h for h in handles if self._rings.ring_of(h) == NOWHERE], _ORDER)

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        return self._sizes.eligible(self._rings.walk(_ORDER), pinned, size_class)
