"""KVCacheManager: a request's life, in examples that can be followed by hand: what it finds, and how it ends."""

import pytest

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError
from tests.manager_request import PROMPT, decode, found
from tests.manager_state import full, manager_of, remembered, serve, window


def test_the_worked_example_of_a_shared_prefix():
    """Blocks are reused in another order than vLLM's: its published example, with a null block and today's free rule.

    Ten blocks of four tokens; three requests of 15, 14 and 29 tokens share ten and twelve tokens with the first.
    """
    manager = manager_of(blocks_total=11)
    pool = manager.pool
    tokens = list(range(200, 216))
    first, _, new = serve(manager, "first", tokens[:15])
    assert new == ([1, 2, 3, 4],)
    assert [block for block in range(11) if pool.names.first[block]] == [1, 2, 3]
    assert decode(manager, first, tokens[15]) == ([],)
    assert decode(manager, first, 0) == ([5],)
    assert pool.names.first[4] is not None
    second, hit, new = serve(manager, "second", [*tokens[:10], 1, 2, 3, 4])
    assert hit.groups == ([1, 2],)
    assert hit.tokens == 8
    assert new == ([6, 7],)
    assert pool.free_blocks() == [8, 9, 10]
    manager.free(first)
    assert pool.free_blocks() == [5, 8, 9, 10, 4, 3]  # 1 and 2 are the second's, 5 was not full
    manager.free(second)
    assert pool.free_blocks() == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]
    third, hit, new = serve(manager, "third", [*tokens[:12], *range(17)])
    assert hit.groups == ([1, 2, 3],)
    assert new == ([7, 5, 8, 9, 10],)
    assert manager.block_ids(third) == ([1, 2, 3, 7, 5, 8, 9, 10],)
    assert pool.free_blocks() == [4, 6]
    assert manager.check() == []


def test_equal_blocks_are_kept_apart():
    """A block table that was given to kernels changes when another request computes the same."""
    manager = manager_of(blocks_total=8)
    first, _, _ = serve(manager, "first", [1, 2, 3, 4, 5, 6])
    for token in (7, 8, 9):
        decode(manager, first, token)
    second, hit, _ = serve(manager, "second", [1, 2, 3, 4, 5, 6, 7])
    assert hit.groups == ([1],)
    decode(manager, second, 8)
    assert manager.block_ids(first) == ([1, 2, 3],)
    assert manager.block_ids(second) == ([1, 4],)
    assert [block for block, name in enumerate(manager.pool.names.first) if name] == [1, 2, 4]
    assert manager.pool.names.first[2] == manager.pool.names.first[4]


def test_a_prompt_that_is_all_there_is_computed_from_its_last_block():
    """A request whose whole prompt is cached has no logits to sample from."""
    manager = manager_of()
    serve(manager, "first", PROMPT[:8])
    _, hit, new = serve(manager, "second", PROMPT[:8])
    assert hit.tokens == 4
    assert new == ([3],)
    assert found(manager, PROMPT[:9]) == 8


def test_only_requests_with_the_same_extras_share():
    """One tenant finds another's prompt."""
    manager = manager_of()
    request = manager.request("salted", PROMPT, extra=ExtraKeys(cache_salt="a"))
    manager.allocate_slots(request, 10, manager.get_computed_blocks(request))
    assert found(manager, PROMPT, extra=ExtraKeys(cache_salt="a")) == 8
    assert found(manager, PROMPT, extra=ExtraKeys(cache_salt="b")) == 0
    assert found(manager, PROMPT) == 0


def test_a_request_may_not_want_others_blocks():
    """A request that needs the logits of its whole prompt gets a hit; or its own blocks cannot be found by others."""
    manager = manager_of()
    serve(manager, "first", PROMPT)
    reader = manager.request("reader", PROMPT, reads_cache=False)
    hit = manager.get_computed_blocks(reader)
    assert hit.tokens == 0
    manager.record_lookup(reader, hit)
    assert manager.take_stats().requests == 0
    assert manager.allocate_slots(reader, 10, hit) == ([4, 5, 6],)


