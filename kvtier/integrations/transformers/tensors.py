"""Copies between the cache's slots and the tensors of a transformers cache.

Owns no state; every call copies, so that nothing keeps looking at a slot that someone else may fill.
Shapes: a view of the slots is [slots, block_tokens, heads, dim], in any memory order; a row of K or V is
[tokens, heads, dim] on our side and [heads, tokens, dim] on that of transformers. numpy has no bfloat16: its bits
travel as uint16.
"""

from collections.abc import Sequence
from typing import Any

import torch


def gather(view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
    """Copy the first `row.shape[0]` tokens of the blocks in `slots`, in that order, into a [tokens, heads, dim] row."""
    blocks = torch.from_numpy(view).view(row.dtype)
    block_tokens = blocks.shape[1]
    whole, rest = divmod(row.shape[0], block_tokens)
    # Whole blocks lie in a token major row as they lie in their slots: one pass, as fast as memcpy.
    target = row[: whole * block_tokens].view(whole, block_tokens, *row.shape[1:])
    torch.index_select(blocks, 0, torch.tensor(slots[:whole], dtype=torch.long), out=target)
    if rest:
        row[whole * block_tokens :] = blocks[slots[whole], :rest]


def scatter(view: Any, slots: Sequence[int], row: torch.Tensor) -> None:
    """Copy a [heads, tokens, dim] row into whole `slots`, in that order."""
    heads, tokens, dim = row.shape
    block_tokens = view.shape[1]
    blocks = row.detach().reshape(heads, tokens // block_tokens, block_tokens, dim).permute(1, 2, 0, 3)
    if blocks.dtype == torch.bfloat16:
        blocks = blocks.contiguous().view(torch.uint16)
    view[list(slots)] = blocks.numpy()
