"""`tiers` as records: each of a known type, in the order fastest first.

Owns no state. Always: all problems of all tiers are told at once, and what comes back is whole or empty.
"""

from typing import Any

from kvtier.config import rules
from kvtier.config.fields import validated
from kvtier.config.schema import TIER_TYPES, LmdbTierConfig, TierConfig
from kvtier.config.sources import Sources
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

KNOWN = f"Known: {', '.join(TIER_TYPES)}."


def tiers_of(raw: object, sources: Sources, problems: list[ConfigError]) -> tuple[TierConfig, ...]:
    """The tiers, or an empty tuple after adding what is wrong to `problems`."""
    if not isinstance(raw, list) or not raw:
        problem = "is missing" if raw is None else f"{raw!r} is not a list of tiers"
        problems.append(ConfigError("tiers", problem, "List at least `- {type: gpu, capacity: 512MiB}`."))
        return ()
    found: list[ConfigError] = []
    types = [kind for index, item in enumerate(raw) if (kind := _type_of(index, item, found))]
    if len(types) == len(raw):
        rules.check_order(types, found)
    tiers = [tier for index, item in enumerate(raw) if (tier := _tier(index, item, sources, found))]
    if len(tiers) == len(raw):
        rules.check_names(tiers, found)
    if not found:
        rules.check_growth(tiers, found)
    problems += found
    return () if found else tuple(tiers)


def _type_of(index: int, raw: object, problems: list[ConfigError]) -> str | None:
    """The type of an entry, or None after adding what is wrong with it."""
    path = f"tiers[{index}]"
    if not isinstance(raw, dict):
        problems.append(ConfigError(path, f"{raw!r} is not a mapping", "Write {type: gpu, capacity: 512MiB}."))
        return None
    kind = raw.get("type")
    if isinstance(kind, str) and kind in TIER_TYPES:
        return kind
    if "type" not in raw:
        problems.append(ConfigError(f"{path}.type", "is missing", KNOWN))
    elif isinstance(kind, str):
        problems.append(ConfigError(f"{path}.type", f"unknown type {kind!r}", suggestion(kind, TIER_TYPES)))
    else:
        problems.append(ConfigError(f"{path}.type", f"{kind!r} is not a type", KNOWN))
    return None


def _tier(index: int, raw: Any, sources: Sources, problems: list[ConfigError]) -> TierConfig | None:
    if _type_of(index, raw, []) is None:
        return None
    path = f"tiers[{index}]"
    if raw["type"] == "lmdb" and "capacity" not in raw:
        problems.append(_uncapped(path))
        raw = {**raw, "capacity": 1}  # so that its other problems are told too
    tier = validated(TIER_TYPES[raw["type"]], raw, path, problems)
    if tier is None:
        return None
    rules.check_watermarks(index, tier, problems)
    rules.check_range(index, tier, problems)
    if not isinstance(tier, LmdbTierConfig):
        return tier
    folder = sources.resolve_path(tier.path, ("tiers", index, "path"), problems)
    return tier.model_copy(update={"path": folder})


def _uncapped(path: str) -> ConfigError:
    problem = "is missing, and a store without it would grow until the disk is full"
    return ConfigError(f"{path}.capacity", problem, "Add `capacity: 50GiB` or what the disk can spare.")
