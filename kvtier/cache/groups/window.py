"""SlidingWindowGroup: attention to the last `window` tokens.

A prefix can be served if the blocks that its window touches are there, whatever happened to those before, whose place
in the table is null. Blocks that no later request could begin from get no name. Units: tokens, blocks.
"""

from collections.abc import Sequence

from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.finding import Find, Hits, find_all
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import SlidingWindow, Spec, blocks_for
from kvtier.types import BlockHash


class SlidingWindowGroup(GroupManager):
    """Lets go of blocks behind the window while the request runs."""

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        super().__init__(index, spec, pool, rules, eagle)
        assert isinstance(spec, SlidingWindow)
        self.blocks_cap = spec.blocks_max(rules.tokens_max, rules.tokens_in_flight)
        self._window = spec.window
        self._behind = spec.window - 1 + spec.retained_tokens

    def tokens_skipped(self, computed_tokens: int) -> int:
        return max(0, computed_tokens - self._behind)

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        """From the right: the first run of blocks as long as the window needs, ending where a hit may end."""
        size, align = self.block_tokens, self.rules.align_tokens
        own = self.block_hashes(hashes, 0, tokens_max // size)
        needed = self._run_needed(drop_last)
        found = [[NULL_BLOCK] * len(own) for _ in finds]
        run = 0
        for position in range(len(own) - 1, -1, -1):
            row = find_all(own[position], finds)
            if row is None:
                run = 0
                continue
            if run == 0 and size != align and (position + (not drop_last)) * size % align:
                continue
            for blocks, block in zip(found, row, strict=True):
                blocks[position] = block
            run += 1
            if run >= needed:
                return self._cut(found, position + run, drop_last)
        return self._cut(found, self._aligned(run), drop_last)  # what begins the prompt serves, however short it is

    def wanted(self, first: int, end: int, request: Request) -> list[bool] | None:
        """The blocks that a hit at some boundary needs: each `align_tokens`, or as `retention_tokens` says."""
        size, align, kept = self.block_tokens, self.rules.align_tokens, self.rules.retention_tokens
        if align % size != 0:
            return None
        needed, shift = self._run_needed(self.eagle), int(self.eagle)
        wanted = [False] * (end - first)
        if kept != 0:
            period = (align if kept is None else kept) // size
            if needed >= period:
                return None
            wanted = [i >= shift and (i - shift) % period >= period - needed for i in range(first, end)]
        for boundary in self.rules.resume_positions(request) if kept is not None else ():
            last = boundary // align * align // size + shift
            for i in range(max(first, last - needed), min(end, last)):
                wanted[i - first] = True
        return wanted

    def _run_needed(self, drop_last: bool) -> int:
        """How many blocks in a row the window before the next token touches, and the one that is dropped."""
        return blocks_for(self._window - 1, self.block_tokens) + drop_last

    def _cut(self, found: list[list[int]], blocks: int, drop_last: bool) -> Hits:
        """The first `blocks` blocks, less the one that is dropped, and less what does not end where a hit may end."""
        if drop_last and blocks:
            blocks -= 1
        blocks = self._aligned(blocks)
        for row in found:
            del row[blocks:]
        return found, blocks * self.block_tokens

    def _aligned(self, blocks: int) -> int:
        while blocks * self.block_tokens % self.rules.align_tokens:
            blocks -= 1
        return blocks
