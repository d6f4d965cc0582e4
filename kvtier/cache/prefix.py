"""How much of a prompt can be served: the longest prefix that every group has, in any tier.

Pure questions to the directory; nothing is held. A group of full attention serves a prefix when all its blocks are
there; groups of other kinds will answer for themselves here. Units: tokens, blocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvtier.blocks.hashing import Keys
from kvtier.cache.directory import Directory


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that all groups can serve. `handles[g]` are its blocks, `tiers[g]` where the fastest copies lie."""

    tokens: int
    handles: tuple[tuple[int, ...], ...]
    tiers: tuple[tuple[int, ...], ...]


def longest_prefix(directory: Directory, namespace: int, keys: Keys, tokens_max: int | None) -> Prefix:
    """The longest prefix within `tokens_max` tokens, a whole number of blocks in every group."""
    step = lcm(*keys.block_tokens)
    limit = keys.tokens if tokens_max is None else min(tokens_max, keys.tokens)
    found: list[tuple[list[int], list[int]]] = []
    for group_keys, size in zip(keys.groups, keys.block_tokens, strict=True):
        handles, tiers = directory.leading(namespace, group_keys[: max(limit, 0) // size])
        limit = min(limit, len(handles) * size)
        found.append((handles, tiers))
    tokens = max(limit, 0) // step * step
    cuts = [tokens // size for size in keys.block_tokens]
    return Prefix(
        tokens,
        tuple(tuple(handles[:cut]) for (handles, _), cut in zip(found, cuts, strict=True)),
        tuple(tuple(tiers[:cut]) for (_, tiers), cut in zip(found, cuts, strict=True)),
    )


def tokens_by_tier(
    tiers: Sequence[Sequence[int]], block_tokens: Sequence[int], tokens: int, names: Sequence[str]
) -> dict[str, int]:
    """Tokens of a prefix by the tier they come from; where groups differ, the slowest counts."""
    counts = dict.fromkeys(names, 0)
    if len(tiers) == 1:
        for tier, blocks in Counter(tiers[0][: tokens // block_tokens[0]]).items():
            counts[names[tier]] = blocks * block_tokens[0]
        return counts
    step = lcm(*block_tokens)
    for start in range(0, tokens, step):
        slowest = max(
            tier
            for group, size in zip(tiers, block_tokens, strict=True)
            for tier in group[start // size : (start + step) // size]
        )
        counts[names[slowest]] += step
    return counts
