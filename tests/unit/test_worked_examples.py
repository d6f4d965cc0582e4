"""The two examples of vLLM's published design of prefix caching, block by block (docs.vllm.ai, design/prefix_caching).

The design counts blocks from 0; block 0 of ours is the null block, so its block n is our n + 1.
"""

import pytest

from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Group

SPEC = FullAttention(block_tokens=4, kv_heads=1, head_dim=1, dtype="float32")
SHARED = list(range(100, 112))


class Example:
    """A manager whose blocks are told in the design's numbers."""

    def __init__(self, blocks, **settings):
        self.manager = KVCacheManager([Group(SPEC)], blocks + 1, tokens_max=64, **settings)

    def begin(self, name, tokens):
        request = self.manager.request(name, tokens)
        hit = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - hit.tokens, hit) is not None
        request.computed_tokens = len(tokens)
        return request, [block - 1 for block in hit.groups[0]]

    def decode(self, request, *tokens):
        for token in tokens:
            request.append([token])
            assert self.manager.allocate_slots(request, 1) is not None
            request.computed_tokens += 1

    def table(self, request):
        return [block - 1 for block in self.manager.block_ids(request)[0]]

    def free(self):
        return [block - 1 for block in self.manager.pool.free_blocks()]

    def cached(self):
        return [block - 1 for block, name in enumerate(self.manager.pool.names.first) if name]


def third_request(**settings):
    """The first example up to its last step: (order before, the request's hits, order behind its hits, its blocks)."""
    example = Example(10, **settings)
    first, hits = example.begin("0", [*SHARED, 1, 2, 3])  # 15 tokens: three full blocks and three quarters of one
    assert (example.table(first), example.cached(), hits) == ([0, 1, 2, 3], [0, 1, 2], [])
    example.decode(first, 4, 5)  # fills block 3, and begins block 4
    assert (example.table(first), example.cached()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])
    second, hits = example.begin("1", [*SHARED[:10], 7, 8, 9, 10])  # 14 tokens, the first 10 in common
    assert (hits, example.table(second)) == ([0, 1], [0, 1, 5, 6])
    before = example.free()
    example.manager.free(first)
    freed = [block for block in example.free() if block not in before]
    example.manager.free(second)
    order = example.free()
    request = example.manager.request("2", [*SHARED, *range(200, 217)])  # 29 tokens, the first 12 in common
    hit = example.manager.get_computed_blocks(request)
    hits = [block - 1 for block in hit.groups[0]]
    assert example.manager.allocate_slots(request, 29 - hit.tokens, hit) is not None
    assert example.manager.check() == []
    return freed, order, hits, [block for block in order if block not in hits], example.table(request)[len(hits) :]


def test_the_published_example_block_by_block():
    """The order of reuse is not the one that vLLM's design describes, with all that is freed joining the tail."""
    freed, order, hits, behind, taken = third_request(nameless_first=False)
    assert freed == [4, 3, 2]
    assert order == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    assert hits == [0, 1, 2]
    assert behind == [7, 8, 9, 4, 3, 6, 5]
    assert taken == [7, 8, 9, 4, 3]


def test_the_same_example_by_the_present_rule():
    """Blocks that nobody can hit are not reused first, as vLLM 0.32 does."""
    freed, order, hits, behind, taken = third_request()
    assert freed == [4, 3, 2]
    assert order == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]  # 4 and 6 were not full
    assert hits == [0, 1, 2]
    assert behind == [6, 4, 7, 8, 9, 3, 5]
    assert taken == [6, 4, 7, 8, 9]


@pytest.mark.parametrize("nameless_first", [True, False])
def test_duplicated_blocks_are_kept(nameless_first):
    """A table changes under a request because another one has computed the same block."""
    example = Example(10, nameless_first=nameless_first)
    prompt, output = list(b"ABCDEF"), list(b"GHI")
    first, _ = example.begin("1", prompt)
    example.decode(first, *output)
    assert (example.table(first), example.cached()) == ([0, 1, 2], [0, 1])
    second, hits = example.begin("2", prompt)
    assert hits == [0]
    example.decode(second, output[0])
    assert (example.table(second), example.cached()) == ([0, 3], [0, 1])
    example.decode(second, output[1])
    assert (example.table(second), example.cached()) == ([0, 3], [0, 1, 3])  # block 3 is a second block 1
    example.decode(second, output[2])
    assert example.table(second) == [0, 3, 4]
    example.manager.free(first)
    third, hits = example.begin("3", [*prompt, *output])
    assert hits == [0, 1]  # the one that was named first
    assert example.manager.check() == []
    assert example.table(third)[:2] == [0, 1]
