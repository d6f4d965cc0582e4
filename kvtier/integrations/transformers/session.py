"""One `generate()` call that starts from the longest prefix kvtier has, and gives back what it computed.

Owns: one lease from enter to exit, and the `DynamicCache` handed to transformers. Always: what the model says is
what it would have said without kvtier. KV is copied out of the slots before the model runs and into leased slots
after it; the last token of a prompt is always computed; and whatever fails in the cache only costs the time to
recompute (`problem` then says what it was). Wrong calls, such as a batch, raise UsageError before anything runs.
Units: tokens.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

import kvtier
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.errors import UsageError
from kvtier.integrations.transformers.identity import shape_of
from kvtier.integrations.transformers.prompt import refuse_adapters, refuse_padding, tokens_of
from kvtier.integrations.transformers.tensors import gather, scatter

ATTEMPTS_MAX = 8  # asking for room again, each time for less

LOGGER = logging.getLogger("kvtier.transformers")


class PrefixSession:
    """Restores on enter, commits on exit.

        with PrefixSession(cache, model, input_ids) as session:
            output = model.generate(input_ids, **session.generate_kwargs)

    cache: an open blocking cache whose `config.model` fits the model. input_ids: int tensor [1, tokens].
    attention_mask: what `generate` is given, if anything; padding is refused. max_new_tokens: how many generated
    tokens to take slots for, so that `commit(output)` can keep their blocks too. extra: adapter or salt.

    Afterwards: `tokens_restored`, `tokens_by_tier`, `tokens_committed`, and `problem`, None or why the cache was
    not used as it could have been.
    Good for one `generate` of one sequence: no beams, no `num_return_sequences`.
    Raises UsageError, before anything is taken, for a batch, for padding, or for a model the cache does not fit.
    """

    def __init__(
        self,
        cache: "kvtier.SyncCache",
        model: Any,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 0,
        owner: str = "transformers",
        extra: ExtraKeys | None = None,
    ) -> None:
        spec = cache.config.model
        shape_of(model).check_fits(spec)
        refuse_adapters(model, extra)
        refuse_padding(model, input_ids, attention_mask)
        self._cache = cache
        self._model = model
        self._spec = spec
        self._extra = extra
        self._owner = owner
        self._prompt = tokens_of(input_ids)
        # The last generated token is never fed back, so it has no KV.
        self._tokens_wanted = len(self._prompt) + max(max_new_tokens - 1, 0)
        self._lease: kvtier.Lease | None = None
        self._open = False
        self._blocks_done = 0
        self.past = DynamicCache(config=model.config)
        self.tokens_restored = 0
        self.tokens_committed = 0
        self.tokens_by_tier: dict[str, int] = {}
        self.problem: str | None = None

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """What `model.generate()` needs to start from the restored prefix, beside its usual arguments."""
        return {"cache": self.past}

    def __enter__(self) -> "PrefixSession":
        self._open = True
        with self._costing_time_only("restore"):
            try:
                self._restore()
            except BaseException:  # after an interrupt, too: __exit__ will not be called
                self._give_back()
                raise
        return self

    def commit(self, output_ids: torch.Tensor | None = None) -> int:
        """Keep the full blocks computed so far; returns how many tokens were added.

        output_ids: what `generate` returned, [1, tokens]: generated blocks are kept too, as far as
        `max_new_tokens` took slots for them. Without it the prompt's blocks are kept, as on exit.
        Raises UsageError after exit, or if the output does not begin with the prompt.
        """
        if not self._open:
            raise UsageError("the session is over; commit inside its with block")
        tokens = self._prompt if output_ids is None else self._checked(output_ids)
        added = 0
        with self._costing_time_only("commit"):
            added = self._commit(tokens)
        self.tokens_committed += added
        return added

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self._open = False
            self._give_back()

    # ------------------------------------------------------------ restore

    def _restore(self) -> None:
        size = self._spec.block_tokens
        keys = hash_blocks(self._prompt, self._spec, self._extra)
        if self._tokens_wanted < size:
            return  # not one full block to restore or keep
        self._lease = self._reserve(keys, self._tokens_wanted // size)
        if self._lease is None:
            return
        assert self._lease.tokens_ready < len(self._prompt)  # generate() needs a token to start from
        blocks = self._lease.tokens_ready // size
        if blocks:
            past = DynamicCache(config=self._model.config)
            slots = self._lease.slots(0)[:blocks]
            for layer in range(len(past.layers)):
                view = self._cache.kv(group=0, layer=layer)
                k, v = (gather(view[part], slots, self._model.dtype) for part in ("k", "v"))
                past.update(k.to(self._model.device), v.to(self._model.device), layer)
            self.past = past  # only now: half a prefix must never be seen
        self._blocks_done = blocks
        self.tokens_restored = blocks * size
        self.tokens_by_tier = dict(self._lease.tiers)

    def _reserve(self, keys: Keys, blocks_wanted: int) -> "kvtier.Lease | None":
        """A lease on slots for as much of the request as there is room for, or None."""
        blocks = blocks_wanted
        for _ in range(ATTEMPTS_MAX):
            if blocks < 1:
                break
            prefix = keys.prefix(blocks * self._spec.block_tokens)
            match = self._cache.match(prefix, owner=self._owner, tokens_max=len(self._prompt) - 1)
            try:
                answer = self._cache.reserve(match, blocks_total=blocks)
            except BaseException:
                self._cache.release(match)
                raise
            if not isinstance(answer, kvtier.NoRoom):
                return answer
            self._cache.release(match)
            blocks -= max(answer.slots_needed - answer.slots_available, 1)
            self.problem = f"room for {max(blocks, 0)} of {blocks_wanted} blocks in the fastest tier"
        return None

    # ------------------------------------------------------------ commit

    def _checked(self, output_ids: torch.Tensor) -> list[int]:
        tokens = tokens_of(output_ids)
        if tokens[: len(self._prompt)] != self._prompt:
            raise UsageError("the output does not begin with the session's prompt; pass what generate() returned")
        return tokens

    def _commit(self, tokens: list[int]) -> int:
        if self._lease is None:
            return 0
        size = self._spec.block_tokens
        slots = self._lease.slots(0)
        first = self._blocks_done
        last = min(min(self.past.get_seq_length(), len(tokens)) // size, len(slots))
        if last <= first:
            return 0
        for layer, (k, v, _) in enumerate(self.past):
            view = self._cache.kv(group=0, layer=layer)
            for part, tensor in (("k", k), ("v", v)):
                self._check_made_as_configured(tensor)
                scatter(view[part], slots[first:last], tensor[:, :, first * size : last * size].cpu())
        keys = hash_blocks(tokens[: last * size], self._spec, self._extra).groups[0]
        self._cache.commit(self._lease, pairs=list(zip(slots[first:last], keys[first:last], strict=True)))
        self._blocks_done = last
        return (last - first) * size

    def _check_made_as_configured(self, tensor: torch.Tensor) -> None:
        """Under autocast or in unusual models KV can differ from what the model's configuration promises."""
        group = self._spec.groups[0]
        made = (tensor.shape[0], tensor.shape[1], tensor.shape[3], str(tensor.dtype).removeprefix("torch."))
        promised = (1, group.kv_heads, group.head_dim, group.dtype)
        if made != promised:
            raise UsageError(f"the model made KV of batch, heads, dim, dtype {made}, not {promised}; not kept")

    def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            with self._costing_time_only("release"):
                self._cache.release(lease)

    @contextmanager
    def _costing_time_only(self, doing: str) -> Iterator[None]:
        """Any failure inside is a miss: noted, logged, and the model computes what is not there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- recomputing is right whatever went wrong
            self.problem = f"{doing} failed: {type(error).__name__}: {error}"
            LOGGER.warning("%s", self.problem)
