"""From the tensors a model made to slots that others may find.

Owns no state; what it takes from the cache is given back when it returns. Always: a block is kept only if every layer
has K and V of all its tokens, in the model's configured shape; a prefix that rows share is kept once. The slots of
all rows are given back together, so that no row makes room by throwing out another's blocks. Units: blocks, tokens.
"""

import torch

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.errors import UsageError
from kvtier.integrations.transformers.holds import Holds
from kvtier.integrations.transformers.past import SessionCache


def keep(
    cache: "kvtier.SyncCache", holds: Holds, past: SessionCache, row: int, pad: int, keys: Keys, kept: int
) -> range:
    """Commit the full blocks of a row that are not in the fastest tier; returns which, up to as many as found room.

    pad: the row's columns of padding. keys: of the tokens that its columns are known to hold. kept: leading blocks
    that were restored or committed already.
    """
    last = max(past.columns_whole() - pad, 0) // keys.block_tokens[0]
    keys = keys.prefix(last * keys.block_tokens[0])
    first = _known(cache, holds, keys, kept)
    count = len(keys.groups[0]) - first
    lease = holds.fresh(keys, count) if count > 0 else None
    if lease is None:
        return range(first, first)
    slots = lease.slots(0)
    _copy(cache, holds, past, row, pad, first, slots)
    pairs = list(zip(slots, keys.groups[0][first:], strict=False))
    cache.commit(lease, pairs=pairs, after=holds.slots.event())
    return range(first, first + len(slots))


def _known(cache: "kvtier.SyncCache", holds: Holds, keys: Keys, kept: int) -> int:
    """How many leading blocks need not be kept again. They stay until the step ends."""
    match = holds.pin(keys)
    known = match.tokens // keys.block_tokens[0]
    # What is only on a slower tier (its load was too late) is worth a place in the fastest, now that it is computed.
    wholly_fast = match.tiers.get(cache.config.tiers[0].name) == match.tokens
    if holds.slots.commits_late:  # what this session has committed itself need not be found yet
        return max(known if wholly_fast else 0, kept)
    return known if wholly_fast else min(known, kept)


def _copy(
    cache: "kvtier.SyncCache",
    holds: Holds,
    past: SessionCache,
    row: int,
    pad: int,
    first: int,
    slots: tuple[int, ...],
) -> None:
    block_tokens = cache.config.model.block_tokens
    start = pad + first * block_tokens
    columns = slice(start, start + len(slots) * block_tokens)
    for layer, (k, v, _) in enumerate(past):
        views = cache.kv(group=0, layer=layer)
        for part, tensor in (("k", k), ("v", v)):
            _check_made_as_configured(cache, tensor)
            holds.slots.scatter(views[part], slots, tensor[row, :, columns])


def _check_made_as_configured(cache: "kvtier.SyncCache", tensor: torch.Tensor) -> None:
    """Under autocast or in unusual models KV can differ from what the model's configuration promises."""
    group = cache.config.model.groups[0]
    made = (tensor.shape[1], tensor.shape[3], str(tensor.dtype).removeprefix("torch."))
    promised = (group.kv_heads, group.head_dim, group.dtype)
    if made != promised:
        raise UsageError(f"the model made KV of heads, dim, dtype {made}, not {promised}; not kept")
