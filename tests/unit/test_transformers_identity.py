"""Which models the transformers helper serves, and how it tells that a cache is for another one."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import KvShape, PrefixSession, model_spec, shape_of  # noqa: E402
from kvtier.types import GroupSpec, ModelSpec  # noqa: E402
from tests.tiny_llama import config_of, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_model_section_loads_and_fits(tmp_path: Path) -> None:
    """The mapping that users are told to put into their YAML would not be accepted, or not fit their model."""
    model = tiny_llama(torch.bfloat16)
    config = config_of(model, tmp_path)
    shape = shape_of(model)
    assert shape == KvShape(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16")
    shape.check_fits(config.model)


def test_weights_are_the_folder_the_model_came_from(tmp_path: Path) -> None:
    """`weights_epoch: auto` would have no files to watch, and changed weights would find old KV."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    section = model_spec(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama"))
    assert section["weights"] == str(tmp_path / "llama")
    assert section["name"] == "llama"
    assert section["weights_epoch"] == "auto"
    assert kvtier.load_config({"model": section, "tiers": [{"type": "gpu", "capacity": "1MiB"}]})
    assert "weights" not in model_spec(tiny_llama())


def test_heads_and_dimension_have_the_fallbacks_of_transformers() -> None:
    """Models without grouped heads, or without a head_dim of their own, would be refused or misread."""
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64))
    assert shape_of(gpt2) == KvShape(layers=2, kv_heads=4, head_dim=16, dtype="float32")


@pytest.mark.parametrize(
    ("field", "changes", "remedy"),
    [
        ("layers", {"layers": 4}, "layers: 3"),
        ("kv_heads", {"kv_heads": 4}, "kv_heads: 2"),
        ("head_dim", {"head_dim": 32}, "head_dim: 16"),
        ("dtype", {"dtype": "bfloat16"}, "dtype: float32"),
    ],
)
def test_a_cache_for_another_shape_is_refused_by_field(
    tmp_path: Path, field: str, changes: dict[str, Any], remedy: str
) -> None:
    """KV of one shape would be read as another's, or the user would not learn which line to change."""
    model = tiny_llama()
    with (
        kvtier.open_sync(config_of(model, tmp_path, **changes)) as cache,
        pytest.raises(UsageError, match=rf"config\.model\.{field} is .*{remedy}"),
    ):
        PrefixSession(cache, model, prompt_of(8))


def test_a_cache_of_several_groups_is_refused() -> None:
    """A hybrid's or an MLA model's cache would be taken for one of plain attention."""
    group = GroupSpec("mla", (0, 1, 2), 1, 16, "float32", 16)
    with pytest.raises(UsageError, match=r"groups mla; .* one group of kind full"):
        shape_of(tiny_llama()).check_fits(ModelSpec("m", "1", (group,)))


def model_of(config: Any) -> Any:
    """As much of a model as identity looks at; no weights are made."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_sliding_window_layers_are_refused() -> None:
    """A window's KV would be kept as if it were the whole prefix's."""
    config = transformers.MistralConfig(**SMALL, sliding_window=16)
    with pytest.raises(UsageError, match="mistral has layers other than full attention"):
        shape_of(model_of(config))


def test_linear_attention_is_refused() -> None:
    """A recurrent state would be looked for in K and V."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UsageError, match="full attention"):
        shape_of(model_of(config))


def test_latent_attention_is_refused() -> None:
    """K and V of different dimensions would be copied as if they were alike."""
    config = transformers.DeepseekV3Config(**SMALL, num_experts_per_tok=1, n_routed_experts=8)
    with pytest.raises(UsageError, match="full attention"):
        shape_of(model_of(config))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_rope_that_looks_at_the_whole_prompt_is_refused(rope: dict[str, Any]) -> None:
    """A prefix kept from a short prompt would be wrong in a long one."""
    with pytest.raises(UsageError, match=rf"rope_type '{rope['rope_type']}'"):
        shape_of(tiny_llama(rope_parameters=rope))


def test_an_encoder_decoder_is_refused() -> None:
    """KV that depends on another input would be kept under the decoder's tokens."""
    config = transformers.T5Config(vocab_size=64, d_model=32, num_layers=1, num_heads=2)
    with pytest.raises(UsageError, match="encoder-decoder"):
        shape_of(transformers.T5ForConditionalGeneration(config))


def test_a_model_that_sees_images_is_refused() -> None:
    """Two pictures under the same placeholder token would share KV."""
    config = transformers.Qwen2VLConfig()
    model = type("Model", (), {"config": config, "dtype": torch.float32})()
    with pytest.raises(UsageError, match="more than text"):
        shape_of(model)


def test_a_spread_model_is_refused() -> None:
    """Restored layers would lie on the wrong device, and generate() would fail."""
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(UsageError, match="several devices"):
        shape_of(model)


def test_other_dtypes_are_refused() -> None:
    """KV would be stored in a width that kvtier has no name for."""
    with pytest.raises(UsageError, match="dtype is float64"):
        shape_of(tiny_llama(torch.float64))
