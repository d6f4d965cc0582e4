"""One prompt as kvtier can name it: the bare tokens of one sequence, made by the model alone.

Owns no state. Always: what is not in a block's key, such as padding or an unnamed adapter, is refused, because two
prompts with equal keys must have equal KV.
"""

from typing import Any

import torch

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError


def tokens_of(input_ids: torch.Tensor) -> list[int]:
    """The token ids of a [1, tokens] tensor. Raises UsageError for a batch, or for nothing."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise UsageError(
            f"token ids have the shape {list(input_ids.shape)}; kvtier takes one prompt at a time, [1, tokens]"
        )
    tokens: list[int] = input_ids[0].tolist()
    return tokens


def refuse_padding(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raises UsageError if `generate()` would hide a part of the prompt from the rest."""
    if attention_mask is not None:
        padded = attention_mask.shape != input_ids.shape or not bool(attention_mask.bool().all())
    else:
        # Without a mask, generate() infers padding when the pad token is none of the end tokens.
        pad, ends = model.generation_config.pad_token_id, model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        padded = pad is not None and pad not in ends and bool((input_ids == pad).any())
    if padded:
        raise UsageError("the prompt is padded, and padding is part of no key; pass the bare tokens of one prompt")


def refuse_adapters(model: Any, extra: ExtraKeys | None) -> None:
    """Raises UsageError if an adapter changes the model's KV and the keys would not say so."""
    adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if adapted and (extra is None or extra.lora is None):
        raise UsageError("the model has an adapter, which changes its KV; name it: extra=ExtraKeys(lora=(name, path))")
