"""A Hugging Face `config.json` as layers: what each layer keeps.

Owns no state. A multimodal file's language model is meant; layers are called ``layers.0``, and a layer that keeps
two things adds ``layers.0.state`` or ``layers.0.cross``. Always: a feature that changes what is kept and that is not
handled here is refused by name. Shapes are those of one rank: heads are divided by tensor_parallel, or copied where
there are fewer of them than ranks; a latent is copied to every rank. Units: tokens, elements.
"""

from dataclasses import dataclass

from kvtier.blocks.spec import DTYPES
from kvtier.cache.models.layer_kinds import layer_kinds
from kvtier.cache.models.no_cache import refuse_without_cache
from kvtier.cache.models.recurrent import state_dtype_field, state_shapes
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Mamba, Mla, SlidingWindow, Spec
from kvtier.config.model_files import LAYERS_MAX, ModelFields, shown
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

_QUERY_HEADS = ("num_attention_heads", "n_head")
_LANGUAGE_MODELS = ("text_config", "language_config", "llm_config")
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")

# Files of multimodal models leave out what their classes take for granted.
_DEFAULTS = {
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
}

# field -> what it means that is not handled here
_REFUSED = {
    "compress_ratios": "keeps compressed tokens",
    "index_topk": "keeps an index for sparse attention beside its latents",
    "num_kv_shared_layers": "has layers that read another layer's cache",
    "cross_attention_layers": "attends to images from layers of its own",
    "block_configs": "gives each layer a shape of its own",
    "per_layer_config": "gives each layer a shape of its own",
    "global_head_dim": "has heads of two sizes",
    "num_global_key_value_heads": "has two numbers of heads",
    "block_types": "keeps recurrent states of a kind that is not known",
    "attn_type_list": "keeps recurrent states of a kind that is not known",
    "linear_attn_config": "keeps recurrent states of a kind that is not known",
    "ssm_cfg": "keeps recurrent states of a kind that is not known",
    "rescale_every": "keeps recurrent states of a kind that is not known",
}
_DTYPE_WORDS = {"half": "float16", "float": "float32", "float8_e4m3fn": "float8_e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the file does not say: how the cache is to be kept. None: as the file has it."""

    block_tokens: int
    dtype: str | None
    state_dtype: str | None
    state_mode: str
    draft_tokens: int
    tensor_parallel: int
    encoder_tokens_max: int | None


def hf_layers(file: ModelFields, wishes: Wishes) -> dict[str, Spec]:
    """The spec of every layer, by name. Raises ConfigError for what is missing, wrong or not handled."""
    model = _language_model(file)
    refuse_without_cache(file, model)
    for field, meaning in _REFUSED.items():
        if model.content.get(field):
            raise model.error(field, f"a model that {meaning} is not handled", "Describe it by its groups instead.")
    if wishes.dtype is None:
        _refuse_quantized(file, model)
    dtype = _dtype(file, model, wishes.dtype)
    if model.flag("is_encoder_decoder"):
        return _encoder_decoder(model, wishes, dtype)
    kinds = layer_kinds(model)
    specs: dict[str, Spec] = {}
    if {"state", "both"} & set(kinds):
        specs["state"] = _state(file, model, wishes)
    for kind in {"full" if kind == "both" else kind for kind in kinds} - {"state", "none"}:
        specs[kind] = _attention(model, wishes, dtype, kind)
    layers: dict[str, Spec] = {}
    for index, kind in enumerate(kinds):
        if kind == "both":
            layers |= {f"layers.{index}": specs["full"], f"layers.{index}.state": specs["state"]}
        elif kind != "none":
            layers[f"layers.{index}"] = specs[kind]
    return layers


def _language_model(file: ModelFields) -> ModelFields:
    for name in _LANGUAGE_MODELS:
        if nested := file.nested(name):
            return nested.with_defaults(_DEFAULTS.get(nested.text("model_type") or "", {}))
    return file


def _refuse_quantized(file: ModelFields, model: ModelFields) -> None:
    """Weights that come with scales for a smaller KV: engines then keep it smaller than the model's dtype."""
    for fields in (file, model):
        for section in ("quantization_config", "compression_config"):
            if quantization := fields.nested(section):
                inner = quantization.nested("quantization") or quantization
                for found, word in ((quantization, "kv_cache_scheme"), (inner, "kv_cache_quant_algo")):
                    if found.has(word):
                        problem = f"{shown(found.content[word])}: engines keep its KV in another dtype than the model's"
                        raise found.error(word, problem, "Give dtype to say in which, such as dtype='float8_e4m3'.")


def _attention(model: ModelFields, wishes: Wishes, dtype: str, kind: str) -> Spec:
    if model.has("kv_lora_rank") and kind == "full":
        return _latent(model, wishes, dtype)
    heads, dim = _kv_heads(model, wishes.tensor_parallel), _head_dim(model)
    if model.has("v_head_dim") and model.count("v_head_dim") != dim:
        problem = "values that are not as wide as keys are not handled"
        raise model.error("v_head_dim", problem, "Describe the model by its groups, with value_dim.")
    tokens = wishes.block_tokens
    if kind == "window":
        window = model.count("sliding_window")
        return SlidingWindow(block_tokens=tokens, kv_heads=heads, head_dim=dim, dtype=dtype, window=window)
    if kind == "chunk":
        chunk_tokens = model.count("attention_chunk_size")
        return ChunkedLocal(block_tokens=tokens, kv_heads=heads, head_dim=dim, dtype=dtype, chunk_tokens=chunk_tokens)
    return FullAttention(block_tokens=tokens, kv_heads=heads, head_dim=dim, dtype=dtype)


def _latent(model: ModelFields, wishes: Wishes, dtype: str) -> Mla:
    model_type = model.text("model_type")
    if model_type not in _LATENT_TYPES:
        problem = f"whether {model_type!r} keeps latents or whole heads is not known"
        raise model.error(
            "kv_lora_rank", problem, f"Known: {', '.join(_LATENT_TYPES)}. Else describe it by its groups."
        )
    latent_dim = model.count("kv_lora_rank") + model.count("qk_rope_head_dim")
    return Mla(block_tokens=wishes.block_tokens, latent_dim=latent_dim, dtype=dtype)


def _state(file: ModelFields, model: ModelFields, wishes: Wishes) -> Mamba:
    """The dtype of the convolution is the model's: a smaller one for KV does not reach the states."""
    shapes = state_shapes(model, wishes.tensor_parallel, wishes.draft_tokens)
    field, usual = state_dtype_field(model.text("model_type"))
    given = file.has("dtype") or file.has("torch_dtype") or model.has("dtype") or model.has("torch_dtype")
    conv_dtype = _dtype(file, model, None if given else wishes.dtype)
    written = model.text(field)
    state_dtype = wishes.state_dtype or (known_dtype(written, model.path_of(field)) if written else usual) or conv_dtype
    return Mamba(
        block_tokens=wishes.block_tokens,
        shapes=shapes,
        dtypes=(conv_dtype, state_dtype),
        mode=wishes.state_mode,
        speculative_blocks=wishes.draft_tokens,
    )


def _encoder_decoder(model: ModelFields, wishes: Wishes, dtype: str) -> dict[str, Spec]:
    """Every decoder layer keeps its own tokens, and the encoder's output for the whole request."""
    total = model.count("decoder_layers", "num_decoder_layers", "num_layers", most=LAYERS_MAX)
    heads = on_rank(model.count("decoder_attention_heads", "num_heads"), wishes.tensor_parallel)
    dim = model.maybe_count("d_kv") or _head_dim(model)
    encoder_tokens = wishes.encoder_tokens_max or model.maybe_count("max_source_positions", "max_position_embeddings")
    if encoder_tokens is None:
        problem = "the file does not say how long the encoder's input may be"
        raise ConfigError("encoder_tokens_max", problem, "Give it, in tokens.")
    tokens = wishes.block_tokens
    own = FullAttention(block_tokens=tokens, kv_heads=heads, head_dim=dim, dtype=dtype)
    cross = CrossAttention(
        block_tokens=tokens, kv_heads=heads, head_dim=dim, dtype=dtype, encoder_tokens_max=encoder_tokens
    )
    layers: dict[str, Spec] = {}
    for index in range(total):
        layers |= {f"layers.{index}": own, f"layers.{index}.cross": cross}
    return layers


def _kv_heads(model: ModelFields, ranks: int) -> int:
    if model.flag("multi_query") and not model.flag("new_decoder_architecture"):
        return 1  # Falcon
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    heads, queries = model.count(*names, *_QUERY_HEADS), model.maybe_count(*_QUERY_HEADS)
    if queries is not None and queries % heads:
        named = next(name for name in (*names, *_QUERY_HEADS) if model.has(name))
        problem = f"{heads} heads of keys cannot be shared evenly by {queries} attention heads"
        raise model.error(named, problem, "Write a divisor of the number of attention heads.")
    return on_rank(heads, ranks)


def _head_dim(model: ModelFields) -> int:
    dim = model.maybe_count("attention_head_dim", "head_dim")
    if dim is not None:
        return dim
    hidden = model.count("hidden_size", "n_embd", "d_model")
    heads = model.count("num_attention_heads", "n_head", "decoder_attention_heads")
    if hidden % heads:
        raise model.error("head_dim", f"is missing, and {hidden} is no multiple of {heads} heads", "Add head_dim.")
    return hidden // heads


def _dtype(file: ModelFields, model: ModelFields, wished: str | None) -> str:
    if wished is not None:
        return known_dtype(wished, "dtype")
    for fields in (file, model):
        for name in ("dtype", "torch_dtype"):
            if written := fields.text(name):
                return known_dtype(written, fields.path_of(name))
    raise file.error("dtype", "is missing", "Add it to the file, or give dtype, such as bfloat16.")


def known_dtype(written: object, place: str) -> str:
    """One of our dtypes, from our word or torch's. Raises ConfigError for any other."""
    if not isinstance(written, str):
        raise ConfigError(place, f"{shown(written)} is no text", "Write the name of a dtype, such as 'bfloat16'.")
    word = written.removeprefix("torch.")
    word = _DTYPE_WORDS.get(word, word)
    if word not in DTYPES:
        raise ConfigError(place, f"unknown dtype {written!r}", suggestion(word, DTYPES))
    return word


def on_rank(heads: int, ranks: int) -> int:
    """The KV heads of one rank: a part, or one copy where there are fewer heads than ranks."""
    if heads % ranks and ranks % heads:
        problem = f"{heads} KV heads can be neither divided among nor copied to {ranks} ranks evenly"
        raise ConfigError("tensor_parallel", problem, "Choose a divisor or a multiple of the number of heads.")
    return max(1, heads // ranks)
