"""A random Llama small enough for unit tests, with a tokenizer, and a cache of three tiers for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvtier import SyncCache, open_sync
from kvtier.config import Config, load_config
from kvtier.integrations.transformers.identity import model_spec

torch.set_num_threads(1)  # more would only wait for each other at this size

VOCABULARY = 512
BLOCK_TOKENS = 4

CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)


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


def tiny_tokenizer() -> Any:
    """Bytes, the word "ab", and a chat template; every id of the tiny Llama has a text of its own."""
    special = ["<none>", "<pad>", "<end>", "<start>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<start>"],
        chat_template=CHAT_TEMPLATE,
    )


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as a tokenizer pads it on the left with token 1: ids and mask, [rows, columns]."""
    columns = max(map(len, rows))
    ids = [[1] * (columns - len(row)) + list(row) for row in rows]
    mask = [[0] * (columns - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


@contextmanager
def open_cache(model: Any, folder: Path, **options: Any) -> Iterator[SyncCache]:
    """A cache of `config_of`, of which nothing may be left leased in the end."""
    with open_sync(config_of(model, folder, **options)) as opened:
        yield opened
        assert opened.stats()["leases"] == 0
        assert opened.check() == []


def config_of(model: Any, folder: Path, gpu_blocks: int = 60, **changes: Any) -> Config:
    """Three tiers; `changes` go into the model section."""
    section = model_spec(model, weights_epoch="1", block_tokens=BLOCK_TOKENS) | changes
    gpu_bytes = (gpu_blocks + 1) * 4096  # and the null slot
    tiers = [
        {"type": "gpu", "capacity": gpu_bytes},
        {"type": "host", "capacity": max(gpu_bytes, 1 << 20), "hugepages": "off"},
        {"type": "lmdb", "capacity": "16MiB", "path": str(folder / "store"), "durability": "none"},
    ]
    # This model computes so fast that how much of it is loaded would depend on the disk of the day.
    return load_config({"model": section, "tiers": tiers, "limits": {"governor": False}})
