"""Copies between the cache's slots and the tensors of a transformers cache.

Owns no state; every call copies, so that nothing keeps looking at a slot that someone else may fill.
Shapes: a view of the slots is [slots, block_tokens, heads, dim], in any memory order; a layer's K or V is
[1, heads, tokens, dim]. numpy has no bfloat16: its bits travel as uint16.
"""

from collections.abc import Sequence
from typing import Any

import torch


def gather(view: Any, slots: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The blocks in `slots`, in that order, as one [1, heads, tokens, dim] tensor in fresh memory."""
    # Picking whole blocks first and turning them afterwards costs two passes over one layer, which fit the CPU's
    # cache; a single pass in slot order touches all layers' target pages at once and was slower.
    blocks = torch.from_numpy(view[list(slots)])
    count, block_tokens, heads, dim = blocks.shape
    tensor = torch.empty((1, heads, count * block_tokens, dim), dtype=blocks.dtype)
    tensor.view(heads, count, block_tokens, dim).copy_(blocks.permute(2, 0, 1, 3))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def scatter(view: Any, slots: Sequence[int], tensor: torch.Tensor) -> None:
    """Copy a [1, heads, tokens, dim] tensor into whole `slots`, in that order."""
    _, heads, tokens, dim = tensor.shape
    block_tokens = view.shape[1]
    blocks = tensor[0].reshape(heads, tokens // block_tokens, block_tokens, dim).permute(1, 2, 0, 3)
    if blocks.dtype == torch.bfloat16:
        blocks = blocks.contiguous().view(torch.uint16)
    view[list(slots)] = blocks.numpy()
