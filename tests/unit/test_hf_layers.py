"""What a `config.json` says that each layer keeps, and what is refused rather than guessed."""

import warnings

import pytest

from kvtier.cache.models.hf_layers import _DEFAULTS
from kvtier.cache.models.layer_kinds import _WINDOW_PATTERNS
from kvtier.cache.models.layers import layers_of
from kvtier.cache.models.no_cache import ENCODERS
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Mamba, Mla, SlidingWindow
from kvtier.errors import ConfigError
from tests import published_models as published

BASE = {"model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
HYBRID = {
    **BASE,
    "model_type": "bamba",
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}


def kinds(config, **how):
    return [spec.kind for spec in layers_of(config, **how).values()]


@pytest.fixture(scope="module")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("LlamaConfig", {"num_key_value_heads": 8}, {FullAttention: 32}),
        ("Qwen2Config", {}, {FullAttention: 32}),
        ("Qwen2Config", {"use_sliding_window": True}, {FullAttention: 28, SlidingWindow: 4}),
        ("Qwen3Config", {"num_hidden_layers": 36}, {FullAttention: 36}),
        ("MistralConfig", {}, {SlidingWindow: 32}),
        ("MixtralConfig", {"sliding_window": None}, {FullAttention: 32}),
        ("Gemma2Config", {}, {SlidingWindow: 13, FullAttention: 13}),
        ("Gemma3TextConfig", {}, {SlidingWindow: 22, FullAttention: 4}),
        ("Gemma3Config", {}, {SlidingWindow: 22, FullAttention: 4}),
        ("GptOssConfig", {}, {SlidingWindow: 18, FullAttention: 18}),
        ("Cohere2Config", {}, {SlidingWindow: 30, FullAttention: 10}),
        ("Olmo3Config", {}, {SlidingWindow: 24, FullAttention: 8}),
        ("DeepseekV2Config", {}, {Mla: 32}),
        ("DeepseekV3Config", {}, {Mla: 61}),
        ("Llama4Config", {}, {ChunkedLocal: 36, FullAttention: 12}),
        ("BambaConfig", {"attn_layer_indices": [9, 18, 27]}, {Mamba: 29, FullAttention: 3}),
        ("GraniteMoeHybridConfig", {}, {Mamba: 32}),
        ("JambaConfig", {}, {Mamba: 28, FullAttention: 4}),
        ("Qwen3NextConfig", {}, {Mamba: 36, FullAttention: 12}),
        ("Qwen3_5TextConfig", {}, {Mamba: 24, FullAttention: 8}),
        ("NemotronHConfig", {}, {Mamba: 1, FullAttention: 1}),
        ("Zamba2Config", {}, {Mamba: 54, FullAttention: 9}),
        ("FalconH1Config", {}, {Mamba: 32, FullAttention: 32}),
        ("MambaConfig", {}, {Mamba: 32}),
        ("Mamba2Config", {}, {Mamba: 64}),
        ("WhisperConfig", {}, {FullAttention: 4, CrossAttention: 4}),
        ("BartConfig", {}, {FullAttention: 12, CrossAttention: 12}),
    ],
)
def test_what_transformers_writes_is_read(transformers, name, changes, expected):
    """A config.json saved by transformers is refused, or its layers are taken for others."""
    config = getattr(transformers, name)(dtype="bfloat16", **changes)
    for written in (config.to_dict(), config.to_diff_dict()):
        found = [type(spec) for spec in layers_of(written).values()]
        assert {kind: found.count(kind) for kind in set(found)} == expected


def test_what_files_leave_out_is_what_transformers_takes_for_granted(transformers):
    """A published file without heads is read with heads that the model has not."""
    for model_type, assumed in _DEFAULTS.items():
        config = transformers.AutoConfig.for_model(model_type)
        assert {field: getattr(config, field) for field in assumed} == assumed
    for model_type, interval in _WINDOW_PATTERNS.items():
        words = transformers.AutoConfig.for_model(model_type, num_hidden_layers=13).layer_types
        assert words == ["sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(13)], (
            model_type
        )


def test_gemma_s_windows_come_five_to_one():
    """The layers that attend to all are others than the model's."""
    layers = layers_of(published.GEMMA3_4B)
    assert [i for i, spec in enumerate(layers.values()) if spec.kind == "full"] == [5, 11, 17, 23, 29]
    assert layers["layers.0"].window == 1024
    assert layers["layers.5"] == FullAttention(block_tokens=16, kv_heads=4, head_dim=256, dtype="bfloat16")


def test_llama4_s_layers_without_positions_attend_to_all():
    """Layers with and without rotary positions are mixed up."""
    text = published.LLAMA4_SCOUT["text_config"]
    listed = published.LLAMA4_SCOUT | {"text_config": text | {"no_rope_layers": [0, 1] * 24}}
    assert kinds(listed) == ["full", "chunked_local"] * 24
    assert kinds(published.LLAMA4_SCOUT)[:5] == ["chunked_local"] * 3 + ["full", "chunked_local"]
    whole = published.LLAMA4_SCOUT | {"text_config": text | {"attention_chunk_size": None}}
    assert set(kinds(whole)) == {"full"}


