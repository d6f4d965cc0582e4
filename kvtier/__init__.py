"""kvtier keeps the KV cache of language models in tiers: GPU memory, host RAM and NVMe.

This module is the public surface. Names are resolved at first use, so that `import kvtier` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.blocks.extra_keys import ExtraKeys
    from kvtier.blocks.hashing import Keys, hash_blocks
    from kvtier.cache.leases import Lease, Match, NoRoom
    from kvtier.config import load_config
    from kvtier.engine.cache import TieredCache, open
    from kvtier.engine.sync import SyncCache, open_sync
    from kvtier.errors import (
        Asleep,
        ClosedError,
        ConfigError,
        DeviceLost,
        InvariantError,
        KvtierError,
        StoreError,
        UsageError,
    )

__version__ = "0.1.0"

_HOMES = {
    "load_config": "kvtier.config",
    "open": "kvtier.engine.cache",
    "open_sync": "kvtier.engine.sync",
    "TieredCache": "kvtier.engine.cache",
    "SyncCache": "kvtier.engine.sync",
    "hash_blocks": "kvtier.blocks.hashing",
    "Keys": "kvtier.blocks.hashing",
    "ExtraKeys": "kvtier.blocks.extra_keys",
    "Match": "kvtier.cache.leases",
    "Lease": "kvtier.cache.leases",
    "NoRoom": "kvtier.cache.leases",
    "KvtierError": "kvtier.errors",
    "ConfigError": "kvtier.errors",
    "UsageError": "kvtier.errors",
    "ClosedError": "kvtier.errors",
    "Asleep": "kvtier.errors",
    "StoreError": "kvtier.errors",
    "InvariantError": "kvtier.errors",
    "DeviceLost": "kvtier.errors",
}

__all__ = [
    "Asleep",
    "ClosedError",
    "ConfigError",
    "DeviceLost",
    "ExtraKeys",
    "InvariantError",
    "Keys",
    "KvtierError",
    "Lease",
    "Match",
    "NoRoom",
    "StoreError",
    "SyncCache",
    "TieredCache",
    "UsageError",
    "__version__",
    "hash_blocks",
    "load_config",
    "open",
    "open_sync",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # the next use finds it without asking
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
