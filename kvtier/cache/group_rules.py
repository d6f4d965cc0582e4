"""What follows for groups from being served together: how fine hashes are, where hits may end, who drops a block.

Owns no state. Units: tokens.
"""

from collections.abc import Sequence
from math import gcd, lcm

from kvtier.cache.groups import GroupManager, manager_class
from kvtier.cache.groups.rules import Rules
from kvtier.cache.specs import Group
from kvtier.errors import UsageError


def rules_for(
    groups: Sequence[Group],
    *,
    tokens_max: int,
    tokens_in_flight: int | None = None,
    hash_tokens: int | None = None,
    retention_tokens: int | None = None,
    caching: bool = True,
    eagle: bool = False,
) -> Rules:
    """What follows for all groups from their specs. Raises UsageError for what does not fit together."""
    if not groups:
        raise UsageError("no groups; give a Group per kind of layer")
    sizes = [group.spec.block_tokens for group in groups]
    step = lcm(*sizes)
    per_hash = _hash_tokens(sizes, hash_tokens)
    inside = caching and len(groups) > 1 and _hits_end_inside(groups, per_hash)
    _check_retention(groups, retention_tokens, step)
    return Rules(
        hash_tokens=per_hash,
        step_tokens=step,
        align_tokens=per_hash if inside else step,
        tokens_max=tokens_max,
        tokens_in_flight=tokens_max if tokens_in_flight is None else tokens_in_flight,
        retention_tokens=retention_tokens,
        drafting=eagle,
        drafts=bool(draft_groups(groups, eagle)),
        caching=caching,
    )


def _hash_tokens(sizes: Sequence[int], wanted: int | None) -> int:
    """Tokens per hash: what is wanted, or the largest number that divides all block sizes."""
    if wanted is None:
        return gcd(*sizes)
    if type(wanted) is not int or wanted < 1 or any(size % wanted for size in sizes):
        raise UsageError(f"hash_tokens is {wanted!r}; give a number that divides all block sizes, {sizes}")
    if len(sizes) == 1 and wanted != sizes[0]:
        raise UsageError(f"hash_tokens is {wanted}; with one group, hits end at its blocks of {sizes[0]} tokens")
    return wanted


def draft_groups(groups: Sequence[Group], eagle: bool) -> set[int]:
    """The groups whose hits drop a block: those that say so, or all if none does."""
    drafts = {index for index, group in enumerate(groups) if group.eagle}
    return set(range(len(groups))) if eagle and not drafts else drafts


def _hits_end_inside(groups: Sequence[Group], hash_tokens: int) -> bool:
    """Whether hits may end inside blocks: with states at finer boundaries than blocks, if all kinds can do it."""
    kinds = [manager_class(group.spec) for group in groups]
    sizes = [group.spec.block_tokens for group in groups]
    finer = any(k.names_inside_blocks and size > hash_tokens for k, size in zip(kinds, sizes, strict=True))
    return finer and all(k.finds_inside_blocks or size == hash_tokens for k, size in zip(kinds, sizes, strict=True))


def _check_retention(groups: Sequence[Group], retention_tokens: int | None, step_tokens: int) -> None:
    if retention_tokens is None:
        return
    if type(retention_tokens) is not int or retention_tokens < 0 or retention_tokens % step_tokens:
        text = f"retention_tokens is {retention_tokens!r}"
        raise UsageError(f"{text}; give a multiple of {step_tokens}, where hits end, or 0")
    if retention_tokens and all(manager_class(g.spec).wanted is GroupManager.wanted for g in groups):
        raise UsageError("retention_tokens has no effect, all groups keep every block; leave it out")
