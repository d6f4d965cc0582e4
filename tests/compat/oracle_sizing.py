"""Asks vLLM 0.32 how it divides memory, and writes its answers to `tests/data/vllm/sizing.json`.

    python -m tests.compat.oracle_sizing          (in an environment that has vllm; nothing here imports kvtier)

Each case is the `config.json` of a model, how it is to be kept, and sizes of memory. Layers get the specs that vLLM's
own models give them: shapes of heads from its reading of the config, shapes of states from its model classes. Then
its own functions align states, form groups, check that a request fits, and count blocks. What those functions read of
an engine's configuration is given by stand-ins, so that no model is built.
"""

import json
import pathlib
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
import vllm
from vllm.model_executor.models import falcon_h1, granitemoehybrid, jamba, mamba, mamba2, nemotron_h, qwen3_next, zamba2
from vllm.platforms.interface import Platform
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.published_models import (
    BAMBA_9B,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    FALCON_H1_7B,
    GEMMA2_9B,
    GEMMA3_4B,
    GEMMA3_27B,
    GPT_OSS_20B,
    GRANITE4_SMALL,
    JAMBA_MINI,
    LLAMA3_8B,
    LLAMA4_SCOUT,
    MAMBA2_2B,
    MAMBA_130M,
    MISTRAL_7B,
    NEMOTRON_H_8B,
    QWEN3_8B,
    QWEN3_NEXT_80B,
    WHISPER_LARGE,
    ZAMBA2_2B,
)

OUT = pathlib.Path(__file__).parents[1] / "data" / "vllm" / "sizing.json"
GIB = 1 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# name, config, how it is kept, tokens_max, memory sizes
CASES = [
    ("Llama-3-8B", LLAMA3_8B, {}, 8192, [16 * GIB, 2 * GIB, 1 << 30, 1]),
    ("Llama-3-8B blocks of 32 on 4 ranks", LLAMA3_8B, {"block_tokens": 32, "tensor_parallel": 4}, 8192, [5 * GIB]),
    ("Llama-3-8B on 16 ranks", LLAMA3_8B, {"tensor_parallel": 16}, 8192, [3 * GIB]),
    ("Qwen3-8B", QWEN3_8B, {}, 40960, [24 * GIB, 6 * GIB, 5 * GIB]),
    ("Gemma-3-4B", GEMMA3_4B, {}, 131072, [16 * GIB, 4 * GIB, 3 * GIB, 1 << 20]),
    ("Gemma-3-4B short steps", GEMMA3_4B, {"tokens_in_flight": 2048}, 32768, [16 * GIB, 10**9]),
    ("Gemma-3-27B", GEMMA3_27B, {"tensor_parallel": 2}, 131072, [40 * GIB]),
    ("Gemma-2-9B", GEMMA2_9B, {}, 8192, [32 * GIB, 7 * 10**9]),
    ("Mistral-7B", MISTRAL_7B, {}, 32768, [16 * GIB]),
    ("gpt-oss-20B", GPT_OSS_20B, {"tokens_in_flight": 16384}, 131072, [16 * GIB, 2 * GIB]),
    ("DeepSeek-V3", DEEPSEEK_V3, {"tensor_parallel": 8}, 163840, [40 * GIB, 10 * GIB]),
    ("DeepSeek-V2-Lite blocks of 64", DEEPSEEK_V2_LITE, {"block_tokens": 64}, 32768, [8 * GIB]),
    ("Llama-4-Scout", LLAMA4_SCOUT, {"tensor_parallel": 8}, 1 << 20, [48 * GIB, 8 * GIB]),
    ("Bamba-9B", BAMBA_9B, {}, 4096, [16 * GIB, 1 << 28]),
    ("Bamba-9B drafts", BAMBA_9B, {"draft_tokens": 3, "tensor_parallel": 2}, 4096, [16 * GIB]),
    ("Bamba-9B unaligned", BAMBA_9B, {"align_to_state": False}, 4096, [16 * GIB]),
    ("Granite-4-Small", GRANITE4_SMALL, {}, 131072, [16 * GIB]),
    ("Jamba-mini", JAMBA_MINI, {}, 262144, [16 * GIB]),
    ("Jamba-mini unaligned", JAMBA_MINI, {"align_to_state": False, "block_tokens": 32}, 65536, [16 * GIB]),
    ("Qwen3-Next-80B", QWEN3_NEXT_80B, {}, 262144, [24 * GIB, 4 * GIB]),
    ("Qwen3-Next-80B on 2 ranks", QWEN3_NEXT_80B, {"tensor_parallel": 2, "draft_tokens": 2}, 262144, [24 * GIB]),
    ("Nemotron-H-8B", NEMOTRON_H_8B, {}, 8192, [16 * GIB]),
    ("Zamba2-2.7B", ZAMBA2_2B, {}, 4096, [16 * GIB]),
    ("Falcon-H1-7B", FALCON_H1_7B, {"tensor_parallel": 2}, 65536, [16 * GIB]),
    ("Mamba-130M", MAMBA_130M, {}, 1 << 20, [1 << 28]),
    ("Mamba-2-2.7B", MAMBA2_2B, {}, 1 << 20, [2 * GIB]),
    ("Whisper-large", WHISPER_LARGE, {}, 448, [4 * GIB, 300_000_000]),
]


