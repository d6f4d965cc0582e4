"""Prompts as kvtier can name them: the bare tokens of each row of a padded batch, made by the model alone.

Owns no state. Always: what is in no block's key, such as padding in the middle or an unnamed adapter, is refused,
because two prompts with equal keys must have equal KV. Units: tokens, and columns of the padded batch; row r's tokens
lie in the columns from `pads[r]` to the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of one `generate()` call, without their padding."""

    rows: tuple[list[int], ...]
    columns: int
    mask: torch.Tensor | None  # [rows, columns] of 0 and 1, or None if no row is padded

    @property
    def pads(self) -> list[int]:
        """Columns of padding before each row."""
        return [self.columns - len(row) for row in self.rows]

    @property
    def tokens_shared(self) -> int:
        """How many tokens all rows have in common from the first on, the last token of the shortest left out."""
        count = min(map(len, self.rows)) - 1
        first = self.rows[0]
        while any(row[:count] != first[:count] for row in self.rows):
            count -= 1
        return count

    def continued(self, output_ids: torch.Tensor, filler: int | None, ends: frozenset[int]) -> list[list[int]]:
        """The rows with what `generate()` added to each, [rows, columns + added].

        What follows a row's end is cut: `generate()` fills rows that ended early up with `filler`.
        Raises UsageError if the output is not of these prompts.
        """
        if output_ids.ndim != 2 or output_ids.shape[0] != len(self.rows):
            shape = list(output_ids.shape)
            raise UsageError(f"the output has the shape {shape}; pass what generate() returned, {len(self.rows)} rows")
        continued = []
        for row, pad, output in zip(self.rows, self.pads, output_ids.tolist(), strict=True):
            if output[pad : self.columns] != row:
                raise UsageError(
                    "the output does not begin with the session's prompt; pass all that generate() returned"
                )
            continued.append(row + _unfilled(output[self.columns :], filler, ends, len(self.rows) == 1))
        return continued


def prompts_of(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Prompts:
    """The rows of a [rows, columns] tensor. Raises UsageError for an empty one, and for padding not on the left."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        raise UsageError(f"input_ids is {input_ids!r}; pass an integer tensor [prompts, tokens]")
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise UsageError(f"attention_mask is {attention_mask!r}; pass the tokenizer's tensor [prompts, tokens]")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise UsageError(
            f"token ids have the shape {list(input_ids.shape)}; pass [prompts, tokens], one or more of each"
        )
    if bool((input_ids < 0).any()):
        raise UsageError(f"token id {int(input_ids.min())} is negative; pass what the tokenizer gave")
    mask = _mask_of(model, input_ids, attention_mask)
    if not bool(mask[:, -1].all()):
        raise UsageError(
            "a prompt is padded on the right, where generate() goes on; pad on the left: "
            "tokenizer(..., padding=True, padding_side='left')"
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise UsageError(
            "the attention mask hides tokens inside a prompt, which are part of its keys; pad on the left only"
        )
    rows = tuple(ids[kept].tolist() for ids, kept in zip(input_ids, mask, strict=True))
    return Prompts(rows, input_ids.shape[1], None if bool(mask.all()) else mask.to(torch.long))


def filler_of(model: Any, options: Mapping[str, Any] | None = None) -> tuple[int | None, frozenset[int]]:
    """The token that `generate()` fills ended rows with, and the tokens that end a row; `options` are its own."""
    given = dict(options or {})
    config = given.get("generation_config") or model.generation_config
    eos = given.get("eos_token_id", config.eos_token_id)
    pad = given.get("pad_token_id", config.pad_token_id)
    ends = [int(end) for end in torch.as_tensor([] if eos is None else eos).flatten()]
    return (ends[0] if ends else None) if pad is None else pad, frozenset(ends)


def refuse_adapters(model: Any, extra: ExtraKeys | None) -> None:
    """Raises UsageError if an adapter changes the model's KV and the keys would not say so."""
    adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if adapted and (extra is None or extra.lora is None):
        raise UsageError("the model has an adapter, which changes its KV; name it: extra=ExtraKeys(lora=(name, path))")


def _mask_of(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Which of the ids are tokens, as `generate()` will see it: bool [rows, columns]."""
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            shapes = f"{list(attention_mask.shape)} for token ids of {list(input_ids.shape)}"
            raise UsageError(f"the attention mask has the shape {shapes}; pass one flag for each token id")
        return attention_mask.bool()
    # Without a mask, generate() infers padding when the pad token is none of the end tokens.
    filler, ends = filler_of(model)
    if filler is None or filler in ends:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return input_ids != filler


def _unfilled(added: list[int], filler: int | None, ends: frozenset[int], alone: bool) -> list[int]:
    """A row without what it was filled up with. One filler belongs to it, if that is the end token it ended with."""
    if alone:
        return added  # nobody waits for other rows, so nothing is filled
    count = len(added)
    while count and added[count - 1] == filler:
        count -= 1
    ended_before = count > 0 and added[count - 1] in ends
    return added[: count + 1] if filler in ends and not ended_before else added[:count]
