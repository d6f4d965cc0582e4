"""An account of what is where: figures of a tier, and everything counted anew. Changes nothing.

Units: blocks, slots, bytes.
"""

from typing import Any

from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State


def stats_of(residency: Residency, tier: int) -> dict[str, Any]:
    """Sizes and counters of a tier as plain data."""
    level, directory = residency.levels[tier], residency.directory
    stats: dict[str, Any] = {
        "blocks": directory.ready[tier],
        "blocks_idle": directory.idle[tier],
        "blocks_idle_clean": directory.idle_clean[tier],
        "capacity_bytes": level.capacity_bytes,
    }
    if level.pool is not None:
        stats |= {
            "slots": level.pool.slots_total - level.pool.slots_withdrawn if level.capacity_bytes else 0,
            "slots_free": level.pool.slots_free,
            "slots_quarantined": level.pool.slots_quarantined,
        }
    if level.room is not None:
        stats["used_bytes"] = level.room.used_bytes()
    return stats | residency.counters.of_tier(tier)


def recount(residency: Residency) -> list[str]:
    """Directory, pools and policies against each other; an empty list means that they agree."""
    findings = [*residency.directory.check(), *residency.ranks.check()]
    for tier, level in enumerate(residency.levels):
        findings += [f"{level.name}: {finding}" for finding in level.policy.check()]
        ready = residency.directory.ready[tier]
        if len(level.policy) != ready:
            findings.append(f"{level.name}: policy knows {len(level.policy)}, READY are {ready}")
        if level.pool is not None:
            findings += [f"{level.name}: {finding}" for finding in level.pool.check()]
            findings += _misplaced(residency, tier)
    return findings


def _misplaced(residency: Residency, tier: int) -> list[str]:
    level, directory = residency.levels[tier], residency.directory
    return [
        f"{level.name}: handle {handle} says slot {slot}, which holds {level.slots.occupant(slot)}"
        for handle in directory.handles()
        if directory.state(handle, tier) is not State.GONE
        and level.slots.occupant(slot := directory.place(handle, tier)) != handle
    ]