def hf_config(raw):
    raw = dict(raw)
    if raw["model_type"] == "nemotron_h":
        return transformers.NemotronHConfig(**{k: v for k, v in raw.items() if k != "num_hidden_layers"})
    return transformers.AutoConfig.for_model(**raw)


class Engine:
    """The parts of an engine's configuration that sizing reads."""

    def __init__(self, raw, how, tokens_max):
        self.hf, self.raw = hf_config(raw), raw
        self.text = self.hf.get_text_config(decoder=True) if "text_config" in raw else self.hf
        convert = MODEL_ARCH_CONFIG_CONVERTORS.get(self.text.model_type, ModelArchConfigConvertorBase)
        arch = convert(self.hf, self.text)
        ranks = how.get("tensor_parallel", 1)
        self.dtype = DTYPES[raw["torch_dtype"]]
        self.mla = arch.is_deepseek_mla()
        whisper = self.text.model_type == "whisper"
        self.heads = 1 if self.mla else max(1, (20 if whisper else arch.get_total_num_kv_heads()) // ranks)
        self.head_size = arch.get_head_size()
        self.num_speculative_tokens = how.get("draft_tokens", 0)
        self.max_in_flight_tokens = how.get("tokens_in_flight", 8192)
        self.num_prefill_lookahead_tokens = 0
        self.speculative_config = (
            SimpleNamespace(
                num_speculative_tokens=self.num_speculative_tokens,
                use_eagle=lambda: False,
                use_eagle_block_drop=lambda: False,
            )
            if self.num_speculative_tokens
            else None
        )
        self.kv_transfer_config = None
        self.model_config = SimpleNamespace(
            max_model_len=tokens_max,
            original_max_model_len=tokens_max,
            dtype=self.dtype,
            use_mla=self.mla,
            hf_config=self.hf,
            hf_text_config=self.text,
            architecture="stand-in",
            get_num_kv_heads=lambda parallel: self.heads,
            get_head_size=lambda: self.head_size,
        )
        self.parallel_config = SimpleNamespace(
            tensor_parallel_size=ranks, decode_context_parallel_size=1, prefill_context_parallel_size=1
        )
        self.scheduler_config = SimpleNamespace(
            disable_hybrid_kv_cache_manager=False,
            max_num_encoder_input_tokens=getattr(self.hf, "max_source_positions", 0),
        )
        self.attention_config = SimpleNamespace(hisparse_config=None)
        ssm = "auto" if self.text.model_type != "nemotron_h" else self.hf.mamba_ssm_cache_dtype
        self.cache_config = SimpleNamespace(
            block_size=how.get("block_tokens", 16),
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=ssm,
            mamba_cache_mode="align",
            mamba_block_size=how.get("block_tokens", 16),
            mamba_page_size_padded=None,
            use_replayssm=False,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        )
        if how.get("align_to_state", True) and self.state_class():
            self.align()

    def state_class(self):
        return {
            "bamba": granitemoehybrid.GraniteMoeHybridForCausalLM,  # vLLM 0.32 has no Bamba of its own any more
            "granitemoehybrid": granitemoehybrid.GraniteMoeHybridForCausalLM,
            "jamba": jamba.JambaForCausalLM,
            "qwen3_next": qwen3_next.Qwen3NextForCausalLM,
            "nemotron_h": nemotron_h.NemotronHForCausalLM,
            "zamba2": zamba2.Zamba2ForCausalLM,
            "falcon_h1": falcon_h1.FalconH1ForCausalLM,
            "mamba": mamba.MambaForCausalLM,
            "mamba2": mamba2.Mamba2ForCausalLM,
        }.get(self.text.model_type)

    def align(self):
        if self.text.model_type in ("mamba", "mamba2"):
            return
        backend = SimpleNamespace(
            customize_spec=lambda spec: spec, get_supported_kernel_block_sizes=lambda: [MultipleOf(16)]
        )
        registry = SimpleNamespace(resolve_model_cls=lambda *a, **k: (self.state_class(), None))
        with (
            mock.patch("vllm.model_executor.models.ModelRegistry", registry),
            mock.patch.object(Platform, "_find_non_ssm_backends", classmethod(lambda cls, config: [backend])),
            mock.patch("vllm.config.vllm.set_current_vllm_config"),
        ):
            Platform._align_hybrid_block_size(self, backend)

    def layers(self):
        cache, text = self.cache_config, self.text
        shape = {
            "block_size": cache.block_size, "num_kv_heads": self.heads, "head_size": self.head_size, "dtype": self.dtype
        }  # fmt: skip
        full = FullAttentionSpec(**shape)
        if self.mla:
            return [MLAAttentionSpec(**shape, cache_dtype_str="auto")] * text.num_hidden_layers
        if text.model_type == "whisper":
            return [full, CrossAttentionSpec(**shape)] * self.hf.decoder_layers
        if text.model_type == "llama4_text":
            chunk = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=text.attention_chunk_size)
            return [chunk if has_positions else full for has_positions in text.no_rope_layers]
        if self.state_class():
            return self.hybrid_layers(full)
        if getattr(text, "sliding_window", None) is None:
            return [full] * text.num_hidden_layers
        window = SlidingWindowSpec(**shape, sliding_window=text.sliding_window)
        if text.model_type == "mistral":
            return [window] * text.num_hidden_layers
        return [window if word == "sliding_attention" else full for word in text.layer_types]

    def hybrid_layers(self, full):
        cache, text = self.cache_config, self.text
        model = self.state_class()
        state = MambaSpec(
            shapes=tuple(model.get_mamba_state_shape_from_config(self)),
            dtypes=tuple(model.get_mamba_state_dtype_from_config(self)),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=self.num_speculative_tokens,
        )
        if text.model_type in ("mamba", "mamba2"):
            return [state] * text.num_hidden_layers
        if text.model_type == "falcon_h1":
            return [full, state] * text.num_hidden_layers
        words = getattr(text, "layers_block_type", None) or text.layer_types
        kept = {"attention": [full], "full_attention": [full], "hybrid": [full, state], "mlp": [], "moe": []}
        return [spec for word in words for spec in kept.get(word, [state])]


