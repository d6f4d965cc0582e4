"""What matches pin: the fastest copy of every block, until the match is consumed, given back or out of time.

Owns nothing: a match lists its pins itself. Always: each pin is let go exactly once. Units: handles, tier indexes.
"""

from kvtier.cache.leases import Match
from kvtier.cache.residency import Residency


def pin(residency: Residency, match: Match) -> None:
    """Hold the fastest copy of every block of a match."""
    for handles, tiers in zip(match.prefix.handles, match.prefix.tiers, strict=True):
        for tier in set(tiers):
            there = [handle for handle, top in zip(handles, tiers, strict=True) if top == tier]
            residency.directory.hold(there, tier)
            match.pins.append((there, tier))


def unpin(residency: Residency, match: Match) -> None:
    """Let go of them. Idempotent."""
    for handles, tier in match.pins:
        residency.unhold(handles, tier)
    match.pins.clear()


def unpin_tier(residency: Residency, match: Match, tier: int) -> None:
    """Let go of those in one tier."""
    for handles, _ in (pins for pins in match.pins if pins[1] == tier):
        residency.unhold(handles, tier)
    match.pins[:] = [pins for pins in match.pins if pins[1] != tier]
