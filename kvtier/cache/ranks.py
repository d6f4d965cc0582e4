"""`Ranks`: which blocks leave a tier before, or after, what its policy says: a priority, or a pin.

    -1  leaves before all others, the oldest first
     1  leaves after those without a rank
     2  pinned: leaves when no other can without a loss

Owns: what is claimed for each key, and by tier which copies have a rank there. A block's rank is the highest that
somebody claims for it; it holds in every tier that has a READY copy, also in one that gets it later.
Always:  a rank above 0 counts in at most `quota(tier)` copies of a tier, so that claims cannot starve others; what is
         beyond is refused, and tried again with the next claim. No claim makes a request fail: of ranked blocks the
         lowest leave when there is nothing else.
Units:   handles, tier indexes, blocks.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from itertools import islice

from kvtier.cache.directory import Directory
from kvtier.policies.base import Policy, up_to
from kvtier.types import StoreKey

PRIORITY_MIN, PRIORITY_MAX = -1, 1
PINNED = 2


class Besides(Container[int]):
    """Handles of either."""

    def __init__(self, staying: Container[int], ranked: Container[int]) -> None:
        self._staying = staying
        self._ranked = ranked

    def __contains__(self, handle: object) -> bool:
        return handle in self._ranked or handle in self._staying


class Ranks:
    """Claims by key, ranked copies by tier. `refused` hears of a tier in which a claim found the quota used up."""

    def __init__(
        self,
        directory: Directory,
        size_class: Callable[[int, int], int],
        quota: Callable[[int], int],
        refused: Callable[[int], None],
    ) -> None:
        """size_class: what a copy takes, by handle and tier, as policies know it."""
        self._directory = directory
        self._size_class = size_class
        self._quota = quota
        self._refused = refused
        self._claims: dict[StoreKey, list[int]] = {}
        self._ranked: list[dict[int, int]] = [{} for _ in range(directory.tiers)]  # handle -> rank, oldest first
        self._above: list[int] = [0] * directory.tiers  # of these, those above 0

    # ------------------------------------------------------------ claims

    def claim(self, key: StoreKey, rank: int) -> None:
        """Somebody wants this rank for a block, be it there or not, until `let_go`."""
        self._claims.setdefault(key, []).append(rank)
        self._claims_changed(key)

    def let_go(self, key: StoreKey, rank: int) -> None:
        """One claim less."""
        claims = self._claims[key]
        claims.remove(rank)
        if not claims:
            del self._claims[key]
        self._claims_changed(key)

    def _claims_changed(self, key: StoreKey) -> None:
        handle = self._directory.find(key)
        if handle is not None:
            for tier in range(self._directory.tiers):
                if self._directory.is_ready(handle, tier):
                    self._put(handle, tier, max(self._claims.get(key, (0,))))

    # ------------------------------------------------------------ copies

    def entered(self, handles: Iterable[int], tier: int) -> None:
        """These became READY."""
        if self._claims:
            for handle in handles:
                if claims := self._claims.get(self._directory.key(handle)):
                    self._put(handle, tier, max(claims))

    def left(self, handles: Iterable[int], tier: int) -> None:
        """These are not READY any more."""
        if self._ranked[tier]:
            for handle in handles:
                self._put(handle, tier, 0)

    def shrunk(self, tier: int) -> None:
        """A tier may hold less than it did: the latest promises are given up, until the quota holds again."""
        for handle in self._last(tier, self._ranked[tier])[: max(0, self._above[tier] - self._quota(tier))]:
            self._refused(tier)
            self._put(handle, tier, 0)

    def _put(self, handle: int, tier: int, rank: int) -> None:
        ranked = self._ranked[tier]
        before = ranked.get(handle, 0)
        if rank > 0 >= before and self._above[tier] >= self._quota(tier):
            self._refused(tier)
            rank = before
        if rank == before:
            return
        self._above[tier] += (rank > 0) - (before > 0)
        ranked.pop(handle, None)
        if rank:
            ranked[handle] = rank

    # ------------------------------------------------------------ who leaves

    def kept(self, tier: int) -> int:
        """How many copies leave after the others."""
        return self._above[tier]

    def keeps(self, handle: int, tier: int) -> bool:
        """Whether this copy leaves after the others."""
        return self._ranked[tier].get(handle, 0) > 0

    def choose(
        self,
        policy: Policy,
        tier: int,
        count: int,
        staying: Container[int],
        total: int,
        incoming: int | None = None,
        cheapest: Iterable[int] = (),
    ) -> list[int]:
        """`count` of the `total` copies that are not in `staying`, first to leave first; none if there are not enough.

        cheapest: those of them that leave before the policy is asked.
        """
        first, last = self._leaving(tier, staying)
        chosen = first[:count]
        if len(chosen) < count:
            others = (h for h in cheapest if h not in self._ranked[tier]) if self._ranked[tier] else cheapest
            chosen += islice(others, count - len(chosen))
        if (short := min(count, total - len(last)) - len(chosen)) > 0:
            besides: Container[int] = staying
            if chosen or self._ranked[tier]:
                besides = Besides(staying, {*chosen, *self._ranked[tier]})
            chosen += policy.candidates(short, besides, incoming=incoming)
        chosen += last[: count - len(chosen)]
        return chosen if len(chosen) == count else []

    def up_to(
        self,
        policy: Policy,
        tier: int,
        count: int,
        staying: Container[int],
        size_class: int | None = None,
        incoming: int | None = None,
    ) -> list[int]:
        """As `policies.base.up_to`; of those that leave last as many as may, if there are no others."""
        if not self._ranked[tier]:
            return up_to(policy, count, staying, size_class, incoming)
        first, last = self._leaving(tier, staying, size_class)
        chosen = first[: max(0, count)]
        chosen += up_to(policy, count - len(chosen), Besides(staying, self._ranked[tier]), size_class, incoming)
        return chosen or last[: max(0, count)]

    def _leaving(
        self, tier: int, staying: Container[int], size_class: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ranked copies that may leave: those before the others, and those after them, in this order."""
        ranked = self._ranked[tier]
        if not ranked:
            return [], []
        may = [h for h in ranked if h not in staying and size_class in (None, self._size_class(h, tier))]
        return [h for h in may if ranked[h] < 0], self._last(tier, may)

    def _last(self, tier: int, handles: Iterable[int]) -> list[int]:
        """Those of these, oldest first, that leave after the others: what was promised first holds longest."""
        ranked = self._ranked[tier]
        kept = [handle for handle in reversed([*handles]) if ranked[handle] > 0]
        return sorted(kept, key=ranked.__getitem__)

    # ------------------------------------------------------------ asked

    def check(self) -> list[str]:
        """Recount; an empty list means that all ranks are of READY copies, and within the quota."""
        return [finding for tier in range(self._directory.tiers) for finding in self._findings(tier)]

    def _findings(self, tier: int) -> Iterator[str]:
        ranked: Collection[int] = self._ranked[tier]
        if any(not self._directory.is_ready(handle, tier) for handle in ranked):
            yield f"tier {tier}: a copy has a rank and is not there"
        if self._above[tier] != sum(rank > 0 for rank in self._ranked[tier].values()):
            yield f"tier {tier}: {self._above[tier]} copies are said to leave last"
