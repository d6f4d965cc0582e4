"""Whether a disk had a place for a block that a flush gives up.

Owns what was given up although it had one. A place is free, or it is that of a block that may leave: nobody holds it,
it lies nowhere else, and no flush that still runs has stored it. Always: what is looked at is the disk and the
directory, block by block, and not the policy's order; at the moment at which a block is given up, and again when its
flush has ended, for in between its place may go to another.

A flush need not pack blocks of two sizes as tightly as could be: two extents of one size that are both in use stay
both. It must use what there is.

Units: handles, extents, bytes.
"""

from collections import defaultdict

from kvtier.cache.transitions import State
from kvtier.engine.flushes import Flushes
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.types import page_aligned


class WatchedFlushes(Flushes):
    """The flushes of an engine whose disk works. They take the place of its own, when none of those runs."""

    def __init__(self, engine: ExploredEngine) -> None:
        super().__init__()
        self._engine = engine
        self._given_up: dict[int, str] = {}  # handle -> where it could have lain

    def settle(self, handle: int, *, failed: bool) -> None:
        """A block is owed no more. If it is given up, its place may still be meant for another."""
        directory = self._engine.directory
        if failed and directory.key(handle) == self._owed[handle]:  # else it is another block by now
            stored = directory.is_ready(handle, self._engine.disk or 0)
            assert not stored, f"the block of handle {handle} is stored, and a flush counts it as failed"
            if found := place_for(self._engine, handle):
                self._given_up[handle] = found
        super().settle(handle, failed=failed)

    def ended(self) -> list[tuple[int, int, int, int]]:
        """When a flush has ended, no block that was given up has a place on the disk that it had then."""
        if next(self.owed(), None) is None:
            for handle, found in self._given_up.items():
                still = place_for(self._engine, handle)
                assert not still, f"a flush has given up the block of handle {handle} though {found}, and {still}"
        return super().ended()


def place_for(engine: ExploredEngine, handle: int) -> str:
    """Where the disk could take a block that lies in memory, in words; empty if nowhere."""
    directory, disk, store = engine.directory, engine.disk, engine.store
    assert disk is not None
    assert store is not None
    if directory.top(handle) is None or directory.state(handle, disk) is not State.GONE:
        return ""  # it is lost, or waits for the end of its former copy there
    length_bytes = directory.length_bytes(handle)
    if store.room(length_bytes):
        return "there is room"
    leaving = {h for h in directory.ready_in(disk) if _may_leave(engine, disk, h)}
    sizes = {page_aligned(directory.length_bytes(h)) for h in leaving}
    if page_aligned(length_bytes) in sizes:
        return "a block of its size could make room"
    extents: dict[int, set[int]] = defaultdict(set)
    for other in range(directory._rows):  # overtaken ones, too
        if directory.state(other, disk) not in (State.GONE, State.FILLING):
            extents[store.neighbours(directory.place(other, disk))].add(other)
    emptied = [extent for extent, members in extents.items() if members <= leaving]
    return f"extents {emptied} could be emptied" if emptied else ""


def _may_leave(engine: ExploredEngine, disk: int, handle: int) -> bool:
    directory = engine.directory
    alone = directory.top(handle) == disk and not directory.is_held(handle, disk)
    return alone and handle not in engine.core.planner.demotions.flushes
