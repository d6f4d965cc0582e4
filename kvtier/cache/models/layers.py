"""A model's description as layers: the spec of every layer, by name, in the order of the model.

Owns no state. A description is a Hugging Face `config.json` (its path, its folder, or its content: `hf_layers`)
or a mapping in our own words, those of `model` in the YAML:

    layers, kv_heads, head_dim, dtype, block_tokens          a model whose layers are all alike and attend to all
    groups: [{kind, layers, ...}, ...]                       else; dtype and block_tokens default to the model's

`layers` of a group is a number of layers, the next so many, or a list of their indexes. What else a kind says:

    full            kv_heads, head_dim, value_dim (if values are not as wide as keys)
    sliding_window  the same, and window
    chunked_local   the same, and chunk_tokens
    cross           the same, and encoder_tokens_max
    mla             head_dim: of the latent, with the part that carries the position
    mamba           shapes, dtypes (of the tensors of one layer's state, on one rank)

Always: each layer is in one group, and none is left out; an unknown word is an error with a suggestion.
Units: tokens, elements.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.cache.models.hf_layers import Wishes, hf_layers, known_dtype, on_rank
from kvtier.cache.specs import (
    MAMBA_MODES,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    Mla,
    SlidingWindow,
    Spec,
)
from kvtier.config.model_files import LAYERS_MAX, ModelFields, read_model_file, shown
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

BLOCK_TOKENS = 16

_HEADS = ("kv_heads", "head_dim", "value_dim")
_KIND_WORDS: Mapping[str, tuple[str, ...]] = {
    "full": _HEADS,
    "sliding_window": (*_HEADS, "window"),
    "chunked_local": (*_HEADS, "chunk_tokens"),
    "cross": (*_HEADS, "encoder_tokens_max"),
    "mla": ("kv_heads", "head_dim"),
    "mamba": ("shapes", "dtypes"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = dict.fromkeys(_KIND_WORDS, ("value_dim",)) | {"mla": ("kv_heads",)}
_ALIKE = "layers, kv_heads, head_dim and dtype"
_GROUP_WORDS = ("kind", "layers", "dtype", "block_tokens")
_MODEL_WORDS = ("layers", "kv_heads", "head_dim", "value_dim", "dtype", "block_tokens", "groups")
# Words of the YAML's `model` that say nothing about what a layer keeps.
_OTHER_WORDS = ("name", "weights", "weights_epoch", "layout", "hash", "hash_seed", "codec")
_PARALLEL_WORDS = ("tensor_parallel", "pipeline_parallel", "context_parallel")


def layers_of(
    description: Mapping[str, Any] | str | Path,
    *,
    block_tokens: int | None = None,
    dtype: str | None = None,
    state_dtype: str | None = None,
    state_mode: str = "align",
    draft_tokens: int = 0,
    tensor_parallel: int = 1,
    encoder_tokens_max: int | None = None,
) -> dict[str, Spec]:
    """The spec of every layer that keeps something, of one rank.

    block_tokens: 16 where neither this nor the description says it. dtype: of KV, if not the model's.
    state_dtype, state_mode: of recurrent states (`specs.Mamba`). draft_tokens: tokens of a draft, for which states
    are kept as well. encoder_tokens_max: of an encoder's input, if not what the description allows.
    Raises ConfigError for a description that is incomplete, contradicts itself, or has something that is not handled.
    """
    for name, value in (("block_tokens", block_tokens), ("encoder_tokens_max", encoder_tokens_max)):
        if value is not None:
            _argument(name, value).count(name)
    _argument("tensor_parallel", tensor_parallel).count("tensor_parallel")
    _argument("draft_tokens", draft_tokens).index("draft_tokens")
    if state_mode not in MAMBA_MODES:
        problem = f"unknown mode {shown(state_mode)}"
        raise ConfigError("state_mode", problem, suggestion(str(state_mode), MAMBA_MODES))
    file = _fields_of(description)
    wishes = Wishes(
        block_tokens=block_tokens or file.maybe_count("block_tokens") or BLOCK_TOKENS,
        dtype=None if dtype is None else known_dtype(dtype, "dtype"),
        state_dtype=None if state_dtype is None else known_dtype(state_dtype, "state_dtype"),
        state_mode=state_mode,
        draft_tokens=draft_tokens,
        tensor_parallel=tensor_parallel,
        encoder_tokens_max=encoder_tokens_max,
    )
    if _in_our_words(file):
        return _described(file, wishes, block_tokens is not None)
    return hf_layers(file, wishes)


def _argument(name: str, value: object) -> ModelFields:
    return ModelFields({name: value}, add="Give a number, or leave the argument out.")


def _fields_of(description: object) -> ModelFields:
    if isinstance(description, Mapping):
        return ModelFields(description)
    if isinstance(description, (str, Path)):
        return read_model_file(description)
    what = f"a {type(description).__name__}, neither a mapping nor a path"
    if hasattr(description, "to_dict"):
        raise ConfigError("description", f"is {what}", "Pass its to_dict().")
    remedy = "Pass the path of a config.json, its content as a dict, or a dict in the words of kvtier."
    raise ConfigError("description", f"is {what}: {shown(description)}", remedy)


def _in_our_words(file: ModelFields) -> bool:
    """Not every file has all its words; what it is then answered must be in its own."""
    if file.has("layers") or file.has("groups"):
        return True
    words = {word for word in file.content if file.has(word)}
    ours = {*_MODEL_WORDS, *_OTHER_WORDS, *_PARALLEL_WORDS}
    return bool(words) and (words <= ours or ("kv_heads" in words and "model_type" not in words))


def _described(model: ModelFields, wishes: Wishes, block_tokens_wished: bool) -> dict[str, Spec]:
    _known_words(model, (*_MODEL_WORDS, *_OTHER_WORDS, *_PARALLEL_WORDS))
    for name in _PARALLEL_WORDS:
        if model.maybe_count(name) not in (None, 1):
            raise model.error(name, "is not taken from a description", "Give tensor_parallel to layers_of instead.")
    if not model.has("groups"):
        shape = {key: model.content.get(key) for key in (*_HEADS, "layers")}
        groups = [ModelFields(shape, model.place, f"Add it: a model of layers that are all alike needs {_ALIKE}.")]
    else:
        groups = _groups(model)
    layers: dict[int, Spec] = {}
    for group in groups:
        block_tokens = None if block_tokens_wished else group.maybe_count("block_tokens")
        spec = _spec(model, group, wishes, block_tokens or wishes.block_tokens)
        for index in _indexes(group, layers):
            layers[index] = spec
    if left_out := sorted(set(range(max(layers))) - set(layers)):
        problem = f"{_listed(left_out)} of {max(layers) + 1} layers are in no group"
        remedy = "Number the layers that keep something from 0 on, and put each into a group."
        raise model.error("groups" if model.has("groups") else "layers", problem, remedy)
    return {f"layers.{index}": layers[index] for index in sorted(layers)}


def _groups(model: ModelFields) -> list[ModelFields]:
    for word in ("layers", *_HEADS):
        if model.has(word):
            raise model.error(word, "says the shape of an only group, but there are groups", "Say it in each group.")
    written = model.content["groups"]
    if not isinstance(written, (list, tuple)) or not written or not all(isinstance(raw, Mapping) for raw in written):
        remedy = "Write a list such as [{kind: full, layers: 30, kv_heads: 3, head_dim: 64}]."
        raise model.error("groups", f"{shown(written)} is not a list of groups", remedy)
    groups = [ModelFields(raw, model.path_of(f"groups[{index}]")) for index, raw in enumerate(written)]
    return [replace(group, add=_needs(group)) for group in groups]


def _kind_of(group: ModelFields) -> str:
    kind = group.text("kind")
    if kind is not None and kind not in _KIND_WORDS:
        raise group.error("kind", f"unknown kind {kind!r}", suggestion(kind, _KIND_WORDS))
    return "full" if kind is None else kind


def _spec(model: ModelFields, group: ModelFields, wishes: Wishes, block_tokens: int) -> Spec:
    kind = _kind_of(group)
    for word in group.content:
        if word not in _GROUP_WORDS and word not in _KIND_WORDS[kind]:
            raise _unknown_word(group, word, kind)
    if kind == "mamba":
        return _state(group, wishes, block_tokens)
    dtype = _dtype(model, group, wishes)
    if kind == "mla":
        if group.maybe_count("kv_heads") not in (None, 1):
            raise group.error("kv_heads", "is more than 1, but mla keeps one latent per token", "Leave it out.")
        return Mla(block_tokens=block_tokens, latent_dim=group.count("head_dim"), dtype=dtype)
    shape: dict[str, Any] = {
        "block_tokens": block_tokens,
        "dtype": dtype,
        "kv_heads": on_rank(group.count("kv_heads"), wishes.tensor_parallel),
        "head_dim": group.count("head_dim"),
        "value_dim": group.maybe_count("value_dim"),
    }
    if kind == "sliding_window":
        return SlidingWindow(**shape, window=group.count("window"))
    if kind == "chunked_local":
        return ChunkedLocal(**shape, chunk_tokens=group.count("chunk_tokens"))
    if kind == "cross":
        tokens = wishes.encoder_tokens_max or group.count("encoder_tokens_max")
        return CrossAttention(**shape, encoder_tokens_max=tokens)
    return FullAttention(**shape)


def _state(group: ModelFields, wishes: Wishes, block_tokens: int) -> Mamba:
    shapes, dtypes = group.content.get("shapes"), group.texts("dtypes")
    if not isinstance(shapes, (list, tuple)) or not shapes or dtypes is None or len(dtypes) != len(shapes):
        problem = f"{shapes!r} and dtypes {dtypes!r} are not as many shapes as dtypes"
        raise group.error("shapes", problem, "Write shapes such as [[3, 8448], [128, 64, 256]], and a dtype for each.")
    return Mamba(
        block_tokens=block_tokens,
        shapes=tuple(_shape(group, i, shape) for i, shape in enumerate(shapes)),
        dtypes=tuple(known_dtype(dtype, group.path_of("dtypes")) for dtype in dtypes),
        mode=wishes.state_mode,
        speculative_blocks=wishes.draft_tokens,
    )


def _shape(group: ModelFields, index: int, shape: object) -> tuple[int, ...]:
    name = f"shapes[{index}]"
    sizes = ModelFields({name: shape}, group.place).indexes(name)
    if not sizes or 0 in sizes:
        raise group.error(name, f"{shape!r} is no shape", "Write the sizes of a tensor, each from 1 on.")
    return tuple(sizes)


def _dtype(model: ModelFields, group: ModelFields, wishes: Wishes) -> str:
    if wishes.dtype is not None:
        return wishes.dtype
    for fields in (group, model):
        if written := fields.text("dtype"):
            return known_dtype(written, fields.path_of("dtype"))
    raise group.error("dtype", "is missing", "Add `dtype: bfloat16` or the like, here or to the model.")


def _indexes(group: ModelFields, taken: Mapping[int, Spec]) -> list[int]:
    """The layers of a group; `taken` are those of the groups before."""
    if isinstance(group.content.get("layers"), (list, tuple)):
        indexes = group.indexes("layers") or []
    else:
        first = max(taken, default=-1) + 1
        indexes = list(range(first, first + group.count("layers", most=LAYERS_MAX)))
    twice = [index for index, times in Counter([*taken, *indexes]).items() if times > 1]
    if not indexes or twice:
        problem = f"layer {twice[0]} is listed twice" if twice else "is an empty list"
        raise group.error("layers", problem, "Put each layer into one group.")
    return indexes


def _needs(group: ModelFields) -> str:
    kind = _kind_of(group)
    words = ", ".join(word for word in ("layers", *_KIND_WORDS[kind]) if word not in _OPTIONAL[kind])
    without = "" if group.has("kind") else f", which is meant without `kind` (kinds: {', '.join(_KIND_WORDS)})"
    return f"A group of kind {kind}{without} needs {words}."


def _unknown_word(group: ModelFields, word: object, kind: str) -> ConfigError:
    kinds = [other for other, words in _KIND_WORDS.items() if word in words]
    if not kinds:
        return group.error(str(word), "unknown word", suggestion(str(word), (*_GROUP_WORDS, *_KIND_WORDS[kind])))
    problem = f"is no word of kind {kind}, but of {' and '.join(kinds)}"
    return group.error(str(word), problem, f"Write `kind: {kinds[0]}`, or leave the word out. {group.add}")


def _listed(indexes: list[int]) -> str:
    return ", ".join(map(str, indexes[:5])) + (", ..." if len(indexes) > 5 else "")


def _known_words(fields: ModelFields, known: Iterable[str]) -> None:
    for word in fields.content:
        if word not in known:
            raise fields.error(word, "unknown word", suggestion(str(word), known))
