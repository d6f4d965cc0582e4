"""The gate of a tier, from its configuration: who is copied down into it.

Owns no state. Units: blocks, bytes.
"""

from kvtier.config import GpuTierConfig, LmdbTierConfig, TierConfig
from kvtier.policies.admission import ADMISSIONS
from kvtier.policies.gate import Gate
from kvtier.policies.wear import DAY_S, WearBudget


def gate_of(config: TierConfig, blocks: int, file_system_bytes: int = 0) -> Gate | None:
    """None for a tier that takes everything.

    blocks: how many it holds. file_system_bytes: what `dwpd` is of, if no drive is given.
    """
    if isinstance(config, GpuTierConfig):
        return None  # nothing is copied down into it
    wear = config.wear if isinstance(config, LmdbTierConfig) else None
    if wear is None and config.admission == "always":
        return None
    rule = ADMISSIONS.get(config.admission)(blocks)
    if wear is None:
        return Gate(rule, blocks)
    per_day = wear.budget_bytes_per_day(file_system_bytes)
    return Gate(rule, blocks, WearBudget(per_day, per_day * wear.burst_s / DAY_S))