def spec_told(spec):
    told = {"kind": type(spec).__name__, "block_tokens": spec.block_size, "page_bytes": spec.page_size_bytes}
    if isinstance(spec, MambaSpec):
        told["shapes"] = [list(shape) for shape in spec.shapes]
        told["dtypes"] = [NAMES[dtype] for dtype in spec.dtypes]
    return told


def layers_told(layers):
    """The different specs, and for each layer which of them it has."""
    layers = list(layers)
    specs = [spec for index, spec in enumerate(layers) if spec not in layers[:index]]
    return {"specs": specs, "layers": [specs.index(spec) for spec in layers]}


def answer(engine, memory_bytes):
    """What vLLM makes of the memory: blocks and concurrency, or what it says when a request does not fit."""
    specs = {f"{index}": spec for index, spec in enumerate(engine.layers())}
    groups = kv_cache_utils.get_kv_cache_groups(engine, dict(specs))
    block_bytes = kv_cache_utils._pool_bytes_per_block(engine, groups)
    told = {"memory_bytes": memory_bytes, "block_bytes": block_bytes}
    try:
        (config,) = kv_cache_utils.get_kv_cache_configs(engine, [specs], [memory_bytes])
    except ValueError:
        room = memory_bytes - block_bytes
        told["needed_bytes"] = kv_cache_utils._max_memory_usage_bytes_from_groups(engine, groups)
        told["longest"] = kv_cache_utils._estimate_max_model_len_from_groups(engine, groups, room) if room > 0 else 0
        return told
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(engine, config)
    tokens_total, _ = kv_cache_utils.get_kv_cache_capacity(engine, config)
    return told | {"blocks_total": config.num_blocks, "concurrency": concurrency, "tokens_total": tokens_total}


def groups_told(engine):
    specs = {f"{index}": spec for index, spec in enumerate(engine.layers())}
    told = []
    for group in kv_cache_utils.get_kv_cache_groups(engine, dict(specs)):
        spec = group.kv_cache_spec
        first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        told.append({"layers": [int(name) for name in group.layer_names], **spec_told(first)})
    return told


