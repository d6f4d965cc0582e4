"""transformers: `model.generate()` that starts from a prefix kvtier kept, and keeps what it computed.

Loads torch and transformers on first use only, so that the parts that need neither stay light.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Chat": "chat",
    "KvShape": "identity",
    "model_spec": "identity",
    "next_turn": "chat",
    "shape_of": "identity",
    "PrefixSession": "session",
}

__all__ = ["Chat", "KvShape", "PrefixSession", "model_spec", "next_turn", "shape_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
