"""`Census`: how many blocks are watched, by class and by when they were used last.

Owns: counts of blocks per class and span of time; a span is a fraction of what the tier holds, so that a census has
few entries and costs nothing to ask, while the youngest ages are told apart as well as they need be.
Always:  every count is > 0.
Units:   times and ages in accesses, counts in blocks.
"""

from collections.abc import Iterator

from kvtier.policies.density.classes import CLASSES

_SPANS_PER_TIER = 16
_STRIDE = CLASSES + 1


class Census:
    """A dict from (span, class), as one number, to blocks. `span` and `counts` may be read directly."""

    def __init__(self, blocks: int) -> None:
        """blocks: what the tier holds."""
        self.span = max(1, blocks // _SPANS_PER_TIER)
        self.counts: dict[int, int] = {}

    def add(self, class_: int, time: int, blocks: int = 1) -> None:
        """So many are watched from now on."""
        key = time // self.span * _STRIDE + class_
        self.counts[key] = self.counts.get(key, 0) + blocks

    def remove(self, class_: int, time: int, blocks: int = 1) -> None:
        """They are not any more, or as others."""
        key = time // self.span * _STRIDE + class_
        left = self.counts[key] - blocks
        if left:
            self.counts[key] = left
        else:
            del self.counts[key]

    def add_run(self, class_: int, begin: int, blocks: int) -> None:
        """So many, used last one after the other from time `begin` on."""
        for time, count in self._spans(begin, blocks):
            self.add(class_, time, count)

    def remove_run(self, class_: int, begin: int, blocks: int) -> None:
        """They are not watched any more, or as others."""
        for time, count in self._spans(begin, blocks):
            self.remove(class_, time, count)

    def _spans(self, begin: int, blocks: int) -> Iterator[tuple[int, int]]:
        """A run of times, cut where a span ends: where a part begins, and how many are in it."""
        while blocks > 0:
            count = min(blocks, self.span - begin % self.span)
            yield begin, count
            begin, blocks = begin + count, blocks - count

    def living(self, now: int) -> Iterator[tuple[int, int, int]]:
        """(class, age, blocks), the age being that of the middle of the span."""
        for key, blocks in self.counts.items():
            span, class_ = divmod(key, _STRIDE)
            yield class_, max(0, now - span * self.span - self.span // 2), blocks
