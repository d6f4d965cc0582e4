"""HOW IT IS SET UP: one YAML file, checked once, turned into frozen records."""

from kvtier.config.load import load_config
from kvtier.config.schema import (
    Config,
    GpuTierConfig,
    HostTierConfig,
    LimitsConfig,
    LmdbTierConfig,
    PrefetchConfig,
    TierConfig,
    TraceConfig,
)

__all__ = [
    "Config",
    "GpuTierConfig",
    "HostTierConfig",
    "LimitsConfig",
    "LmdbTierConfig",
    "PrefetchConfig",
    "TierConfig",
    "TraceConfig",
    "load_config",
]
