"""A random Llama small enough for unit tests, and a cache of three tiers for it."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.config import Config, load_config
from kvtier.integrations.transformers.identity import model_spec

torch.set_num_threads(1)  # more would only wait for each other at this size

VOCABULARY = 512
BLOCK_TOKENS = 4


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """3 layers, 2 KV heads of 16. The pad token (1) is not the end token (2)."""
    torch.manual_seed(11)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,  # a wide one, so that different KV gives different tokens
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).to(dtype).eval()


def prompt_of(tokens: int, seed: int = 0) -> torch.Tensor:
    """[1, tokens] random ids without special tokens."""
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def config_of(model: Any, folder: Path, gpu_blocks: int = 60, **changes: Any) -> Config:
    """Three tiers; `changes` go into the model section."""
    section = model_spec(model, weights_epoch="1", block_tokens=BLOCK_TOKENS) | changes
    gpu_bytes = (gpu_blocks + 1) * 4096  # and the null slot
    tiers = [
        {"type": "gpu", "capacity": gpu_bytes},
        {"type": "host", "capacity": max(gpu_bytes, 1 << 20), "hugepages": "off"},
        {"type": "lmdb", "capacity": "16MiB", "path": str(folder / "store"), "durability": "none"},
    ]
    return load_config({"model": section, "tiers": tiers})
