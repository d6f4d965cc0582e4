"""ChunkedLocalGroup: attention within chunks of `chunk_tokens` tokens (Llama 4).

What lies before the chunk of the next token is never read again, so it is served without being there.
Units: tokens, blocks.
"""

from collections.abc import Sequence

from kvtier.allocator.block_pool import NULL_BLOCK, BlockPool
from kvtier.cache.groups.base import GroupManager
from kvtier.cache.groups.finding import Find, Hits, leading
from kvtier.cache.groups.rules import Rules
from kvtier.cache.specs import ChunkedLocal, Spec
from kvtier.errors import UsageError
from kvtier.types import BlockHash


class ChunkedLocalGroup(GroupManager):
    """Lets go of the chunks before the current one while the request runs."""

    def __init__(self, index: int, spec: Spec, pool: BlockPool, rules: Rules, eagle: bool) -> None:
        super().__init__(index, spec, pool, rules, eagle)
        assert isinstance(spec, ChunkedLocal)
        self.blocks_cap = spec.blocks_max(rules.tokens_max, rules.tokens_in_flight)
        self._chunk_tokens = spec.chunk_tokens
        if rules.caching and rules.drafts:
            text = "chunked local attention with a draft model that reads hidden states (EAGLE)"
            raise UsageError(
                f"group {index}: {text} cannot be cached; make the manager without eagle, or caching=False"
            )
        if rules.caching and self.block_tokens != rules.step_tokens:
            text = f"chunked local attention in blocks of {self.block_tokens} tokens beside groups of other block sizes"
            raise UsageError(
                f"group {index}: {text}; give all groups the same block_tokens, or make the manager with caching=False"
            )

    def tokens_skipped(self, computed_tokens: int) -> int:
        return computed_tokens // self._chunk_tokens * self._chunk_tokens

    def longest_hit(self, hashes: Sequence[BlockHash], tokens_max: int, drop_last: bool, finds: Sequence[Find]) -> Hits:
        first = self.tokens_skipped(tokens_max) // self.block_tokens
        found = leading(self.block_hashes(hashes, first, tokens_max // self.block_tokens), finds)
        rows = [[*[NULL_BLOCK] * first, *blocks] for blocks in found]
        return rows, len(rows[0]) * self.block_tokens
