"""Matches that are not given back yet: what they found, and what they pin until then, or until their time is over.

Owns: the list of them. Always: a match in it pins the fastest copy of each block that it found; one that is not pins
nothing; each has a time at which it is over, which it keeps. Units: tokens, seconds of the engine's clock.
"""

from collections.abc import Sequence

from kvtier.cache.leases import Match
from kvtier.cache.pins import pin, unpin
from kvtier.cache.prefix import Prefix, longest_prefix, tokens_by_tier
from kvtier.cache.residency import Residency
from kvtier.engine.expiries import Expiries


class Matches:
    """Of one core. sizes: tokens of a block, by group."""

    def __init__(self, residency: Residency, sizes: Sequence[int]) -> None:
        self._residency = residency
        self._sizes = tuple(sizes)
        self._names = [level.name for level in residency.levels]
        self.held: dict[int, Match] = {}  # by number
        self._expiries = Expiries[int]()  # of these

    def __len__(self) -> int:
        return len(self.held)

    def look(self, match: Match, namespace: int, tokens_max: int | None = None) -> None:
        """Find and pin, in this namespace, what a match asks for, at most so much."""
        unpin(self._residency, match)
        match.namespace = namespace
        limits = [limit for limit in (match.tokens_max, tokens_max) if limit is not None]
        prefix = longest_prefix(self._residency.directory, namespace, match.keys, min(limits, default=None))
        match.prefix = prefix
        match.tokens = prefix.tokens
        match.tiers = self.tiers_of(prefix)
        pin(self._residency, match)
        self.held[match.match_id] = match
        self._expiries.set(match.match_id, match.expires_at_s)

    def tiers_of(self, prefix: Prefix) -> dict[str, int]:
        """Tier name -> tokens of the prefix whose fastest copy lies there."""
        return tokens_by_tier(prefix.tiers, self._sizes, prefix.tokens, self._names)

    def of_owner(self, owner: str) -> list[Match]:
        return [match for match in self.held.values() if match.owner == owner]

    def release(self, match: Match) -> None:
        """Let go of what it pins. Idempotent."""
        unpin(self._residency, match)
        self.consumed(match)

    def consumed(self, match: Match) -> None:
        """A lease holds its blocks from now on."""
        self.held.pop(match.match_id, None)
        self._expiries.drop(match.match_id)

    def expire(self, now_s: float) -> None:
        """Give back those whose time is over, in the order in which they were made."""
        for match in [self.held[number] for number in sorted(self._expiries.take_over(now_s))]:
            self._residency.counters.add("matches_expired", int(bool(match.pins)))
            self.release(match)

    def next_expiry_s(self) -> float | None:
        """When the first of them is over; None if there are none."""
        return self._expiries.next_s()
