"""FullGroup: attention to all tokens before, and MLA, which keeps something else but needs it for as long.

A prefix can be served exactly if all its blocks are there. Where hits may end inside a block (another group's blocks
are smaller), the prompt's last boundary inside a block has a name, too. Units: tokens, blocks.
"""

from collections.abc import Sequence

from kvtier.allocator.block_pool import BlockPool
from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.finding import Find, Hits, find_all, leading
from kvtier.cache.groups.rules import Rules
from kvtier.cache.request import Request
from kvtier.cache.specs import Spec, blocks_for
from kvtier.types import BlockHash


class FullGroup(GroupManager):
    """Keeps every block until the request ends."""

    serves_shorter = True
    finds_inside_blocks = True

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        super().__init__(index, spec, pool, rules, eagle)
        self._hits_end_inside = rules.align_tokens < self.block_tokens
        self._written_from: dict[int, int] = {}  # by block that this step writes: from which token on

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        size, align = self.block_tokens, self.rules.align_tokens
        found = leading(self.leading_hashes(hashes, tokens_max // size), finds)
        tokens = len(found[0]) * size
        if align < size and size % align == 0:
            inside = self._inside(hashes, tokens_max, finds, len(found[0]))
            if inside is not None:
                tail, tokens = inside
                for blocks, block in zip(found, tail, strict=True):
                    blocks.append(block)
        if drop_last and tokens > 0:
            tokens -= min(align, size)
        tokens -= tokens % align
        for blocks in found:
            del blocks[blocks_for(tokens, size) :]
        return found, tokens

    def waits_for_step(self, hit: Sequence[int], hit_end: int) -> bool:
        """What the hit needs of its last block would be copied before this step computes it. (vLLM does that.)"""
        return self._ends_inside(hit, hit_end) and hit_end > self._written_from.get(hit[-1], hit_end)

    def begin_step(self) -> None:
        self._written_from.clear()

    def name(self, request: Request, tokens: int) -> None:
        first, end = self.named.get(request.request_id, 0), tokens // self.block_tokens
        if first < end:
            self.name_blocks(request, first, end)
        if self._stride > 1:
            self._name_tail(request, tokens)
        if self._hits_end_inside:
            start = max(request.computed_tokens, first * self.block_tokens)  # what is there from before this step
            written = self.tables.get(request.request_id, ())[start // self.block_tokens :]
            self._written_from.update(dict.fromkeys(written, start))

    def _inside(
        self, hashes: Sequence[BlockHash], tokens_max: int, finds: Sequence[Find], blocks: int
    ) -> tuple[list[int], int] | None:
        """The block after the first `blocks` whose prefix is the longest that is named, and the tokens up to there."""
        align = self.rules.align_tokens
        per_block = self.block_tokens // align
        first = blocks * per_block
        end = min(first + per_block - 1, tokens_max // align, len(hashes))
        for index in range(end - 1, first - 1, -1):
            tail = find_all(hashes[index], finds)
            if tail is not None:
                return tail, (index + 1) * align
        return None

    def _name_tail(self, request: Request, tokens: int) -> None:
        """Name the prompt's last boundary, if it lies inside a block: the same prompt can be resumed there."""
        size, step = self.block_tokens, self.rules.hash_tokens
        limit = request.prompt_tokens if self.eagle else request.prompt_tokens - 1  # one token is always computed
        boundary = limit // step * step
        table = self.tables.get(request.request_id, [])
        position = boundary // size
        if boundary == 0 or boundary > tokens or boundary % size == 0 or position >= len(table):
            return
        self.name_inside(request, table[position], boundary)
