"""`Ranks`: which blocks leave a tier before, or after, what its policy says: a priority, or a pin.

    -1  leaves before all others, the oldest first
     1  leaves after those without a rank
     2  pinned: leaves when no other can without a loss

Owns: what is claimed for each key, and by tier which copies have a rank there. A block's rank is the highest that
somebody claims for it; it holds in every tier that has a READY copy, also in one that gets it later.
Always:  a rank above 0 counts in at most `quota(tier)` copies of a tier, so that claims cannot starve others; what is
         beyond is refused, has no rank, and is tried again with the next claim. No claim makes a request fail: of
         ranked blocks the lowest leave when there is nothing else. What a claim costs does not depend on how many
         others there are, of this block or another, nor does a choice look at more ranked copies than it passes.
Units:   handles, tier indexes, blocks.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, islice

from kvtier.allocator.rings import NOWHERE, Rings
from kvtier.cache.directory import Directory
from kvtier.policies.base import Policy, up_to
from kvtier.types import StoreKey

PRIORITY_MIN, PRIORITY_MAX = -1, 1
PINNED = 2
_RINGS = {PRIORITY_MIN: 1, PRIORITY_MAX: 2, PINNED: 3}  # by rank
_FIRST, _KEPT = 1, (2, 3)


class Besides(Container[int]):
    """Handles that have a rank, or must stay, or were chosen before."""

    def __init__(self, staying: Container[int], ranked: Rings, chosen: Container[int] = ()) -> None:
        self._staying = staying
        self._ranked = ranked
        self._chosen = chosen

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, int)
        return self._ranked.ring_of(handle) != NOWHERE or handle in self._chosen or handle in self._staying


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
        # By rank, the highest first: how many want it for a key.
        self._claims: dict[int, dict[StoreKey, int]] = {PINNED: {}, PRIORITY_MAX: {}, PRIORITY_MIN: {}}
        self._ranked = [Rings(len(_RINGS)) for _ in range(directory.tiers)]  # handles, the latest promise at the tail

    # ------------------------------------------------------------ claims

    def claim(self, key: StoreKey, rank: int) -> None:
        """Somebody wants this rank for a block, be it there or not, until `let_go`."""
        claims = self._claims[rank]
        claims[key] = claims.get(key, 0) + 1
        self._claims_changed(key)

    def let_go(self, key: StoreKey, rank: int) -> None:
        """One claim less."""
        claims = self._claims[rank]
        claims[key] -= 1
        if not claims[key]:
            del claims[key]
        self._claims_changed(key)

    def _claims_changed(self, key: StoreKey) -> None:
        handle = self._directory.find(key)
        if handle is not None:
            rank = self._claimed(key)
            for tier in range(self._directory.tiers):
                if self._directory.is_ready(handle, tier):
                    self._put(handle, tier, rank)

    def _claimed(self, key: StoreKey) -> int:
        """The highest rank that somebody wants for it; 0: nobody wants any."""
        return next((rank for rank, claims in self._claims.items() if key in claims), 0)

    # ------------------------------------------------------------ copies

    def entered(self, handles: Iterable[int], tier: int) -> None:
        """These became READY."""
        if any(self._claims.values()):
            for handle in handles:
                if rank := self._claimed(self._directory.key(handle)):
                    self._put(handle, tier, rank)

    def left(self, handles: Iterable[int], tier: int) -> None:
        """These are not READY any more."""
        if any(self._ranked[tier].lens):
            for handle in handles:
                self._put(handle, tier, 0)

    def shrunk(self, tier: int) -> None:
        """A tier may hold less than it did: the latest promises are given up, until the quota holds again."""
        for handle in [*islice(self._last(tier), max(0, self.kept(tier) - self._quota(tier)))]:
            self._refused(tier)
            self._put(handle, tier, 0)

    def _put(self, handle: int, tier: int, rank: int) -> None:
        ranked, ring = self._ranked[tier], _RINGS.get(rank, NOWHERE)
        before = ranked.ring_of(handle)
        if ring in _KEPT and before not in _KEPT and self.kept(tier) >= self._quota(tier):
            self._refused(tier)
            ring = NOWHERE  # one that somebody wants to keep does not leave first, whoever said so before
        if ring == NOWHERE and before != NOWHERE:
            ranked.remove(handle)
        elif ring != before:
            ranked.move((handle,), ring)

    # ------------------------------------------------------------ who leaves

    def kept(self, tier: int) -> int:
        """How many copies leave after the others."""
        lens = self._ranked[tier].lens
        return sum(lens[ring] for ring in _KEPT)

    def keeps(self, handle: int, tier: int) -> bool:
        """Whether this copy leaves after the others."""
        return self._ranked[tier].ring_of(handle) in _KEPT

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
        ranked = self._ranked[tier]
        chosen = [*islice(self._first(tier, staying), count)]
        chosen += islice((h for h in cheapest if ranked.ring_of(h) == NOWHERE), count - len(chosen))
        besides = Besides(staying, ranked, {*chosen}) if chosen or any(ranked.lens) else staying
        if missing := count - len(chosen):
            chosen += policy.candidates(missing, besides, incoming=incoming)
        if len(chosen) < count and self.kept(tier):
            # A policy gives as many as it is asked for, or none: so ask for all others that there are.
            last = [*self._last(tier, staying)]
            if (others := min(missing, total - len(last) - len(chosen))) > 0:
                chosen += policy.candidates(others, besides, incoming=incoming)
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
        ranked = self._ranked[tier]
        if not any(ranked.lens):
            return up_to(policy, count, staying, size_class, incoming)
        chosen = [*islice(self._first(tier, staying, size_class), max(0, count))]
        chosen += up_to(policy, count - len(chosen), Besides(staying, ranked), size_class, incoming)
        return chosen or [*islice(self._last(tier, staying, size_class), max(0, count))]

    def _first(self, tier: int, staying: Container[int], size_class: int | None = None) -> Iterator[int]:
        """Those that leave before the others, and may."""
        return self._that_may(self._ranked[tier].walk(_FIRST), tier, staying, size_class)

    def _last(self, tier: int, staying: Container[int] = (), size_class: int | None = None) -> Iterator[int]:
        """Those that leave after the others, and may: what was promised first holds longest."""
        return self._that_may(chain(*map(self._ranked[tier].walk_back, _KEPT)), tier, staying, size_class)

    def _that_may(
        self, handles: Iterable[int], tier: int, staying: Container[int], size_class: int | None
    ) -> Iterator[int]:
        for handle in handles:
            if handle not in staying and (size_class is None or self._size_class(handle, tier) == size_class):
                yield handle

    # ------------------------------------------------------------ asked

    def check(self) -> list[str]:
        """Recount; an empty list means that all ranks are of READY copies."""
        return [finding for tier in range(self._directory.tiers) for finding in self._findings(tier)]

    def _findings(self, tier: int) -> Iterator[str]:
        ranked = self._ranked[tier]
        yield from (f"tier {tier}, ranks: {finding}" for finding in ranked.check())
        if any(not self._directory.is_ready(handle, tier) for ring in _RINGS.values() for handle in ranked.walk(ring)):
            yield f"tier {tier}: a copy has a rank and is not there"
