"""Geometry: where slots lie on granules. Arithmetic only; ranges are half open.

    granules   |    0    |    1    |    2    |     slots may straddle granules: here granule 1 may go only
    slots      |  0  |  1  |  2  |  3  |  4  |     when slots 1, 2 and 3 are all free

Units:  granules and slots (index), bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """`slots` slots of constant stride on granules of constant size."""

    granule_bytes: int
    stride_bytes: int
    slots: int

    @property
    def granules(self) -> int:
        """Granules that all slots together need."""
        return -(-self.slots * self.stride_bytes // self.granule_bytes)

    def granules_of(self, slot: int) -> range:
        """The granules that a slot touches."""
        start, stop = slot * self.stride_bytes, (slot + 1) * self.stride_bytes
        return range(start // self.granule_bytes, -(-stop // self.granule_bytes))

    def slots_touching(self, granules: range) -> range:
        """The slots of which at least one byte lies in these granules."""
        start, stop = granules.start * self.granule_bytes, granules.stop * self.granule_bytes
        return range(start // self.stride_bytes, min(self.slots, -(-stop // self.stride_bytes)))

    def slots_within(self, granules: range) -> range:
        """The slots that lie in these granules with all their bytes."""
        start, stop = granules.start * self.granule_bytes, granules.stop * self.granule_bytes
        first = -(-start // self.stride_bytes)
        return range(first, max(first, min(self.slots, stop // self.stride_bytes)))

    def slots_whole(self, granules: Iterable[int]) -> list[range]:
        """The slots that lie in these granules, in any order, with all their bytes; ascending."""
        return [self.slots_within(run) for run in runs(sorted(granules))]


def runs(ascending: Iterable[int]) -> Iterator[range]:
    """Ascending numbers, joined to ranges where they are consecutive."""
    run = range(0)
    for number in ascending:
        if run and number == run.stop:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
