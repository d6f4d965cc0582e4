"""Looking up blocks by name in several groups at once. Owns nothing."""

from collections.abc import Callable, Iterable, Sequence

from kvtier.types import BlockHash

Find = Callable[[BlockHash], "int | None"]  # of one group: the block that has this name
Hits = tuple[list[list[int]], int]  # a table per group that is looked up together, and the tokens they serve


def leading(hashes: Iterable[BlockHash], finds: Sequence[Find]) -> list[list[int]]:
    """The blocks of the leading hashes that all groups have, by group."""
    if len(finds) == 1:
        (find,) = finds
        blocks: list[int] = []
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return [blocks]
    found: list[list[int]] = [[] for _ in finds]
    for block_hash in hashes:
        row = find_all(block_hash, finds)
        if row is None:
            break
        for blocks, block in zip(found, row, strict=True):
            blocks.append(block)
    return found


def find_all(block_hash: BlockHash, finds: Sequence[Find]) -> list[int] | None:
    """The block of each group, or None if one of them has none."""
    row = []
    for find in finds:
        block = find(block_hash)
        if block is None:
            return None
        row.append(block)
    return row