def test_latents_are_copied_to_every_rank():
    """A latent is divided among ranks, and each has a part that is of no use alone."""
    assert layers_of(published.DEEPSEEK_V3, tensor_parallel=16) == layers_of(published.DEEPSEEK_V3)


def test_states_follow_the_model_s_dtype_and_not_that_of_kv():
    """A smaller dtype for KV changes the recurrence, or a file's dtype for it is not heard."""

    def dtypes(config, **how):
        return next(spec for spec in layers_of(config, **how).values() if isinstance(spec, Mamba)).dtypes

    assert dtypes(published.BAMBA_9B, dtype="float8_e4m3") == ("bfloat16", "bfloat16")
    assert dtypes(published.BAMBA_9B, state_dtype="float32") == ("bfloat16", "float32")
    assert dtypes(published.NEMOTRON_H_8B) == ("bfloat16", "float32")
    assert dtypes(published.NEMOTRON_H_8B | {"mamba_ssm_cache_dtype": "float16"}) == ("bfloat16", "float16")
    qwen = published.QWEN3_NEXT_80B | {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}
    assert dtypes(qwen) == ("bfloat16", "float32")
    nameless = {key: value for key, value in published.BAMBA_9B.items() if key != "torch_dtype"}
    assert dtypes(nameless, dtype="float16") == ("float16", "float16")


