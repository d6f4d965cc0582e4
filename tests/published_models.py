"""`config.json` of published models, cut down to the fields that say what a layer keeps.

As they are published, with their old spellings: where a file leaves out heads, head_dim or the pattern of its windows,
so does the mapping here.
"""

LLAMA3_8B = {
    "model_type": "llama", "torch_dtype": "bfloat16", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "torch_dtype": "bfloat16", "num_hidden_layers": 36, "hidden_size": 4096, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 36,
}  # fmt: skip
# As published: the language model's part leaves out heads, head_dim and the 5:1 pattern.
GEMMA3_4B = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "torch_dtype": "float32", "hidden_size": 3584, "num_hidden_layers": 42, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "torch_dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [],
    },
}  # fmt: skip
BAMBA_9B = {
    "model_type": "bamba", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
GRANITE4_SMALL = {
    "model_type": "granitemoehybrid", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64,
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
}  # fmt: skip
JAMBA_MINI = {
    "model_type": "jamba", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "torch_dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
ZAMBA2_2B = {
    "model_type": "zamba2", "torch_dtype": "bfloat16", "hidden_size": 2560, "num_hidden_layers": 54,
    "num_attention_heads": 32, "num_key_value_heads": 32, "attention_head_dim": 160, "attention_hidden_size": 5120,
    "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 80,
    "mamba_headdim": 64,
    "layers_block_type": ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)],
}  # fmt: skip
FALCON_H1_7B = {
    "model_type": "falcon_h1", "torch_dtype": "bfloat16", "hidden_size": 3072, "num_hidden_layers": 44,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
    "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
}  # fmt: skip
MAMBA_130M = {
    "model_type": "mamba", "torch_dtype": "float32", "hidden_size": 768, "intermediate_size": 1536, "state_size": 16,
    "conv_kernel": 4, "expand": 2, "num_hidden_layers": 24,
}  # fmt: skip
MAMBA2_2B = {
    "model_type": "mamba2", "torch_dtype": "float16", "hidden_size": 2560, "state_size": 128, "num_heads": 80,
    "head_dim": 64, "n_groups": 1, "expand": 2, "conv_kernel": 4, "num_hidden_layers": 64,
}  # fmt: skip
WHISPER_LARGE = {
    "model_type": "whisper", "torch_dtype": "float16", "is_encoder_decoder": True, "d_model": 1280,
    "decoder_layers": 32, "decoder_attention_heads": 20, "encoder_layers": 32, "encoder_attention_heads": 20,
    "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip
