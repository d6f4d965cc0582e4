"""TieredPool: a pool whose blocks may also lie in tiers below.

Owns, beside what a BlockPool owns: which named blocks are clean, that is copied below, and how many that were not had
to be dropped. Always: a block without a name is not marked clean; the mark goes with the name.
Units: blocks.

The first block in order whose loss loses nothing is reused: one without a name, or a clean one. Only if there are too
few of them the head goes, and is counted. The search looks at some thousand blocks at most: with nothing clean it
would otherwise walk the whole pool for each block. A tier below may drop its copy meanwhile: then the content is
computed again.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvtier.allocator.block_metrics import BlockMetrics
from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.errors import InvariantError
from kvtier.types import BlockHash

SEARCH_BLOCKS_MAX = 1024  # beyond those that are wanted


class TieredPool(BlockPool):
    """Reuses clean blocks first. `dropped_dirty` counts blocks that were reused although no tier below had them."""

    def __init__(
        self,
        blocks_total: int,
        groups: int = 1,
        events: bool = False,
        metrics: BlockMetrics | None = None,
        nameless_first: bool = True,
    ) -> None:
        super().__init__(blocks_total, groups, events, metrics, nameless_first)
        self.dropped_dirty = 0
        self._clean: dict[int, object] = {}  # by block: the name under which it was copied
        self._lent: set[int] = set()  # being copied

    def is_clean(self, block: int) -> bool:
        """Whether a tier below has the block's content, as far as anybody said."""
        name = self.names.first[block]
        return name is not None and self._clean.get(block) is name

    def mark_clean(self, block: int, name: BlockHash | None) -> None:
        """A tier below has the content of this name; the block is clean if it still has it."""
        present = self.names.first[block]
        if present is not None and present == name:
            self._clean[block] = present

    def dirty(self, within: int) -> list[int]:
        """The full blocks without a copy below among the next `within` to be reused, in order."""
        return [b for b in islice(self._free(), within) if not self._is_safe(b) and not self.names.ends_inside(b)]

    def take(self, count: int) -> list[int]:
        """The first `count` free blocks whose loss loses nothing, then the others; as `BlockPool.take` besides."""
        if not 0 <= count <= self.blocks_free:
            raise InvariantError(f"pool: cannot take {count} blocks, {self.blocks_free} are free")
        near = islice(self._free(), SEARCH_BLOCKS_MAX + count)
        chosen = list(islice((b for b in near if self._is_safe(b)), count))
        if len(chosen) < count:
            safe = set(chosen)
            rest = list(islice((b for b in self._free() if b not in safe), count - len(chosen)))
            self.dropped_dirty += sum(not self._is_safe(block) for block in rest)
            chosen += rest
        following, preceding = self._next, self._prev
        for block in reversed(chosen):  # to the head, in the order chosen, where the next ones are taken
            before, after = preceding[block], following[block]
            following[before], preceding[after] = after, before
            head = following[NULL_BLOCK]
            following[NULL_BLOCK], preceding[head] = block, block
            preceding[block], following[block] = NULL_BLOCK, head
            self._clean.pop(block, None)
        return super().take(count)

    def free_blocks(self) -> list[int]:
        """Those that can be taken, in order; a block that is being copied cannot."""
        return list(self._free())

    # ------------------------------------------------------------ lending

    def lend(self, blocks: Sequence[int]) -> None:
        """Free blocks are read by a copy: they keep their place in the order, and are not taken before `give_back`."""
        self._lent.update(blocks)
        self._recount(-len(blocks))

    def give_back(self, blocks: Sequence[int]) -> None:
        """The copy has ended."""
        self._lent.difference_update(blocks)
        self._recount(sum(not self.refs[block] for block in blocks))

    def touch(self, blocks: Sequence[int]) -> None:
        if self._lent:
            self._recount(sum(block in self._lent and not self.refs[block] for block in blocks))
        super().touch(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        if self._lent:
            self._recount(-sum(block in self._lent and not self.refs[block] for block in blocks))

    def _recount(self, more_free: int) -> None:
        self.blocks_free += more_free
        self.blocks_lent -= more_free

    def check(self) -> list[str]:
        lent = sum(not self.refs[block] for block in self._lent)
        wrong = [] if lent == self.blocks_lent else [f"pool: {lent} free blocks are lent, {self.blocks_lent} counted"]
        return super().check() + wrong

    # ------------------------------------------------------------ parts

    def reset(self) -> bool:
        done = super().reset()
        if done:
            self._clean.clear()
        return done

    def _is_safe(self, block: int) -> bool:
        return self.names.first[block] is None or self.is_clean(block)

    def _free(self) -> Iterator[int]:
        """Those that can be taken, in order."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if block not in self._lent:
                yield block
            block = self._next[block]