def test_states_are_shared_by_ranks():
    """A rank keeps the state of all heads, or drafts have nowhere to be taken back from."""
    config = HYBRID | {"attn_layer_indices": [0]}
    state = layers_of(config, tensor_parallel=4, draft_tokens=2)["layers.1"]
    # 2 groups are copied until each of 4 ranks has one: 8 x 16 channels of values and 2 x 4 x 32 of groups
    assert state.shapes == ((5, (128 + 256) // 4), (2, 16, 32))
    assert state.speculative_blocks == 2


def test_windows_begin_at_a_layer():
    """Qwen's first layers, which attend to all, are kept as windows, or its windows whole."""
    config = BASE | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert kinds(config) == ["full"] + ["sliding_window"] * 3
    assert kinds(config | {"use_sliding_window": False}) == ["full"] * 4


def test_falcon_has_one_head_of_keys():
    """A model with one KV head for all is sized with as many as it has queries."""
    assert layers_of(BASE | {"multi_query": True})["layers.0"].kv_heads == 1
    new = BASE | {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}
    assert layers_of(new)["layers.0"].kv_heads == 2


def test_a_file_whose_kv_is_quantized_is_sized_with_the_dtype_that_is_given():
    """A model whose engine keeps KV in 8 bits is sized for 16, or cannot be sized at all."""
    config = BASE | {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}
    with pytest.raises(ConfigError, match="Give dtype to say in which, such as dtype='float8_e4m3'"):
        layers_of(config)
    assert layers_of(config, dtype="float8_e4m3")["layers.0"].dtype == "float8_e4m3"
    for unquantized in (None, {}, {"quant_method": "fp8"}, {"kv_cache_scheme": None}):
        assert layers_of(BASE | {"quantization_config": unquantized}) == layers_of(BASE)


ENCODER_CONFIGS = """
    BertConfig RobertaConfig ModernBertConfig LayoutLMv3Config ViTConfig Dinov2Config BeitConfig CLIPConfig
    CLIPTextConfig CLIPVisionConfig SiglipConfig Siglip2VisionConfig Wav2Vec2Config
"""


@pytest.mark.parametrize("name", ENCODER_CONFIGS.split())
def test_encoders_have_no_cache_to_size(transformers, name):
    """A model that keeps nothing is given gigabytes."""
    written = getattr(transformers, name)(dtype="bfloat16").to_dict()
    with pytest.raises(
        ConfigError, match=r"encoder, which keeps no KV\. Pass the config.json of a model that writes text"
    ):
        layers_of(written)


def test_only_encoders_are_refused_as_such(transformers):
    """A model that writes text is refused because its name resembles an encoder's."""
    names = transformers.models.auto.modeling_auto
    writing = {*names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    for model_type in ENCODERS & writing:
        assert transformers.AutoConfig.for_model(model_type).is_decoder is False, model_type
        assert layers_of(transformers.AutoConfig.for_model(model_type, is_decoder=True).to_dict(), dtype="bfloat16")
    for name in ("AyaVisionConfig", "Cohere2VisionConfig", "Qwen2AudioConfig", "LlavaConfig", "Qwen2VLConfig"):
        assert layers_of(getattr(transformers, name)().to_dict(), dtype="bfloat16"), name


def test_t5_needs_the_length_of_its_input():
    """A model whose file does not limit the encoder's input is sized for some length."""
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ConfigError, match="encoder_tokens_max"):
        layers_of(t5, dtype="float32")
    layers = layers_of(t5, dtype="float32", encoder_tokens_max=512)
    assert list(layers) == ["layers.0", "layers.0.cross", "layers.1", "layers.1.cross"]
    assert layers["layers.0.cross"].encoder_tokens_max == 512


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (BASE | {"num_hidden_layers": None}, "num_hidden_layers"),
        (BASE | {"num_hidden_layers": -4}, "num_hidden_layers"),
        (BASE | {"num_attention_heads": None}, "num_key_value_heads"),
        (BASE | {"hidden_size": 66}, "head_dim"),
        (BASE | {"dtype": None}, "dtype"),
        (BASE | {"dtype": "int8"}, "dtype"),
        (BASE | {"text_config": 7}, "text_config"),
        (BASE | {"text_config": {"model_type": "llama"}}, "text_config.num_hidden_layers"),
        (BASE | {"layer_types": ["full_attention"]}, "layer_types"),
        (BASE | {"layer_types": "full_attention"}, "layer_types"),
        (BASE | {"layer_types": [1, 2, 3, 4]}, "layer_types"),
        (BASE | {"layer_types": ["full_attention"] * 3 + ["retention"]}, "layer_types"),
        (BASE | {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        (BASE | {"layer_types": ["linear_attention"] * 4}, "model_type"),
        (BASE | {"sliding_window": 64, "use_sliding_window": 1}, "use_sliding_window"),
        (BASE | {"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        (BASE | {"attention_chunk_size": 64, "no_rope_layers": [1, 0]}, "no_rope_layers"),
        (BASE | {"kv_lora_rank": 64, "qk_rope_head_dim": 8}, "kv_lora_rank"),
        (BASE | {"model_type": "deepseek_v3", "kv_lora_rank": 64}, "qk_rope_head_dim"),
        (BASE | {"model_type": "deepseek_v32", "kv_lora_rank": 64, "index_topk": 2048}, "index_topk"),
        (BASE | {"v_head_dim": 8}, "v_head_dim"),
        (BASE | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (BASE | {"num_key_value_heads": 8}, "num_key_value_heads"),
        (BASE | {"num_attention_heads": 32, "num_kv_heads": 5}, "num_kv_heads"),
        (BASE | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantization_config.kv_cache_scheme"),
        (BASE | {"compression_config": {"kv_cache_scheme": {"num_bits": 8}}}, "compression_config.kv_cache_scheme"),
        (BASE | {"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "quantization_config.kv_cache_quant_algo"),
        (
            BASE | {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
            "quantization_config.quantization.kv_cache_quant_algo",
        ),
        (
            {"text_config": BASE | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}},
            "text_config.quantization_config.kv_cache_scheme",
        ),
        (BASE | {"quantization_config": 8}, "quantization_config"),
        (BASE | {"model_type": "bert"}, "model_type"),
        (BASE | {"model_type": "siglip_vision_model"}, "model_type"),
        (BASE | {"model_type": "new_vision"}, "model_type"),
        ({"model_type": "clip", "text_config": BASE}, "model_type"),
        ({"text_config": BASE | {"model_type": "clip_text_model"}}, "text_config.model_type"),
        (BASE | {"model_type": "new", "architectures": ["NewForMaskedLM"]}, "architectures"),
        (
            BASE | {"model_type": "detr", "is_encoder_decoder": True, "architectures": ["XForObjectDetection"]},
            "architectures",
        ),
        (BASE | {"model_type": "new", "patch_size": 16}, "patch_size"),
        (BASE | {"is_decoder": "yes"}, "is_decoder"),
        (BASE | {"architectures": "LlamaForCausalLM"}, "architectures"),
        (BASE | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (BASE | {"block_types": ["recurrent", "attention"]}, "block_types"),
        (HYBRID, "layer_types"),
        (HYBRID | {"hybrid_override_pattern": "M-?"}, "hybrid_override_pattern"),
        (HYBRID | {"attn_layer_indices": [0], "mamba_d_conv": None}, "mamba_d_conv"),
        (HYBRID | {"attn_layer_period": 2}, "attn_layer_offset"),
        (HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 2}, "attn_layer_offset"),
        (HYBRID | {"attn_layer_indices": [0, 4]}, "attn_layer_indices"),
    ],
)
def test_what_is_not_known_is_refused(config, place):
    """A model is sized as something that it is not."""
    with pytest.raises(ConfigError) as caught:
        layers_of(config)
    assert caught.value.path == place
    assert caught.value.remedy


@pytest.mark.parametrize(("ranks", "heads"), [(3, "heads"), (5, "heads"), (16, "heads")])
def test_ranks_that_cannot_share_a_state_are_refused(ranks, heads):
    """A head of a recurrence is cut in two."""
    with pytest.raises(ConfigError, match="tensor_parallel"):
        layers_of(HYBRID | {"layer_types": ["mamba"] * 4}, tensor_parallel=ranks)
