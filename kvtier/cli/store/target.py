"""Which store a verb is about: a folder, or the lmdb tier of a YAML file. Owns nothing."""

from pathlib import Path

from kvtier.config import LmdbTierConfig, load_config
from kvtier.errors import UsageError

_YAML = (".yaml", ".yml")


def tier_of(path: Path) -> LmdbTierConfig | None:
    """The lmdb tier that a YAML file configures, None if the path is no such file.

    Raises ConfigError; UsageError if it has no such tier.
    """
    if path.suffix not in _YAML or not path.is_file():
        return None
    config = load_config(path, overrides={"model.weights_epoch": "any"})  # the weights need not be here
    for tier in config.tiers:
        if isinstance(tier, LmdbTierConfig):
            return tier
    raise UsageError(f"{path}: it has no tier of type lmdb, and so no store to look at")


def folder_of(path: Path) -> Path:
    """The store's folder. Raises like `tier_of`."""
    tier = tier_of(path)
    return path if tier is None else tier.path
