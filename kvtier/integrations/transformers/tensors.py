"""Blocks and rows as tensors: one pass in either direction, wherever they lie.

Owns no state. Shapes: blocks are [slots, block_tokens, heads, dim], in any memory order; a row is
[tokens, heads, dim] on our side and [heads, tokens, dim] on that of transformers.
"""

from collections.abc import Sequence

import torch


def copy_blocks(blocks: torch.Tensor, slots: Sequence[int], row: torch.Tensor) -> None:
    """Copy the first `row.shape[0]` tokens of the blocks in `slots`, in that order, into a row beside them."""
    block_tokens = blocks.shape[1]
    whole, rest = divmod(row.shape[0], block_tokens)
    # Whole blocks lie in a token major row as they lie in their slots: one pass, as fast as memcpy.
    target = row[: whole * block_tokens].view(whole, block_tokens, *row.shape[1:])
    index = torch.tensor(slots[:whole], dtype=torch.long, device=row.device)
    torch.index_select(blocks, 0, index, out=target)
    if rest:
        row[whole * block_tokens :] = blocks[slots[whole], :rest]


def in_blocks(row: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """A [heads, tokens, dim] row as [blocks, block_tokens, heads, dim], in no other place."""
    heads, tokens, dim = row.shape
    return row.reshape(heads, tokens // block_tokens, block_tokens, dim).permute(1, 2, 0, 3)
