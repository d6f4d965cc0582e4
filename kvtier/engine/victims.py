"""Who leaves a persistent tier for blocks that come, in the order of its policy and of what hints have claimed.

Owns nothing. Its places have size classes, of which each extent serves one: a block makes room for others of its own
class alone, a whole extent for any. Always: nobody is chosen who is to stay. Units: blocks, bytes.
"""

from collections.abc import Container, Iterator

from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State

COLDEST_TRIED_MAX = 64  # blocks among whose extents one that can be emptied is sought


class Victims:
    """Chooses, and changes nothing."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._directory = residency.directory

    def of_size(self, tier: int, count: int, size: int | None, staying: Container[int], incoming: int) -> list[int]:
        """Up to `count` blocks of this size in policy order; if the coldest has another size, its whole extent.

        size: None if it shows only when a block is written: an extent serves any.
        """
        level = self._residency.levels[tier]
        policy, ranks = level.policy, self._residency.ranks
        coldest = ranks.up_to(policy, tier, 1, staying) if count > 0 else []
        if not coldest:
            return []
        place = self._directory.place(coldest[0], tier)
        if size is None or level.size_class_at(place, self._directory.length_bytes(coldest[0])) != size:
            return self.whole_extent(tier, staying) or ranks.up_to(policy, tier, 1, staying, size)
        return ranks.up_to(policy, tier, count, staying, size, incoming)

    def whole_extent(self, tier: int, staying: Container[int]) -> list[int]:
        """The blocks of the coldest extent that may all leave: emptied, it can be lent to any size."""
        level = self._residency.levels[tier]
        assert level.room is not None
        extent_of, place = level.room.extent, self._directory.place
        movable = sum(handle not in staying for handle in self._directory.ready_in(tier))
        count = min(movable, COLDEST_TRIED_MAX)  # `up_to` may leave out half
        coldest = self._residency.ranks.choose(level.policy, tier, count, staying, movable)
        extents = dict.fromkeys(extent_of(place(h, tier)) for h in coldest)  # in order, each once
        members: dict[int, list[int]] = {extent: [] for extent in extents}
        for handle in self._with_copy(tier):
            extent = extent_of(place(handle, tier))
            if extent in members:
                members[extent].append(handle)
        keeps = self._residency.ranks.keeps
        for extent in sorted(extents, key=lambda extent: any(keeps(h, tier) for h in members[extent])):
            if all(self._directory.is_ready(h, tier) and h not in staying for h in members[extent]):
                return members[extent]
        return []

    def _with_copy(self, tier: int) -> Iterator[int]:
        return (h for h in self._directory.handles() if self._directory.state(h, tier) is not State.GONE)
