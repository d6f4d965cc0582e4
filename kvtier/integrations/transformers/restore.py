"""From slots to the tensors a batch starts from: how many columns can be restored, and their KV.

Owns no state; what it takes from the cache is given back when it returns. Always: all rows of a transformers cache
have one length, so with left padding a batch starts from the column up to which every row is restored:

    row 0   |pad|t0 t1 t2 t3 t4 t5 t6 t7 t8|      restored: 4 tokens, columns up to 5
    row 1   |pad pad pad pad|t0 t1 t2 t3 t4|      restored: 4 tokens, columns up to 8
    columns  0   1  ...     5                     the batch starts from column 5; row 1 uses one of its tokens

Columns of padding are zeros: the mask hides them, so that it only matters that they are finite.
Units: columns, tokens, seconds.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.integrations.transformers.holds import Holds
from kvtier.integrations.transformers.past import SessionCache
from kvtier.integrations.transformers.prompt import Prompts
from kvtier.integrations.transformers.slots import Slots


@dataclass(frozen=True, slots=True)
class Restored:
    """What a batch starts from. `blocks` per row lie in the fastest tier; `tiers` says where they came from."""

    columns: int
    blocks: list[int]
    tiers: dict[str, int]


def restore(
    cache: "kvtier.SyncCache", holds: Holds, prompts: Prompts, keys: list[Keys], past: SessionCache, model: Any
) -> Restored:
    """Fill `past`, which is empty, with the columns that every row has. The last token of a row is never restored."""
    block_tokens = cache.config.model.block_tokens
    columns = min(
        pad + cache.peek(key, tokens_max=len(row) - 1).tokens
        for pad, row, key in zip(prompts.pads, prompts.rows, keys, strict=True)
    )
    tiers: Counter[str] = Counter({tier.name: 0 for tier in cache.config.tiers})
    slots: list[tuple[int, ...]] = []
    deadline_s = time.monotonic() + cache.config.limits.load_deadline_s  # for all rows together
    for pad, row, key in zip(prompts.pads, prompts.rows, keys, strict=True):
        # Not beyond the column that another row does not reach: nobody would use what is loaded.
        wanted = min(-(-max(columns - pad, 0) // block_tokens) * block_tokens, len(row) - 1)
        lease = holds.restored(key, wanted, max(deadline_s - time.monotonic(), 0.0)) if wanted else None
        ready = lease.tokens_ready if lease else 0
        slots.append(lease.slots(0)[: ready // block_tokens] if lease else ())
        tiers.update(lease.tiers if lease else {})
        columns = min(columns, pad + ready)
    if not any(columns > pad for pad in prompts.pads):
        return Restored(0, [len(row) for row in slots], dict.fromkeys(tiers, 0))
    assert columns < prompts.columns  # generate() needs a token to start from
    _fill(cache, holds.slots, prompts, slots, columns, past, model)
    return Restored(columns, [len(row) for row in slots], dict(tiers))


def _fill(
    cache: "kvtier.SyncCache",
    memory: Slots,
    prompts: Prompts,
    slots: list[tuple[int, ...]],
    columns: int,
    past: SessionCache,
    model: Any,
) -> None:
    group = cache.config.model.groups[0]
    for layer in range(len(past.layers)):
        views = cache.kv(group=0, layer=layer)
        pair = []
        for part in ("k", "v"):
            rows = memory.empty((len(slots), columns, group.kv_heads, group.head_dim), model.dtype)
            for row, pad, own in zip(rows, prompts.pads, slots, strict=True):
                row[: min(pad, columns)] = 0
                if pad < columns:
                    memory.gather(views[part], own, row[pad:])
            pair.append(memory.to_model(rows.transpose(1, 2)))
        past.fill(layer, *pair)
