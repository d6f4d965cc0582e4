"""`model` as a `ModelSpec`: its groups with every layer named, and its weights epoch.

Owns no state. Always: each layer belongs to exactly one group. A model with one group may say its shape directly
(`layers: 30`, `kv_heads`, ...); hybrids and MLA list `groups`, whose `dtype` and `block_tokens` default to the
model's. Layers given as a number are the next so many after the group before.
"""

from collections.abc import Mapping

from kvtier.config.fields import COUNT_MAX, validated
from kvtier.config.schema import GroupSection, ModelSection
from kvtier.config.weights import cache_folder, weights_epoch
from kvtier.errors import ConfigError
from kvtier.types import GroupSpec, ModelSpec

SHAPE_KEYS = ("layers", "kv_heads", "head_dim")


def groups_of(section: ModelSection, problems: list[ConfigError]) -> tuple[GroupSpec, ...]:
    """The groups, or an empty tuple after adding what is wrong to `problems`."""
    if section.groups is None:
        group = _only_group(section, problems)
        return (group,) if group else ()
    if not isinstance(section.groups, list) or not section.groups:
        remedy = "Write a list such as [{kind: full, layers: 30, kv_heads: 3, head_dim: 64}]."
        problems.append(ConfigError("model.groups", f"{section.groups!r} is not a list of groups", remedy))
        return ()
    problems_before = len(problems)
    for key in SHAPE_KEYS:
        if getattr(section, key) is not None:
            text = "says the shape of an only group, but there are groups"
            problems.append(ConfigError(f"model.{key}", text, f"Say {key} in each of model.groups instead."))
    groups: list[GroupSpec] = []
    for index, raw in enumerate(section.groups):
        path = f"model.groups[{index}]"
        written = validated(GroupSection, raw, path, problems)
        if written is not None:
            taken = [layer for group in groups for layer in group.layers]
            group = _group(written, section, taken, path, problems)
            groups += [group] if group else []
    return tuple(groups) if len(problems) == problems_before else ()


def resolve_epoch(section: ModelSection, environ: Mapping[str, str]) -> str:
    """The weights epoch: the given text, or for `auto` a digest of the weight files. Reads them."""
    if section.weights_epoch != "auto":
        return section.weights_epoch
    if section.weights is None:
        raise ConfigError(
            "model.weights_epoch",
            "'auto' cannot tell when the weights change, as model.weights is not given",
            "Name their file or folder in model.weights, or set weights_epoch to a string that changes with them.",
        )
    return weights_epoch(section.weights, cache_folder(environ))


def model_spec(section: ModelSection, groups: tuple[GroupSpec, ...], epoch: str, codec: str) -> ModelSpec:
    """codec: as the tiers have it."""
    return ModelSpec(
        name=section.name,
        weights_epoch=epoch,
        groups=groups,
        layout=section.layout,
        hash=section.hash,
        hash_seed=section.hash_seed,
        tensor_parallel=section.tensor_parallel,
        pipeline_parallel=section.pipeline_parallel,
        context_parallel=section.context_parallel,
        codec=codec,
    )


def _only_group(section: ModelSection, problems: list[ConfigError]) -> GroupSpec | None:
    layers, kv_heads, head_dim, dtype = section.layers, section.kv_heads, section.head_dim, section.dtype
    examples = {"layers": "30", "kv_heads": "3", "head_dim": "64", "dtype": "bfloat16"}
    missing = [key for key in examples if getattr(section, key) is None]
    problems += [
        ConfigError(f"model.{key}", "is missing", f"Add `{key}: {examples[key]}` or the like, or list model.groups.")
        for key in missing
    ]
    if layers is None or kv_heads is None or head_dim is None or dtype is None:
        return None
    return GroupSpec("full", tuple(range(layers)), kv_heads, head_dim, dtype, section.block_tokens)


def _group(
    written: GroupSection, model: ModelSection, taken: list[int], path: str, problems: list[ConfigError]
) -> GroupSpec | None:
    """One group, or None after adding what is wrong with it. `taken`: the layers of the groups before."""
    found = []
    layers = _layers(written.layers, taken)
    if isinstance(layers, str):
        found.append(ConfigError(f"{path}.layers", layers, "Write a number of layers, or a list such as [0, 1, 2]."))
    dtype = written.dtype or model.dtype
    if dtype is None:
        remedy = "Add `dtype: bfloat16` or the like, here or to model."
        found.append(ConfigError(f"{path}.dtype", "is missing", remedy))
    kv_heads = written.kv_heads or (1 if written.kind == "mla" else None)
    if kv_heads is None:
        found.append(ConfigError(f"{path}.kv_heads", "is missing", "Add `kv_heads: 3` or the like."))
    elif written.kind == "mla" and kv_heads != 1:
        problem = f"{kv_heads} heads, but mla keeps one latent per token"
        found.append(ConfigError(f"{path}.kv_heads", problem, "Leave it out, or write 1."))
    problems += found
    if found or isinstance(layers, str) or dtype is None or kv_heads is None:
        return None
    block_tokens = written.block_tokens or model.block_tokens
    return GroupSpec(written.kind, layers, kv_heads, written.head_dim, dtype, block_tokens)


def _layers(value: object, taken: list[int]) -> tuple[int, ...] | str:
    """The layers of a group, or what is wrong with them."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)  # an override is always a text
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= COUNT_MAX:
        first = max(taken, default=-1) + 1
        return tuple(range(first, first + value))
    if not isinstance(value, list) or not value:
        return f"{value!r} is neither a number from 1 to {COUNT_MAX} nor a list of layers"
    for layer in value:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < COUNT_MAX:
            return f"{layer!r} is not the index of a layer"
    shared = sorted(set(value) & set(taken)) or sorted(layer for layer in set(value) if value.count(layer) > 1)
    return f"layer {shared[0]} is listed twice" if shared else tuple(value)
