"""Which tokens a session's cache was fed, column by column: the proof that its KV is of the tokens its keys name.

Owns: the ids that the model was given behind the prompt. Always: a prompt column is only fed the session's own token;
anything else raises UsageError before the model runs, for it would give a wrong answer now and store one for later.
On a CPU it also sees how long the prompt took. (A GPU's kernels run on after the call that started them.)
Units: columns of the padded batch, seconds.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from kvtier.errors import UsageError
from kvtier.integrations.transformers.past import SessionCache
from kvtier.integrations.transformers.prompt import Prompts

TIMED_MIN = 64  # columns: with fewer, what every call costs hides what a token does


class FedTokens:
    """What one cache is fed, from `watch` to the call of what it returned."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._added: list[list[int]] = [[] for _ in prompts.rows]  # behind the prompt, per row
        self._seen = False

    def watch(
        self, model: Any, past_of: Callable[[], SessionCache], computed: Callable[[int, int, float], None]
    ) -> Callable[[], None]:
        """Look at every forward with this cache. Returns what ends it.

        computed: told (start, columns, seconds per row) of each call that computes a good part of the prompt.
        """
        timed: list[tuple[int, int, float]] = []

        def before(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            past = past_of()
            timed.clear()
            if given.get("cache") is past or given.get("past_key_values") is past:
                ids, start = given.get("input_ids", args[0] if args else None), past.get_seq_length()
                self._feed(ids, start)
                if ids is not None and ids.shape[1] >= TIMED_MIN and ids.device.type == "cpu":
                    timed.append((start, ids.shape[1], time.perf_counter()))

        def after(*_: Any) -> None:
            for start, columns, began_s in timed:
                computed(start, columns, (time.perf_counter() - began_s) / len(self._prompts.rows))
            timed.clear()

        handles = (model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after))

        def unwatch() -> None:
            for handle in handles:
                handle.remove()

        return unwatch

    def check_output(self, output_ids: torch.Tensor, columns_held: int) -> None:
        """Raises UsageError unless the cache holds what this output says."""
        columns = output_ids.shape[1]
        behind = output_ids[:, self._prompts.columns :].tolist()
        if not self._seen:  # a compiled model hides its calls; all but the last token has been fed, or all
            fits = columns_held in (columns - 1, columns)
        else:
            pairs = zip(behind, self._added, strict=True)
            fits = all(row[: len(added)] == added[: len(row)] for row, added in pairs)
        if not fits:
            raise UsageError(
                "this output is not what the session's cache was fed; a session is for one generate() call, and its "
                "output must be passed on unchanged"
            )

    def _feed(self, ids: torch.Tensor | None, start: int) -> None:
        """The model is about to be given these ids for the columns from `start` on."""
        self._seen = True
        if ids is None:
            raise UsageError("the model is given embeddings, which are in no key; give it input_ids, or no session")
        prompts = self._prompts
        split = start < prompts.columns < start + ids.shape[1] and start > 0
        if ids.shape[0] != len(prompts.rows) or split:
            return  # the cache refuses that with a better reason
        for row, pad, added, given in zip(prompts.rows, prompts.pads, self._added, ids.tolist(), strict=True):
            in_prompt = max(0, min(len(given), prompts.columns - start))
            known = max(0, pad - start)  # columns of padding may hold anything
            if given[known:in_prompt] != row[start + known - pad : start + in_prompt - pad]:
                raise UsageError("the model is given other tokens than the session was made for; make one for these")
            behind = given[in_prompt:]
            if len(behind) > 1 and behind == row[-len(behind) :]:
                raise UsageError("the prompt is fed a second time; a session is for one generate() call: make another")
            del added[max(0, start - prompts.columns) :]
            added.extend(behind)
