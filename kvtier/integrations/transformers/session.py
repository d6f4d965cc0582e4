"""One `generate()` call that starts from the longest prefix kvtier has, and gives back what it computed.

Owns: the cache handed to transformers. Always: what the model says is what it would have said without kvtier. KV is
copied out of the slots before the model runs and into slots after it, and nothing is held in between; the last token
of a prompt is always computed; and whatever fails in the cache only costs the time to recompute (`problem` then says
what it was). Wrong calls, such as right padding, raise UsageError before anything runs. Units: tokens.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

import kvtier
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.errors import UsageError
from kvtier.integrations.transformers.fed import FedTokens
from kvtier.integrations.transformers.holds import Holds
from kvtier.integrations.transformers.identity import shape_of
from kvtier.integrations.transformers.keep import keep
from kvtier.integrations.transformers.past import SessionCache
from kvtier.integrations.transformers.prompt import filler_of, prompts_of, refuse_adapters
from kvtier.integrations.transformers.restore import restore
from kvtier.integrations.transformers.slots import slots_of

LOGGER = logging.getLogger("kvtier.transformers")


class PrefixSession:
    """Restores on enter, commits on exit.

        with PrefixSession(cache, model, input_ids) as session:
            output = model.generate(input_ids, **session.generate_kwargs)
            session.commit(output)

    cache: an open blocking cache whose `config.model` fits the model. input_ids: int tensor [prompts, tokens], padded
    on the left. attention_mask: what the tokenizer gave with it; without one, padding is inferred as `generate` does.
    max_new_tokens: keep at most so many generated tokens of each row; None: all of them.
    share_prefix: if the prompts of a batch begin alike and that is not known yet, compute it once, on enter, instead
    of once per row. extra: adapter or salt, of all rows.

    Afterwards: `tokens_restored` and `tokens_committed`, over all rows; `tokens_by_tier`, where the restored blocks
    lay; `problem`, None or why the cache was not used as it could have been.
    Good for one `generate` call, or a loop of your own; any thread may commit, also while the model runs.
    On a CUDA device session and model run on one torch stream.
    Raises UsageError, before anything is taken, for padding elsewhere, or a model that the cache does not fit or whose
    device is another one than that of the slots.
    """

    def __init__(
        self,
        cache: "kvtier.SyncCache",
        model: Any,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        share_prefix: bool = False,
        owner: str = "transformers",
        extra: ExtraKeys | None = None,
    ) -> None:
        if inspect.iscoroutinefunction(cache.reserve):
            raise UsageError("generate() cannot await an asyncio cache; pass one of kvtier.open_sync")
        self._spec = cache.config.model
        shape_of(model).check_fits(self._spec)
        refuse_adapters(model, extra)
        self._slots = slots_of(cache, model)
        self._prompts = prompts_of(model, input_ids, attention_mask)
        self._cache = cache
        self._model = model
        self._extra = extra
        self._owner = owner
        self._share_prefix = share_prefix
        self._new_tokens_max = max_new_tokens
        self._open = False
        self._fed = FedTokens(self._prompts)
        self._unwatch: Callable[[], None] = lambda: None
        self._committing = threading.Lock()
        self._blocks_kept = [0] * len(self._prompts.rows)
        self.past = self._empty_past()
        self.tokens_restored = 0
        self.tokens_committed = 0
        self.tokens_by_tier: dict[str, int] = {}
        self.problem: str | None = None

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """What `model.generate()` needs beside the token ids and its usual arguments: cache and mask."""
        mask = {} if self._prompts.mask is None else {"attention_mask": self._prompts.mask}
        # Without use_cache, transformers appends the whole prompt to a given cache again and again.
        return {"cache": self.past, "use_cache": True} | mask

    def __enter__(self) -> "PrefixSession":
        self._open = True
        self._slots.enter()
        with self._costing_time_only("restore"):
            if self._share_prefix and len(self._prompts.rows) > 1:
                self._compute_shared()
            self._restore()
        self._unwatch = self._fed.watch(self._model, lambda: self.past, self._computed)
        return self

    def commit(self, output_ids: torch.Tensor | None = None) -> int:
        """Keep the full blocks computed so far; returns how many tokens were added.

        output_ids: what `generate` returned, [prompts, tokens], padding included: the generated blocks are kept too,
        of each row up to its end. Without it the prompts' blocks are kept, as on exit; that may be done at any time.
        Raises UsageError after exit, or if the output is not what this session's cache was fed.
        """
        with self._committing:
            if not self._open:
                raise UsageError("the session is over; commit inside its with block")
            rows = list(self._prompts.rows) if output_ids is None else self._continued(output_ids)
            if output_ids is not None:
                self._fed.check_output(output_ids, self.past.columns_whole())
            before = self.tokens_committed
            with self._costing_time_only("commit"):
                self._commit(rows)
            return self.tokens_committed - before

    def rows_of(self, output_ids: torch.Tensor, generate_options: Mapping[str, Any] | None = None) -> list[list[int]]:
        """The tokens of each row of what `generate` returned, without padding and what follows a row's end.

        generate_options: those that `generate` was given, of which eos_token_id, pad_token_id and generation_config
        matter.
        Raises UsageError if the output does not begin with the prompts.
        """
        return self._prompts.continued(output_ids, *filler_of(self._model, generate_options))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep the prompts' blocks, unless an error raises doubts about them.

        An interrupt (Ctrl-C, a closed generator, a cancelled task) says nothing about the model: what every layer
        has finished is kept.
        """
        try:
            if kind is None or not issubclass(kind, Exception):
                self.commit()
        finally:
            self._open = False
            self._unwatch()

    def _computed(self, start: int, tokens: int, seconds: float) -> None:
        """From this the cache knows which loads are worth it."""
        with self._costing_time_only("report"):
            self._cache.prefilled(tokens, seconds, start=start)

    # ------------------------------------------------------------ restore

    def _restore(self) -> None:
        past = self._empty_past()
        keys = [self._keys_of(row) for row in self._prompts.rows]
        with self._slots.working(), Holds(self._cache, self._owner, self._slots) as holds:
            restored = restore(self._cache, holds, self._prompts, keys, past, self._model)
            self.problem = holds.shortage or self.problem
        self.past = past  # only now: half a prefix must never be seen
        self._blocks_kept = restored.blocks
        self.tokens_restored = sum(max(restored.columns - pad, 0) for pad in self._prompts.pads)
        self.tokens_by_tier = restored.tiers

    @torch.no_grad()
    def _compute_shared(self) -> None:
        """Have the blocks with which all rows begin computed by one row, if they are not known."""
        size = self._spec.block_tokens
        tokens = self._prompts.tokens_shared // size * size
        row = self._prompts.rows[0]
        if tokens == 0 or self._cache.peek(self._keys_of(row[:tokens])).tokens == tokens:
            return
        ids = torch.tensor([row[: tokens + 1]], device=self._model.device)  # the last token of a prompt is not restored
        mask = torch.ones_like(ids)
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}
        with PrefixSession(
            self._cache, self._model, ids, attention_mask=mask, owner=self._owner, extra=self._extra
        ) as once:
            self._model(ids[:, once.tokens_restored : tokens], cache=once.past, use_cache=True, **options)
        self.tokens_committed += once.tokens_committed
        self.problem = once.problem

    def _empty_past(self) -> SessionCache:
        rows, columns = len(self._prompts.rows), self._prompts.columns
        return SessionCache(self._model.config, rows, columns, self._slots.expect_stream)

    # ------------------------------------------------------------ commit

    def _continued(self, output_ids: torch.Tensor) -> list[list[int]]:
        rows = self.rows_of(output_ids)
        if self._new_tokens_max is None:
            return rows
        return [r[: len(prompt) + self._new_tokens_max] for r, prompt in zip(rows, self._prompts.rows, strict=True)]

    def _commit(self, rows: list[list[int]]) -> None:
        with self._slots.working(), Holds(self._cache, self._owner, self._slots) as holds:
            for index, (row, pad) in enumerate(zip(rows, self._prompts.pads, strict=True)):
                kept = self._blocks_kept[index]
                blocks = keep(self._cache, holds, self.past, index, pad, self._keys_of(row), kept)
                self._blocks_kept[index] = blocks.stop
                self.tokens_committed += len(blocks) * self._spec.block_tokens
            self.problem = holds.shortage or self.problem

    def _keys_of(self, tokens: list[int]) -> Keys:
        return hash_blocks(tokens, self._spec, self._extra)

    @contextmanager
    def _costing_time_only(self, doing: str) -> Iterator[None]:
        """Any failure inside is a miss: noted, logged, and the model computes what is not there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- recomputing is right whatever went wrong
            self.problem = f"{doing} failed: {type(error).__name__}: {error}"
            LOGGER.warning("%s", self.problem)
