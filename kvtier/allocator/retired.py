"""Retired: granules that nobody will use any more, while work that was given out before may still be reading them.

Owns: what is to be unmapped, and which events have to be done first. Decides only; who asks unmaps.
Always:  an event that was found done is never asked about again: its owner may be using it for something else.
Units:   granules (index).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.allocator.driver import Handle
from kvtier.allocator.streams import Event


@dataclass(slots=True)
class _Batch:
    granules: dict[int, Handle]
    events: set[Event]


class Retired:
    """Granules with their memory, in the order of their retirement."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    @property
    def handles(self) -> dict[int, Handle]:
        """All of them, by granule."""
        return {granule: handle for batch in self._batches for granule, handle in batch.granules.items()}

    def add(self, granules: dict[int, Handle], events: Iterable[Event]) -> None:
        """These may go when all these events are done."""
        self._batches.append(_Batch(granules, set(events)))

    def ready(self, is_done: Callable[[Event], bool]) -> list[int]:
        """The granules that may go now, ascending. Each event is asked about once."""
        waiting = set().union(*(batch.events for batch in self._batches))
        done = {event for event in waiting if is_done(event)}
        for batch in self._batches:
            batch.events -= done
        return sorted(granule for batch in self._batches if not batch.events for granule in batch.granules)

    def remove(self, granules: Iterable[int]) -> list[Handle]:
        """These are unmapped. Returns their memory."""
        freed = []
        for granule in granules:
            batch = next(batch for batch in self._batches if granule in batch.granules)
            freed.append(batch.granules.pop(granule))
        self._batches = [batch for batch in self._batches if batch.granules]
        return freed
