"""PageStores: blocks that are soon to be reused are copied below before they are.

Owns: the store under way, one at a time. Always: what is being copied is not reused, and keeps its place in the order.
Units: blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.allocator.tiered_pool import TieredPool
from kvtier.blocks.hashing import Keys
from kvtier.types import BlockKey, Outcome, Status, block_key, group_of, hash_of

BLOCKS_MAX = 64  # of one store
AHEAD_MAX = 1024  # blocks that each step looks at
PAUSE_STEPS = 16  # after one that found no room below


@dataclass(slots=True)
class Storing:
    """One store, by key: several blocks may have one. asked: the keys that the tiers did not have."""

    blocks: dict[BlockKey, list[int]]
    asked: tuple[BlockKey, ...] = ()

    @property
    def lent(self) -> list[int]:
        return [block for blocks in self.blocks.values() for block in blocks]

    @property
    def count(self) -> int:
        """Blocks of the move."""
        return len(self.asked)

    def place(self, keys: Sequence[BlockKey]) -> list[int]:
        """A block for each key that is to be copied."""
        self.asked = tuple(keys)
        return [self.blocks[key][0] for key in keys]


class PageStores:
    """ahead_blocks: so many of the next blocks to be reused, but not more than `AHEAD_MAX`, are kept clean."""

    def __init__(self, pool: TieredPool, block_tokens: Sequence[int], ahead_blocks: int) -> None:
        self._pool, self._sizes, self._ahead = pool, tuple(block_tokens), min(ahead_blocks, AHEAD_MAX)
        self._active: Storing | None = None
        self._flushing = False
        self._pause = 0

    @property
    def active(self) -> bool:
        return self._active is not None

    @property
    def is_due(self) -> bool:
        """Whether there is something to copy, and nothing speaks against trying it now."""
        return self._pause == 0 and bool(self._due(1))

    def flush(self) -> None:
        """Until all is clean, look at all free blocks."""
        self._flushing, self._pause = True, 0

    def next(self) -> tuple[Storing, Keys] | None:
        """The next store, if one is due: a part of the free blocks only, for they cannot be taken meanwhile."""
        if self._pause:
            self._pause -= 1
            return None
        if self._active is not None:
            return None
        blocks = self._due(min(BLOCKS_MAX, max(1, self._pool.blocks_free // 4)))
        if not blocks:
            self._flushing = False
            return None
        storing = Storing({})
        for block in blocks:
            name = self._pool.names.first[block]
            assert name is not None  # a dirty block has one
            storing.blocks.setdefault(block_key(name, self._pool.names.group_of(block)), []).append(block)
        self._pool.lend(blocks)
        self._active = storing
        rows = tuple(tuple(key for key in storing.blocks if group_of(key) == g) for g in range(len(self._sizes)))
        return storing, Keys(rows, self._sizes)

    def refused(self, storing: Storing) -> None:
        """There was no room below: the blocks stay dirty, and some steps pass before the next try."""
        self._pause = PAUSE_STEPS
        self._end(storing)

    def judged(self, storing: Storing, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """The outcomes, failed where the block's name was taken back meanwhile: its content is wrong."""
        names = self._pool.names.first
        return tuple(
            outcome if names[storing.blocks[key][0]] == hash_of(key) else Outcome(Status.FAILED, detail="evicted")
            for key, outcome in zip(storing.asked, outcomes, strict=True)
        )

    def end(self, storing: Storing, outcomes: Sequence[Outcome]) -> None:
        """The copies have been made, or not; what was not asked for lay below already."""
        failed = {key for key, outcome in zip(storing.asked, outcomes, strict=True) if not outcome.done}
        for key, blocks in storing.blocks.items():
            if key not in failed:
                for block in blocks:
                    self._pool.mark_clean(block, hash_of(key))
        if failed:
            self._pause = PAUSE_STEPS
        self._end(storing)

    def _due(self, count: int) -> list[int]:
        return self._pool.dirty(self._pool.blocks_free if self._flushing else self._ahead)[:count]

    def _end(self, storing: Storing) -> None:
        self._active = None
        self._pool.give_back(storing.lent)
