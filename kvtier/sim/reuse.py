"""How far apart uses of a block are: what a cache of a given size could find at best under LRU.

The distance of a use is how many other blocks were used since the block's last one, counted when its request arrives;
a block that was not used before has none. Owns nothing between calls. Units: blocks.
"""

from collections import Counter

from kvtier.sim.trace import Trace


class _LatestUses:
    """Blocks by the request that used them last, as a Fenwick tree: add and sum cost O(log requests)."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self.total = 0

    def add(self, request: int, blocks: int) -> None:
        self.total += blocks
        at = request + 1
        while at < len(self._sums):
            self._sums[at] += blocks
            at += at & -at

    def after(self, request: int) -> int:
        """Blocks whose last use is later than this request."""
        up_to, at = 0, request + 1
        while at:
            up_to += self._sums[at]
            at -= at & -at
        return self.total - up_to


def reuse_distances(trace: Trace) -> Counter[int]:
    """Uses by distance; those of blocks never used before are not counted."""
    latest: dict[int, int] = {}  # block -> request
    uses = _LatestUses(len(trace.requests))
    distances: Counter[int] = Counter()
    for number, request in enumerate(trace.requests):
        before = Counter(latest[block] for block in request.blocks if block in latest)
        for then, blocks in before.items():
            distances[uses.after(then)] += blocks
        for then, blocks in before.items():
            uses.add(then, -blocks)
        uses.add(number, len(request.blocks))
        latest.update(dict.fromkeys(request.blocks, number))
    return distances