def mixes():
    """Layers as no model has them: what unequal pages, unequal numbers and unequal kinds become."""
    half = torch.bfloat16

    def full(tokens, heads, dim=128, dtype=half):
        return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=dtype)

    def window(tokens, heads, length, dim=128):
        return SlidingWindowSpec(
            block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=half, sliding_window=length
        )

    def latent(tokens, dim=576):
        return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=dim, dtype=half, cache_dtype_str="auto")

    def state(elements, tokens=16, drafts=0):
        return MambaSpec(
            block_size=tokens, shapes=((elements,),), dtypes=(half,), mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )  # fmt: skip

    return {
        "full layers of two shapes": [full(16, 8), full(16, 4)] * 3,
        "full layers of two block sizes": [full(16, 8), full(32, 4), full(32, 8)] * 2,
        "full and latent": [full(16, 2), latent(16)] * 2,
        "latents beside windows that divide": [latent(16, 512)] * 4 + [window(16, 2, 256)] * 2,
        "latents beside windows that do not": [latent(16)] * 4 + [window(16, 4, 256)] * 2,
        "latents beside windows of other blocks": [latent(16)] * 4 + [window(32, 4, 256)] * 2,
        "windows of two lengths": [window(16, 8, 128), window(16, 8, 512), full(16, 8)] * 4,
        "12 and 13 layers": [window(16, 8, 128)] * 12 + [full(16, 8)] * 13,
        "14 and 20 layers": [window(16, 8, 128)] * 20 + [full(16, 8)] * 14,
        "2 and 3 layers": [window(16, 8, 128)] * 3 + [full(16, 8)] * 2,
        "4 and 9 layers": [window(16, 8, 128)] * 9 + [full(16, 8)] * 4,
        "a draft of smaller heads": [full(16, 8)] * 8 + [window(16, 2, 512)] * 1,
        "a draft that does not divide": [full(16, 8)] * 8 + [window(16, 3, 512)] * 2,
        "a state smaller than a page": [full(16, 8)] * 2 + [state(20_000)] * 6,
        "a state larger than a page": [full(16, 8)] * 2 + [state(200_000)] * 6,
        "a state of four pages": [full(16, 8)] * 2 + [state(131_072)] * 6,
        "states of two shapes and one size": [state(4096), state(4096)] * 2,
        "states with and without drafts": [state(4096), state(4096, drafts=2)] * 2 + [full(16, 8)],
        "chunks and windows": [
            ChunkedLocalAttentionSpec(
                block_size=16, num_kv_heads=8, head_size=128, dtype=half, attention_chunk_size=8192
            ),
            window(16, 8, 1024),
            full(16, 8, 256),
        ]
        * 3,
    }


def mix_told(name, specs):
    engine = Engine(LLAMA3_8B, {}, 4096)
    engine.layers = lambda: specs
    fields = {
        "FullAttentionSpec": ("num_kv_heads", "head_size"),
        "SlidingWindowSpec": ("num_kv_heads", "head_size", "sliding_window"),
        "ChunkedLocalAttentionSpec": ("num_kv_heads", "head_size", "attention_chunk_size"),
        "MLAAttentionSpec": ("head_size",),
        "MambaSpec": ("num_speculative_blocks",),
    }
    layers = [
        spec_told(spec) | {field: getattr(spec, field) for field in fields[type(spec).__name__]} for spec in specs
    ]
    told = {"name": name, "tokens_max": 4096, **layers_told(layers)}
    answers = [answer(engine, memory_bytes) for memory_bytes in (GIB, 123_456_789)]
    return told | {"groups": groups_told(engine), "answers": answers}


def main():
    register_all_kvcache_specs(None)
    models = []
    for name, raw, how, tokens_max, memory in CASES:
        engine = Engine(raw, how, tokens_max)
        models.append(
            {
                "name": name,
                "config": raw,
                "how": how,
                "tokens_max": tokens_max,
                **layers_told(map(spec_told, engine.layers())),
                "groups": groups_told(engine),
                "answers": [answer(engine, memory_bytes) for memory_bytes in memory],
            }
        )
    told = {
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "models": models,
        "mixes": [mix_told(name, specs) for name, specs in mixes().items()],
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lists = json.dumps(told, indent=None, separators=(",", ":"))
    OUT.write_text(lists.replace('{"name"', '\n{"name"') + "\n")


if __name__ == "__main__":
    main()
