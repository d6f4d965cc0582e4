"""BlockPool: which block is in use, by how many requests, and which is reused next.

Owns: every block's reference count, its names (`BlockNames`), and the order of the free ones. Owns no bytes and no
requests.
Always:  a block is free exactly if nobody refers to it; a free block keeps its name until it is taken again, so its
         content can still be hit; block 0 is the null block: never taken, free or named, and its count of references
         means nothing.
Units:   blocks (index into the arena of pages).

The decisions are those of vLLM 0.32: free blocks are taken from the head; blocks with a name join the tail, the last
of a request first, and those without one the head, for nobody can hit them (an older rule is an option). The free ones
are a doubly linked list through two columns, closed by the null block. The columns are lists of numbers that all share
one object per block: array.array takes a third of the memory, but boxing made these loops take twice as long.
"""

from collections.abc import Sequence

from kvtier.allocator.block_metrics import BlockMetrics
from kvtier.allocator.block_names import BlockNames
from kvtier.errors import InvariantError, UsageError

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. blocks_total-1, all made at the start. Verbs cost O(1) per block, but for walking and `check`.

    refs: references by block, to be read.
    """

    def __init__(
        self,
        blocks_total: int,
        groups: int = 1,
        events: bool = False,
        metrics: BlockMetrics | None = None,
        nameless_first: bool = True,
    ) -> None:
        """metrics: are told of blocks' lives. nameless_first: vLLM 0.32's rule; without it all that is freed joins the
        tail, as in vLLM's published example. Raises UsageError if there would be no block beside the null block.
        """
        if type(blocks_total) is not int or blocks_total < 2:
            raise UsageError(f"a pool of {blocks_total!r} blocks holds nothing; give at least 2, one is the null block")
        if metrics is not None and not isinstance(metrics, BlockMetrics):
            raise UsageError(f"metrics is {metrics!r}; give a BlockMetrics of this pool alone, or None")
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total - 1
        self.blocks_lent = 0  # free ones that cannot be taken at present
        self.names = BlockNames(blocks_total, groups, events)
        self._metrics = metrics
        self._nameless_first = nameless_first
        self.refs = [0] * blocks_total
        blocks = list(range(blocks_total))
        self._next = blocks[1:] + blocks[:1]
        self._prev = blocks[-1:] + blocks[:-1]

    @property
    def usage(self) -> float:
        """The share of blocks that somebody refers to, 0 to 1."""
        return 1.0 - self.blocks_free / (self.blocks_total - 1)

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, with one reference each. What they held is forgotten.

        Raises InvariantError, and changes nothing, if there are fewer.
        """
        if not 0 <= count <= self.blocks_free:
            raise InvariantError(f"pool: cannot take {count} blocks, {self.blocks_free} are free")
        following, refs, name = self._next, self.refs, self.names.first
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            if name[block] is not None:
                self.names.forget(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.blocks_free -= count
        if self._metrics is not None:
            self._metrics.taken(taken)
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference to each; those that were free no longer are."""
        following, preceding, refs = self._next, self._prev, self.refs
        used = 0
        for block in blocks:
            if refs[block] or not block:
                refs[block] += 1
                used += 1
            else:
                refs[block] = 1
                before, after = preceding[block], following[block]
                following[before] = after
                preceding[after] = before
        self.blocks_free -= len(blocks) - used
        if self._metrics is not None:
            self._metrics.touched(blocks)

    def hold(self, block: int) -> None:
        """One more reference to a block in use, for a copy of its bytes: no request has found it, as in `touch`."""
        if not self.refs[block]:
            raise InvariantError(f"pool: block {block} is free and cannot be held")
        self.refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each. `blocks` come in the order in which they are to be reused."""
        following, preceding, refs, name = self._next, self._prev, self.refs, self.names.first
        first = self._nameless_first
        nameless = []
        used = 0
        tail = preceding[NULL_BLOCK]
        for block in blocks:
            if refs[block] != 1 or not block:
                refs[block] -= 1
                used += 1
            else:
                refs[block] = 0
                if name[block] is None and first:
                    nameless.append(block)
                else:
                    following[tail] = block
                    preceding[block] = tail
                    tail = block
        following[tail] = NULL_BLOCK
        preceding[NULL_BLOCK] = tail
        if nameless:
            self._prepend(nameless)
        self.blocks_free += len(blocks) - used

    def free_null(self, count: int) -> None:
        """As `free` with so many null blocks: what is counted there means nothing, but is vLLM's count as well."""
        self.refs[NULL_BLOCK] -= count

    def evict(self, blocks: Sequence[int]) -> None:
        """Nobody is to hit these blocks any more. Who refers to them keeps them, and their order stays."""
        for block in blocks:
            self.names.forget(block)
        if self._metrics is not None:
            self._metrics.evicted(blocks)

    def reset(self) -> bool:
        """Forget all names. False, and nothing is changed, while a block is in use."""
        if self.blocks_free != self.blocks_total - 1:
            return False
        self.names.clear()
        if self._metrics is not None:
            self._metrics.reset()
        return True

    def free_blocks(self) -> list[int]:
        """From the next one to be taken to the last."""
        return self._walk(self._next)

    def check(self) -> list[str]:
        """Walk the free blocks both ways, recount them, and check the names."""
        forward, backward = self._walk(self._next), self._walk(self._prev)
        findings = self.names.check()
        if forward != backward[::-1]:
            findings.append("pool: the two directions of the free blocks disagree")
        unused = [block for block in range(1, self.blocks_total) if not self.refs[block]]
        if sorted(forward) != unused or len(forward) != self.blocks_free + self.blocks_lent:
            findings.append(f"pool: {len(forward)} linked, {len(unused)} unused, {self.blocks_free} counted as free")
        findings += [f"pool: block {block} has {n} references" for block, n in enumerate(self.refs) if n < 0 < block]
        if self.names.first[NULL_BLOCK] is not None:
            findings.append("pool: the null block has a name")
        return findings

    def _prepend(self, blocks: Sequence[int]) -> None:
        following, preceding = self._next, self._prev
        head, after = NULL_BLOCK, following[NULL_BLOCK]
        for block in blocks:
            following[head] = block
            preceding[block] = head
            head = block
        following[head] = after
        preceding[after] = head

    def _walk(self, links: list[int]) -> list[int]:
        """The free blocks along `links`; cut off where they do not close."""
        blocks: list[int] = []
        block = links[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) < self.blocks_total:
            blocks.append(block)
            block = links[block]
        return blocks
