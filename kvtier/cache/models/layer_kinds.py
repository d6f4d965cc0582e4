"""Which layer of a model attends how, as the fields of its `config.json` say in one of many ways.

Owns no state. `layer_kinds` gives one word per layer, in order. Always: as many words as the model has layers; a
word of the file that is not known here is an error, never taken for full attention.

    full     attends to all before it          chunk    to its own chunk            both  attention and a state
    window   to a sliding window               state    keeps a recurrent state     none  keeps nothing (mlp, experts)
"""

from kvtier.cache.models.recurrent import known_state
from kvtier.config.model_files import LAYERS_MAX, ModelFields
from kvtier.registry import suggestion

_LAYER_WORDS = {
    "attention": "full",
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none"}  # of hybrid_override_pattern
_STATES_ONLY = ("mamba", "mamba2", "falcon_mamba")

# Every n-th layer is full where the file does not say: what the classes of these model types assume.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4}


def layer_kinds(model: ModelFields) -> list[str]:
    """Raises ConfigError for words, lists and fields that do not fit together."""
    kinds = _listed(model) or _recurrent(model) or _attending(model)
    for kind, field in (("window", "sliding_window"), ("chunk", "attention_chunk_size")):
        if kind in kinds and model.maybe_count(field) is None:
            problem = "is missing, and there are layers that attend so"
            raise model.error(field, problem, "Write the number of tokens a layer attends to.")
    return kinds


def layers_total(model: ModelFields) -> int:
    return model.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=LAYERS_MAX)


def _listed(model: ModelFields) -> list[str] | None:
    """The kinds that the file lists layer by layer."""
    for field in ("layer_types", "layers_block_type"):
        words = model.texts(field)
        if words:
            break
    else:
        return None
    unknown = [word for word in words if word not in _LAYER_WORDS]
    if unknown:
        remedy = f"{suggestion(unknown[0], _LAYER_WORDS)} Else describe the model by its groups."
        raise model.error(field, f"unknown kind of layer {unknown[0]!r}", remedy)
    if model.maybe_count("num_hidden_layers") not in (None, len(words)):
        problem = f"lists {len(words)} layers, but num_hidden_layers is {model.count('num_hidden_layers')}"
        raise model.error(field, problem, "List each layer once.")
    kinds = [_LAYER_WORDS[word] for word in words]
    no_chunks = model.maybe_count("attention_chunk_size") is None and model.text("model_type") == "llama4_text"
    return ["full" if kind == "chunk" and no_chunks else kind for kind in kinds]


def _recurrent(model: ModelFields) -> list[str] | None:
    """The kinds of a model whose type has recurrent layers, or None."""
    model_type = model.text("model_type")
    if not known_state(model_type):
        return None
    if pattern := model.text("hybrid_override_pattern"):
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            problem = f"unknown kind of layer {unknown[0]!r}"
            raise model.error("hybrid_override_pattern", problem, f"Known: {' '.join(_LETTERS)}.")
        return [_LETTERS[letter] for letter in pattern]
    layers = range(layers_total(model))
    if model_type in _STATES_ONLY:
        return ["state" for _ in layers]
    if model_type == "falcon_h1":
        return ["both" for _ in layers]
    if model.has("attn_layer_period"):
        period, offset = model.count("attn_layer_period"), model.index("attn_layer_offset")
        if offset >= period:
            problem = f"{offset} is not less than attn_layer_period, {period}: no layer would attend"
            raise model.error("attn_layer_offset", problem, "Write which of so many layers attends, from 0 on.")
        return ["full" if layer % period == offset else "state" for layer in layers]
    if model.has("full_attention_interval"):
        interval = model.count("full_attention_interval")
        return ["state" if (layer + 1) % interval else "full" for layer in layers]
    if (full := model.indexes("attn_layer_indices")) is not None:
        if beyond := [layer for layer in full if layer not in layers]:
            problem = f"there is no layer {beyond[0]}, but {len(layers)} from 0 on"
            raise model.error("attn_layer_indices", problem, "List layers that the model has.")
        return ["full" if layer in full else "state" for layer in layers]
    remedy = "Add layer_types, one word for each layer: full_attention or linear_attention."
    raise model.error("layer_types", "is missing: which layers attend and which keep a state is not said", remedy)


def _attending(model: ModelFields) -> list[str]:
    layers = range(layers_total(model))
    model_type = model.text("model_type")
    if model.maybe_count("attention_chunk_size"):
        return _chunked(model)
    if model.maybe_count("sliding_window") is None or not model.flag("use_sliding_window", True):
        return ["full" for _ in layers]
    if model.has("max_window_layers"):
        first = model.index("max_window_layers")
        return ["window" if layer >= first else "full" for layer in layers]
    interval = model.maybe_count("sliding_window_pattern") or _WINDOW_PATTERNS.get(str(model_type))
    if interval is None:
        return ["window" for _ in layers]
    return ["window" if (layer + 1) % interval else "full" for layer in layers]


def _chunked(model: ModelFields) -> list[str]:
    """Llama 4: a layer without rotary positions attends to everything."""
    total = layers_total(model)
    interval = model.maybe_count("no_rope_layer_interval") or 4
    has_positions = model.indexes("no_rope_layers") or [(layer + 1) % interval for layer in range(total)]
    if len(has_positions) != total:
        raise model.error("no_rope_layers", f"lists {len(has_positions)} of {total} layers", "List each layer once.")
    return ["chunk" if positions else "full" for positions in has_positions]
