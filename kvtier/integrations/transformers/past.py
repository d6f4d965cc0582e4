"""The cache that a session hands to transformers: a stock `DynamicCache` that knows whose KV it holds.

Owns the KV of one `generate()` call. Always: row r is the session's row r, and the prompts' KV begins at column 0.
What would break that, and make transformers say something wrong without an error, raises UsageError instead.
Shapes: a layer's K and V are [rows, heads, columns, dim].
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvtier.errors import UsageError


class SessionCache(DynamicCache):
    """A DynamicCache for `rows` prompts of `columns` columns, padding included."""

    def __init__(self, config: Any, rows: int, columns: int, expect: Callable[[], None]) -> None:
        """expect: called before the model uses what the cache holds; it may refuse that."""
        super().__init__(config=config)
        self._expect = expect
        self._rows = rows
        self._columns = columns

    def fill(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take over a layer's first K and V. They must not be written any more."""
        layer = self.layers[index]
        if type(layer) is DynamicLayer and not layer.is_initialized:
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v  # `update` would copy them
        else:
            super().update(k, v, index)

    def columns_whole(self) -> int:
        """How many columns every layer has both K and V of, even while another thread runs the model."""
        return min((min(map(_columns_of, pair)) for *pair, _ in self), default=0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, as stock does. Raises UsageError for other rows than the session's, or a prefix fed twice."""
        if layer_idx == 0:
            self._expect()
        rows, new = key_states.shape[0], key_states.shape[2]
        if rows != self._rows:
            raise UsageError(
                f"the session is for {self._rows} prompts, and the model runs {rows}; run num_beams without a session, "
                "and instead of num_return_sequences give both the prompt n times: input_ids.repeat(n, 1)"
            )
        there = self.get_seq_length(layer_idx)
        if there < self._columns < there + new:
            raise UsageError(
                f"the model was given {new} tokens, but only {self._columns - there} of the prompt are left; "
                "feed input_ids[:, session.past.get_seq_length():]"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beams change rows."""
        raise UsageError("beam search changes which row is which; run it without a session")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """So do candidates."""
        raise UsageError("repeating rows changes which row is which; run it without a session")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """And selections."""
        raise UsageError("selecting rows changes which row is which; run it without a session")

    def activate_past_recording(self) -> None:
        """Assisted generation feeds the whole prompt again: with a restored prefix it would answer something else."""
        raise UsageError(
            "assisted generation (prompt lookup, an assistant model) does not start from a given cache in this "
            "version of transformers; run it without a session"
        )


def _columns_of(tensor: torch.Tensor | None) -> int:
    # A layer that was never filled has none, or one without axes.
    return tensor.shape[2] if tensor is not None and tensor.ndim == 4 else 0
