"""2Q: a block has to prove itself in a queue of newcomers before it competes with the others.

The full version of Johnson and Shasha (VLDB '94, section 3): A1in holds what was used once lately, A1out remembers
what left it, Am holds what was used again after that, least recently used first. Kin is a quarter and Kout half of what
the tier holds, as they recommend.
Owns: the three lists. Always: A1out holds ghosts, at most Kout, and one more while one of them is coming back.
Units:   handles, blocks.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import chain, islice

from kvtier.allocator.rings import NOWHERE
from kvtier.policies.base import Access
from kvtier.policies.list_policy import ListPolicy

_A1IN, _AM, _A1OUT = 1, 2, 3


class TwoQ(ListPolicy):
    """Policy `two_q`."""

    def __init__(self, blocks: int) -> None:
        """blocks: how many the tier holds. Raises InvariantError if that is negative."""
        super().__init__(blocks, "two_q", resident=2, ghost=1)

    def touch(self, handles: Sequence[int], access: Access, size_class: int = 0) -> None:
        """In A1in nothing matters but arrival. RELEASE is as good as REUSE: in Am only the order counts."""
        if access is Access.REUSE or access is Access.RELEASE:
            self._rings.move(handles, _AM, sources=(_AM,))
            return
        self._assign(handles, size_class)
        for handle in handles:
            ring = self._rings.ring_of(handle)
            if ring == NOWHERE:
                self._rings.move((handle,), _A1IN if access is Access.FILL else _AM)
            elif ring != _A1IN or access is Access.MOVED:
                self._rings.move((handle,), _AM)  # remembered in A1out, or used again in another tier

    def _leaving(self, pinned: Container[int], size_class: int | None, incoming: int | None) -> Iterator[int]:
        """`reclaimfor`: as long as A1in is longer than Kin, it gives; then Am, and A1in again if that is not enough."""
        newcomers = self._sizes.eligible(self._rings.walk(_A1IN), pinned, size_class)
        yield from islice(newcomers, max(0, self._rings.lens[_A1IN] - self._blocks // 4))
        yield from chain(self._sizes.eligible(self._rings.walk(_AM), pinned, size_class), newcomers)

    def _left(self, handle: int, ring: int) -> None:
        if ring == _A1IN:
            self._rings.move((handle,), _A1OUT)
        else:
            self._rings.remove(handle)

    def _trim(self, incoming: int | None = None) -> None:
        # In the paper a block that comes back has left A1out by the time that another one enters there.
        coming_back = incoming is not None and self._rings.ring_of(incoming) == _A1OUT
        while self._rings.lens[_A1OUT] > self._blocks // 2 + coming_back:
            self._drop(_A1OUT)

    def _findings(self) -> list[str]:
        ghosts = self._rings.lens[_A1OUT]
        too_many = ghosts > self._blocks // 2 + 1
        return [f"A1out of {ghosts} is too long for {self._blocks} blocks"] if too_many else []
