"""Which KV a transformers model makes: its shape, and whether a cache is configured for exactly that.

Owns no state. Always: a model whose KV depends on more than the tokens before it is refused here, with the
reason, because restoring such KV would change what the model says. Units: layers, heads, elements, tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import UsageError
from kvtier.types import ModelSpec

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of one token: `layers` times a K and a V of [kv_heads, head_dim] elements of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def check_fits(self, spec: ModelSpec) -> None:
        """Raises UsageError naming the first field in which a cache's `config.model` differs from this."""
        if len(spec.groups) != 1 or spec.groups[0].kind != "full":
            kinds = ", ".join(group.kind for group in spec.groups)
            raise UsageError(f"config.model has the groups {kinds}; transformers models need one group of kind full")
        group = spec.groups[0]
        configured = {
            "layers": len(group.layers),
            "kv_heads": group.kv_heads,
            "head_dim": group.head_dim,
            "dtype": group.dtype,
        }
        for field, value in configured.items():
            own = getattr(self, field)
            if value != own:
                raise UsageError(
                    f"config.model.{field} is {value}, but the model's is {own}; write `{field}: {own}`, "
                    "or open a cache of its own for this model"
                )


def shape_of(model: Any) -> KvShape:
    """The KV shape of a transformers model. Raises UsageError for models that kvtier cannot serve."""
    config = model.config
    _refuse_other_inputs(model, config)
    _refuse_other_attention(config)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UsageError(f"the model's dtype is {dtype}; load it with dtype= one of {', '.join(DTYPES)}")
    heads = config.num_attention_heads
    return KvShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
    )


def model_spec(
    model: Any,
    *,
    name: str | None = None,
    weights: Path | None = None,
    weights_epoch: str = "auto",
    block_tokens: int = 16,
) -> dict[str, Any]:
    """The `model:` section of a kvtier YAML for this model.

    weights: where its files lie, by default the folder it was loaded from. With `weights_epoch="auto"` kvtier
    digests them; a model that was changed after loading, or that has no files, needs a text of its own.
    Raises UsageError for models that kvtier cannot serve.
    """
    shape = shape_of(model)
    loaded_from = Path(model.config.name_or_path)
    if weights is None and model.config.name_or_path and loaded_from.exists():
        weights = loaded_from
    section: dict[str, Any] = {
        "name": name or loaded_from.name or model.config.model_type,
        "weights_epoch": weights_epoch,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "block_tokens": block_tokens,
    }
    return section if weights is None else section | {"weights": str(weights)}


def _refuse_other_inputs(model: Any, config: Any) -> None:
    if config.is_encoder_decoder:
        raise UsageError("an encoder-decoder model's KV depends on the encoder's input; kvtier serves decoders only")
    if config.get_text_config(decoder=True) is not config:
        raise UsageError(
            f"{config.model_type} takes more than text, and equal tokens can stand for different images; "
            "kvtier serves text models through transformers"
        )
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise UsageError("the model is spread over several devices; load it on one, without device_map")


def _refuse_other_attention(config: Any) -> None:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    # The stock cache knows best which layers are plain attention; subclasses hold something else or less.
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer}
    if kinds or getattr(config, "v_head_dim", None):
        types = sorted(set(getattr(config, "layer_types", None) or ())) or sorted(kind.__name__ for kind in kinds)
        raise UsageError(
            f"{config.model_type} has layers other than full attention ({', '.join(types) or 'MLA'}); "
            "kvtier serves only full attention through transformers"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = str(rope.get("rope_type", "default"))
    if "dynamic" in rope_type or rope_type == "longrope":
        raise UsageError(
            f"rope_type {rope_type!r} makes the KV of a prefix depend on the length of the whole prompt, "
            "so it cannot be reused; kvtier serves models with a fixed rope"
        )