def test_without_caching_nothing_is_named_or_found():
    """Switching the cache off still hashes prompts, or serves old blocks."""
    manager = manager_of(caching=False)
    request, hit, _ = serve(manager, "first", PROMPT)
    assert (hit.tokens, hit.groups, request.hashes) == (0, ([],), [])
    manager.free(request)
    assert found(manager, PROMPT) == 0
    assert not any(manager.pool.names.first)
    assert manager.pool.free_blocks()[:3] == [3, 2, 1]


@pytest.mark.parametrize("seed", [None, "a", "b"])
def test_the_hash_and_its_seed_name_the_blocks(seed):
    """Two engines with different seeds have equal names, or the same engine's differ."""
    manager = manager_of(hash_name="xxhash_cbor", hash_seed=seed)
    other = manager_of(hash_name="xxhash_cbor", hash_seed="a")
    equal = manager.request("r", PROMPT).hashes == other.request("r", PROMPT).hashes
    assert equal == (seed == "a")
    assert len(manager.request("r", PROMPT).hashes[0]) == 16


def test_a_stale_hit_is_refused():
    """A request begins with a block that holds something else by now."""
    for spoil in (
        lambda manager: manager.evict_blocks([1]),
        lambda manager: serve(manager, "other", [7] * 40),
        lambda manager: manager.reset(),
    ):
        manager = manager_of()
        first, _, _ = serve(manager, "first", PROMPT)
        manager.free(first)
        request = manager.request("second", PROMPT)
        hit = manager.get_computed_blocks(request)
        assert hit.tokens == 8
        spoil(manager)
        before = remembered([manager, request])
        with pytest.raises(UsageError, match="its hit is gone; call get_computed_blocks"):
            manager.allocate_slots(request, 2, hit)
        assert remembered([manager, request]) == before
        assert manager.check() == []


def test_a_hit_that_others_did_not_spoil_is_taken():
    """Any event between lookup and admission makes an engine look again."""
    manager = manager_of(blocks_total=20)
    serve(manager, "first", PROMPT)
    third, _, _ = serve(manager, "third", [9] * 10)
    request = manager.request("second", PROMPT)
    hit = manager.get_computed_blocks(request)
    manager.free(third)
    manager.evict_blocks(range(4, 7))
    assert manager.allocate_slots(request, 2, hit) is not None
    assert manager.block_ids(request)[0][:2] == [1, 2]


def test_a_preempted_request_finds_what_it_had():
    """A request that was thrown out computes everything again, or its counters are those of its first life."""
    manager = manager_of(blocks_total=20)
    request, _, _ = serve(manager, "r", PROMPT)
    for token in range(3):
        decode(manager, request, token)
    manager.preempt(request)
    assert (request.computed_tokens, request.in_flight_tokens, request.running) == (0, 0, False)
    assert request.preemptions == 1
    assert manager.usage == 0.0
    hit = manager.get_computed_blocks(request)
    assert hit.tokens == 12
    assert manager.allocate_slots(request, 1, hit) == ([4],)
    assert manager.block_ids(request) == ([1, 2, 3, 4],)
    manager.free(request)
    assert manager.check() == []


def test_usage_counts_blocks_in_use():
    """An autoscaler sees a full cache as an empty one."""
    manager = manager_of(blocks_total=11)
    assert manager.usage == 0.0
    request, _, _ = serve(manager, "r", PROMPT)
    assert manager.usage == pytest.approx(0.3)
    manager.free(request)
    assert manager.usage == 0.0


def test_common_prefix_blocks_are_those_that_all_have():
    """A kernel computes attention to a shared prefix once for requests that do not share it."""
    manager = manager_of(full(), window(64), blocks_total=30)
    first, _, _ = serve(manager, "first", PROMPT)
    assert manager.common_prefix_blocks(first) == [3, 3]
    second, _, _ = serve(manager, "second", [*PROMPT, 1])
    assert manager.common_prefix_blocks(first) == [2, 2]
    third, _, _ = serve(manager, "third", [*PROMPT[:4], 1, 2, 3])
    assert manager.common_prefix_blocks(second) == [1, 1]
    serve(manager, "fourth", [9])
    assert manager.common_prefix_blocks(first) == [0, 0]
    assert manager.common_prefix_blocks(third) == [0, 0]
