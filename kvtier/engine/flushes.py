"""Which blocks a flush still owes, and how each flush ended.

A flush owes the blocks that lay only in memory when it began, each until it is in the lowest persistent tier, or
failed. Always: what a flush has stored is not evicted for the sake of another block while that flush runs
(`handle in flushes`), or a flush larger than the disk would destroy what it has just saved.

Units: handles, blocks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvtier.types import StoreKey

ATTEMPTS_MAX = 3


@dataclass(slots=True)
class _Flush:
    blocks: int
    owed: set[int]
    stored: set[int] = field(default_factory=set)
    failed: int = 0
    over_budget_bytes: int = 0


@dataclass(slots=True)
class Flushes:
    """All flushes under way, by ticket."""

    _flushes: dict[int, _Flush] = field(default_factory=dict)
    _owed: dict[int, StoreKey] = field(default_factory=dict)  # in the order in which they were asked for
    _attempts: dict[int, int] = field(default_factory=dict)

    def __contains__(self, handle: object) -> bool:
        """Whether a flush that still runs has stored this block."""
        return any(handle in flush.stored for flush in self._flushes.values())

    def begin(self, ticket: int, blocks: dict[int, StoreKey]) -> None:
        """Owe these blocks, given by handle."""
        for handle in [h for h, key in blocks.items() if self._owed.get(h, key) != key]:
            self.settle(handle, failed=True)  # the handle has another block by now: the old one is lost
        self._owed |= blocks
        self._flushes[ticket] = _Flush(len(blocks), set(blocks))

    def owes(self, handle: int) -> bool:
        """Whether a block is still to be stored."""
        return handle in self._owed

    def owed(self) -> Iterator[tuple[int, StoreKey]]:
        """Blocks still to be stored, as they were asked for. Settle none while iterating."""
        return iter(self._owed.items())

    def over_budget(self, handles: Iterable[int], length_bytes: int) -> None:
        """So much was begun to be written for these blocks that the wear budget does not have."""
        for flush in self._flushes.values():
            if length_bytes and not flush.owed.isdisjoint(handles):
                flush.over_budget_bytes += length_bytes

    def tried(self, handle: int, key: StoreKey, *, lowest: bool, done: bool) -> None:
        """A store of a block ended; into the `lowest` tier or on the way there."""
        if self._owed.get(handle) != key:
            return
        if done and lowest:
            self.settle(handle, failed=False)
        elif not done:
            self._attempts[handle] = self._attempts.get(handle, 0) + 1
            if self._attempts[handle] >= ATTEMPTS_MAX:
                self.settle(handle, failed=True)

    def give_up(self) -> None:
        """The disk takes nothing: all that is owed has failed."""
        for handle in list(self._owed):
            self.settle(handle, failed=True)

    def settle(self, handle: int, *, failed: bool) -> None:
        """The block is owed no more."""
        del self._owed[handle]
        self._attempts.pop(handle, None)
        for flush in self._flushes.values():
            if handle in flush.owed:
                flush.owed.remove(handle)
                flush.failed += failed
                if not failed:
                    flush.stored.add(handle)

    def forget(self, blocks: Mapping[int, StoreKey]) -> None:
        """These blocks, given by handle, are dropped on purpose: nobody is owed them any more."""
        for handle, key in blocks.items():
            if handle in self._owed:  # of another block it may have become the handle since: that one is lost
                self.settle(handle, failed=self._owed[handle] != key)
            for flush in self._flushes.values():
                flush.stored.discard(handle)

    def ended(self) -> list[tuple[int, int, int, int]]:
        """(ticket, blocks, failed, bytes over budget) of flushes that owe nothing any more; each is reported once."""
        ended = [(t, f.blocks, f.failed, f.over_budget_bytes) for t, f in self._flushes.items() if not f.owed]
        for ticket, *_ in ended:
            del self._flushes[ticket]
        return ended
