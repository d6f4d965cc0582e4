"""The demo's configuration: deliberately small tiers over a store, or the user's own.

Owns no state. Always: what is returned fits the demo's model and has a persistent tier. Units: tokens, blocks, bytes.
"""

from pathlib import Path

from kvtier.blocks.spec import block_specs
from kvtier.cli.demo.text import NEW_TOKENS, QUESTION_TOKENS_MAX
from kvtier.cli.demo.weights import NAME, SHAPE
from kvtier.config import Config, LmdbTierConfig, load_config
from kvtier.errors import ConfigError, UsageError
from kvtier.types import GroupSpec, ModelSpec

BLOCK_TOKENS = 16
SPARE_BLOCKS = 4  # beside one user's prompt, the null slot included: the next users' tails push others down
STORE_PROMPTS = 4  # the prefix once and a tail per user would need a third of this


def small_tiers(model_folder: Path, prefix_tokens: int, store: Path) -> Config:
    """gpu and host tiers that hold little more than one prompt, so that blocks move down while users are served."""
    prompt_blocks = -(-(prefix_tokens + QUESTION_TOKENS_MAX + NEW_TOKENS) // BLOCK_TOKENS)
    tier_bytes = (prompt_blocks + SPARE_BLOCKS) * _stride_bytes()
    model = {
        "name": NAME,
        "weights": str(model_folder),
        "weights_epoch": "auto",
        "layers": SHAPE.layers,
        "kv_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "dtype": SHAPE.dtype,
        "block_tokens": BLOCK_TOKENS,
    }
    # Moving down early: a demo is too short to wait until a tier is nearly full.
    eager = {"capacity": tier_bytes, "low_watermark": 0.5, "high_watermark": 0.9}
    tiers = [
        {"type": "gpu", **eager},
        {"type": "host", **eager},
        {"type": "lmdb", "capacity": STORE_PROMPTS * tier_bytes, "path": str(store)},
    ]
    # A demo on a slow disk should show a slow load, not a recomputed prompt.
    return load_config({"model": model, "tiers": tiers, "limits": {"load_deadline": "30s"}})


def own_tiers(file: Path) -> Config:
    """The user's file. Raises ConfigError or UsageError if it is for another model, or keeps nothing."""
    config = load_config(file)
    try:
        SHAPE.check_fits(config.model)
    except UsageError as error:
        raise UsageError(f"{file}: the demo runs {NAME}: {error}") from None
    if not any(isinstance(tier, LmdbTierConfig) for tier in config.tiers):
        problem = "no tier survives the process, and the demo answers from a second one"
        raise ConfigError("tiers", problem, "Add `- {type: lmdb, path: ./store, capacity: 4GiB}`.")
    return config


def persistent_name(config: Config) -> str:
    """The name of the tier that the second process restores from."""
    return next(tier.name for tier in config.tiers if isinstance(tier, LmdbTierConfig))


def _stride_bytes() -> int:
    layers = tuple(range(SHAPE.layers))
    group = GroupSpec("full", layers, SHAPE.kv_heads, SHAPE.head_dim, SHAPE.dtype, BLOCK_TOKENS)
    return block_specs(ModelSpec(NAME, "", (group,)))[0].stride_bytes
