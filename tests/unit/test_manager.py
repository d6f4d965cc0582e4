"""KVCacheManager: a request's life, in examples that can be followed by hand."""

import pytest

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.errors import UsageError
from kvtier.events import BlockRemoved, BlocksCleared, BlocksStored
from tests.manager_state import chunked, cross, full, mamba, manager_of, mla, remembered, serve, window

PROMPT = list(range(100, 110))  # two blocks of 4 tokens and two tokens more


def decode(manager, request, token=7, **more):
    """One token more."""
    request.append([token])
    new = manager.allocate_slots(request, 1, **more)
    request.computed_tokens += 1
    return new


def found(manager, tokens, **more):
    return manager.get_computed_blocks(manager.request("looker", tokens, **more)).tokens


# ---------------------------------------------------------------- worked examples


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


# ---------------------------------------------------------------- hits


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


# ---------------------------------------------------------------- a request grows


def test_a_prompt_may_be_computed_in_chunks():
    """Blocks are named before they are full, or a chunk gets the blocks of the whole prompt."""
    manager = manager_of()
    request = manager.request("r", PROMPT)
    assert manager.allocate_slots(request, 3, manager.get_computed_blocks(request)) == ([1],)
    request.computed_tokens = 3
    assert found(manager, PROMPT) == 0
    assert manager.allocate_slots(request, 4) == ([2],)
    request.computed_tokens = 7
    assert found(manager, PROMPT) == 4
    assert manager.allocate_slots(request, 3) == ([3],)
    assert found(manager, PROMPT) == 8


def test_lookahead_slots_are_taken_and_not_named():
    """Drafts have no slots to be computed in, or a rejected draft can be hit."""
    manager = manager_of()
    request = manager.request("r", PROMPT[:7])
    new = manager.allocate_slots(request, 7, manager.get_computed_blocks(request), lookahead_tokens=3)
    assert new == ([1, 2, 3],)
    request.computed_tokens = 7
    assert found(manager, PROMPT) == 4
    assert decode(manager, request, PROMPT[7], lookahead_tokens=3) == ([],)
    assert found(manager, PROMPT) == 8


def test_drafts_are_named_when_they_are_accepted():
    """A draft that was rejected is another's prefix."""
    manager = manager_of()
    request, _, _ = serve(manager, "r", PROMPT[:6])
    request.append(PROMPT[6:7])
    assert manager.allocate_slots(request, 4) == ([3],)  # one token and three drafts
    assert found(manager, PROMPT) == 4
    request.append(PROMPT[7:8])  # one was accepted
    request.computed_tokens = 8
    assert decode(manager, request, PROMPT[8]) == ([],)
    assert found(manager, PROMPT) == 8


def test_lookahead_ends_with_the_longest_request():
    """The last step of a long request asks for a block that no table has room for."""
    manager = manager_of(tokens_max=8)
    request, _, _ = serve(manager, "r", PROMPT[:7])
    assert decode(manager, request, lookahead_tokens=5) == ([],)


def test_tokens_from_elsewhere_are_named_when_they_are_there():
    """A block is hit whose KV is still on its way."""
    manager = manager_of(events=True)
    request = manager.request("r", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 0, hit, external_tokens=8, delay_naming=True) == ([],)
    assert manager.block_ids(request) == ([1, 2],)
    assert found(manager, PROMPT) == 0
    assert manager.take_events() == []
    manager.cache_blocks(request, 8)
    assert found(manager, PROMPT) == 8
    assert len(manager.take_events()) == 1
    manager.cache_blocks(request, 8)
    assert manager.take_events() == []
    request.computed_tokens = 8
    assert manager.allocate_slots(request, 2) == ([3],)


def test_tokens_from_elsewhere_may_come_behind_a_hit_and_with_the_first_step():
    """A prefix of which one part is here and one elsewhere is loaded or computed twice."""
    manager = manager_of()
    serve(manager, "first", PROMPT[:5])
    request = manager.request("r", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert hit.tokens == 4
    assert manager.allocate_slots(request, 2, hit, external_tokens=4) == ([4],)
    assert manager.block_ids(request) == ([1, 3, 4],)
    assert found(manager, PROMPT) == 8


def test_a_window_gets_no_blocks_for_what_it_does_not_read():
    """Loading a long prompt takes blocks for tokens that no layer looks at."""
    manager = manager_of(full(), window(5))
    request = manager.request("r", list(range(20)))
    hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 0, hit, external_tokens=16, delay_naming=True)
    assert manager.block_ids(request) == ([1, 2, 3, 4], [0, 0, 0, 5])


# ---------------------------------------------------------------- room


def test_a_refused_allocation_changes_nothing():
    """A request that found no room has taken blocks, touched its hit or named something."""
    manager = manager_of(blocks_total=7, events=True)
    first, _, _ = serve(manager, "first", PROMPT)
    manager.free(first)
    serve(manager, "second", [3] * 10)
    request = manager.request("third", [*PROMPT, *range(9)])
    hit = manager.get_computed_blocks(request)
    before = remembered([manager, request])
    assert hit.tokens == 8
    assert manager.allocate_slots(request, 11, hit) is None
    assert manager.allocate_slots(request, 0, hit, external_tokens=8, delay_naming=True) is None
    assert remembered([manager, request]) == before
    with pytest.raises(UsageError, match="holds no blocks"):
        manager.free(request)
    assert manager.allocate_slots(request, 4, hit) == ([6],)


def test_a_refused_step_of_a_running_request_changes_nothing():
    """A request that waits for room loses what it has."""
    manager = manager_of(blocks_total=4, events=True)
    request, _, _ = serve(manager, "first", PROMPT[:12])
    for token in (1, 2):
        decode(manager, request, token)
    request.append([3])
    before = remembered(manager)
    assert manager.allocate_slots(request, 1) is None
    assert remembered(manager) == before


def test_a_refused_step_lets_go_of_blocks_behind_the_window_only():
    """A request that waits keeps what it will not read, or loses what it will."""
    manager = manager_of(full(), window(5), blocks_total=13)
    request = manager.request("r", list(range(40)))
    manager.allocate_slots(request, 16, manager.get_computed_blocks(request))
    request.computed_tokens = 16
    serve(manager, "other", [1] * 5)
    assert manager.pool.blocks_free == 0
    tables = manager.block_ids(request)
    assert manager.allocate_slots(request, 24) is None
    assert manager.block_ids(request) == (tables[0], [0, 0, 0, tables[1][3]])
    assert manager.pool.blocks_free == 3
    before = remembered(manager)
    assert manager.allocate_slots(request, 24) is None
    assert remembered(manager) == before
    assert manager.check() == []


def test_hits_that_are_free_count_as_taken():
    """A request is admitted with hits that its own new blocks are taken from."""
    manager = manager_of(blocks_total=5)
    first, _, _ = serve(manager, "first", PROMPT[:9])
    manager.free(first)
    request = manager.request("second", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 9, hit) is None
    assert manager.allocate_slots(request, 8, hit) == ([3, 4],)
    assert manager.block_ids(request) == ([1, 2, 3, 4],)


def test_the_watermark_is_kept_free_of_those_who_wait():
    """New requests take the last blocks, and running ones are thrown out at once."""
    manager = manager_of(blocks_total=10, watermark=0.3)
    request = manager.request("r", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 28, hit) is None
    assert manager.allocate_slots(request, 28, hit, others_scheduled=False) == ([1, 2, 3, 4, 5, 6, 7],)
    request.computed_tokens = 10
    request.append([1] * 19)
    assert manager.allocate_slots(request, 19) is None
    request.running = True
    assert manager.allocate_slots(request, 19) == ([8],)


def test_reserved_blocks_are_left_free():
    """What others of the same step were promised is given away."""
    manager = manager_of(blocks_total=5)
    request = manager.request("r", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 10, hit, reserved_blocks=2) is None
    assert manager.allocate_slots(request, 10, hit, reserved_blocks=1) == ([1, 2, 3],)


def test_a_request_may_be_admitted_only_if_all_of_it_fits():
    """A long prompt is begun that can never be ended."""
    manager = manager_of(blocks_total=5)
    request = manager.request("r", [1] * 20)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 4, hit, whole_must_fit=True) is None
    assert manager.allocate_slots(request, 4, hit) == ([1],)
    shorter = manager_of(blocks_total=6)
    request = shorter.request("r", [1] * 20)
    assert shorter.allocate_slots(request, 4, shorter.get_computed_blocks(request), whole_must_fit=True) == ([1],)


def test_of_a_window_only_what_it_holds_at_once_must_fit():
    """A long prompt is refused for good, though its window lets go of blocks while it is computed."""
    manager = manager_of(window(5), blocks_total=6, tokens_in_flight=8)
    request = manager.request("r", [1] * 40)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 8, hit, whole_must_fit=True) == ([1, 2],)


# ---------------------------------------------------------------- a request ends


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


# ---------------------------------------------------------------- stats and events


def test_stats_keep_those_who_were_preempted_apart():
    """The hit rate is flattered by requests that find their own blocks."""
    manager = manager_of()
    for request_id in ("first", "second"):
        request, hit, _ = serve(manager, request_id, PROMPT)
        manager.record_lookup(request, hit)
        manager.preempt(request)
    manager.record_lookup(request, manager.get_computed_blocks(request))
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert not stats.reset
    manager.reset()
    assert manager.take_stats().reset
    assert manager.take_stats() == type(stats)()


def test_without_caching_there_are_no_queries():
    """An engine without a cache reports a hit rate of nought."""
    manager = manager_of(caching=False)
    request, hit, _ = serve(manager, "r", PROMPT)
    manager.record_lookup(request, hit)
    assert manager.take_stats().requests == 0


def test_events_tell_what_is_stored_after_what_and_what_went():
    """A router that follows the events sends requests to the wrong engine."""
    manager = manager_of(blocks_total=5, events=True)
    extra = ExtraKeys(cache_salt="s")
    request = manager.request("r", PROMPT, extra=extra)
    hashes = request.hashes
    manager.allocate_slots(request, 5, manager.get_computed_blocks(request))
    request.computed_tokens = 5
    (event,) = manager.take_events()
    assert event == BlocksStored(0, (hashes[0],), None, tuple(PROMPT[:4]), 4, (extra.of_block(0, 4),))
    assert event.extra_keys[0] is not None
    manager.allocate_slots(request, 5)
    assert manager.take_events() == [BlocksStored(0, (hashes[1],), hashes[0], tuple(PROMPT[4:8]), 4, (None,))]
    assert manager.take_events() == []
    manager.free(request)
    serve(manager, "other", [1] * 9)
    removed, stored = manager.take_events()
    assert removed == BlockRemoved(0, hashes[1])
    assert (stored.tokens, stored.parent, len(stored.hashes)) == ((1,) * 8, None, 2)


def test_events_of_a_window_leave_out_what_is_not_kept():
    """A router believes in blocks that the window let go of."""
    manager = manager_of(full(8), window(5), blocks_total=20, events=True)
    serve(manager, "r", list(range(16)))
    whole, part, windowed = manager.take_events()
    assert (whole.group, len(whole.hashes), whole.block_tokens) == (0, 2, 8)
    assert (part.group, part.tokens, part.block_tokens) == (0, (8, 9, 10, 11), 4)  # where this prompt can be resumed
    assert (windowed.group, windowed.tokens) == (1, tuple(range(16)))
    assert len(windowed.hashes) == len(windowed.extra_keys) == 2  # the block before each place where hits end


def test_events_are_kept_only_if_asked_for():
    """A manager that nobody listens to grows for ever."""
    manager = manager_of()
    serve(manager, "r", PROMPT)
    assert manager.take_events() == []


def test_reset_waits_until_nothing_is_in_use():
    """After new weights a request reads KV of the old ones."""
    manager = manager_of(events=True)
    request, _, _ = serve(manager, "r", PROMPT)
    before = remembered(manager)
    assert not manager.reset()
    assert remembered(manager) == before
    manager.free(request)
    manager.take_events()
    assert manager.reset()
    assert manager.take_events() == [BlocksCleared()]
    assert found(manager, PROMPT) == 0


def test_evicted_blocks_are_not_found_and_stay_with_who_has_them():
    """Damaged KV is served to the next request, or taken from under a running one."""
    manager = manager_of(events=True)
    request, _, _ = serve(manager, "r", PROMPT)
    manager.take_events()
    manager.evict_blocks([2, 2, 3])
    assert manager.take_events() == [BlockRemoved(0, request.hashes[1])]
    assert found(manager, PROMPT) == 4
    assert manager.block_ids(request) == ([1, 2, 3],)
    assert manager.check() == []


# ---------------------------------------------------------------- several groups


def test_groups_share_one_pool_and_one_hit_length():
    """A request begins where one of its groups has nothing."""
    manager = manager_of(full(), window(5), blocks_total=20)
    request, _, new = serve(manager, "r", list(range(20)))
    assert new == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    manager.free(request)
    manager.evict_blocks([8])
    hit = manager.get_computed_blocks(manager.request("s", list(range(13))))
    assert hit.tokens == 8
    assert hit.groups == ([1, 2], [0, 7])
    assert hit.boundary_tokens == 12


def test_hits_end_where_all_block_sizes_do():
    """A request of a hybrid model begins inside a block of one of its groups."""
    manager = manager_of(full(8), window(5), blocks_total=20)
    request, _, new = serve(manager, "r", list(range(21)))
    assert [len(blocks) for blocks in new] == [3, 6]
    manager.free(request)
    hit = manager.get_computed_blocks(manager.request("s", list(range(15))))
    assert hit.tokens == 8
    assert hit.groups == (new[0][:1], [0, new[1][1]])


def test_eagle_drops_the_last_block_of_a_hit():
    """The draft model reads hidden states that were never computed."""
    tokens = list(range(20))
    for eagle, expected in ((False, 16), (True, 12)):
        manager = manager_of(eagle=eagle, blocks_total=20)
        serve(manager, "r", tokens)
        assert found(manager, tokens) == expected


def test_a_running_request_lets_go_of_what_is_behind_its_window():
    """A long request of a windowed model holds as much as with full attention."""
    manager = manager_of(window(5), blocks_total=20)
    request = manager.request("r", list(range(32)))
    for start in range(0, 32, 8):
        manager.allocate_slots(request, 8, manager.get_computed_blocks(request) if not start else None)
        request.computed_tokens = start + 8
    (table,) = manager.block_ids(request)
    assert (table[:5], len(table)) == ([0] * 5, 8)
    assert all(table[5:])
    assert 1 - manager.usage == pytest.approx(16 / 19)


def test_tokens_in_flight_are_read_by_steps_that_have_not_ended():
    """A block is let go and given to another while a scheduled step still reads it."""
    manager = manager_of(window(5), blocks_total=20)
    request, _, _ = serve(manager, "r", list(range(16)))
    request.in_flight_tokens = 8
    decode(manager, request)
    assert manager.block_ids(request)[0][:3] == [0, 2, 3]
    request.in_flight_tokens = 0
    decode(manager, request)
    assert manager.block_ids(request)[0][:3] == [0, 0, 0]


def test_a_state_that_is_written_on_leaves_its_name_with_a_copy():
    """A prefix that ends inside a block is hit after its state was overwritten, or its copy's blocks are lost."""
    manager = manager_of(full(8), mamba(8), blocks_total=20, hash_tokens=4)
    request = manager.request("r", PROMPT[:7])
    manager.allocate_slots(request, 4, manager.get_computed_blocks(request))
    request.computed_tokens = 4
    manager.begin_step()
    assert manager.take_copies() == []
    manager.allocate_slots(request, 3)
    request.computed_tokens = 7
    copies = manager.take_copies()
    assert copies == [(2, 3)]
    assert manager.take_copies() == []
    assert manager.check() == []
    manager.free(request)
    assert {2, 3}.isdisjoint(manager.pool.free_blocks())
    assert not manager.reset()
    manager.copied(copies)
    assert {2, 3} <= set(manager.pool.free_blocks())
    manager.begin_step()
    hit = manager.get_computed_blocks(manager.request("s", PROMPT))
    assert (hit.tokens, hit.groups) == (4, ([1], [3]))


def test_a_block_that_is_shared_in_part_is_copied_before_it_is_written():
    """Two requests write different tokens into one block."""
    manager = manager_of(full(8), mamba(8), blocks_total=20, hash_tokens=4)
    first = manager.request("first", PROMPT[:7])
    manager.allocate_slots(first, 4, manager.get_computed_blocks(first))
    first.computed_tokens = 4
    manager.begin_step()
    second, hit, new = serve(manager, "second", PROMPT[:6])
    assert hit.tokens == 4
    assert manager.block_ids(second) == new == ([3], [4])
    assert manager.take_copies() == [(1, 3), (2, 4)]


def test_a_state_of_this_step_is_read_in_the_next():
    """A request is begun from a state that is not computed yet."""
    manager = manager_of(mamba(), blocks_total=20)
    serve(manager, "first", PROMPT[:4])
    request = manager.request("second", PROMPT)
    hit = manager.get_computed_blocks(request)
    assert hit.tokens == 4
    before = remembered(manager)
    assert manager.allocate_slots(request, 4, hit) is None
    assert remembered(manager) == before
    manager.begin_step()
    assert manager.allocate_slots(request, 4, hit) == ([2],)


def test_a_decoder_takes_its_encoders_blocks_at_once():
    """The encoder's output of one request is shared, named or taken block by block."""
    manager = manager_of(full(), cross(8), blocks_total=20, caching=False)
    request = manager.request("r", PROMPT)
    new = manager.allocate_slots(request, 4, manager.get_computed_blocks(request), encoder_tokens=7)
    assert [len(blocks) for blocks in new] == [1, 2]
    request.computed_tokens = 4
    assert [len(blocks) for blocks in manager.allocate_slots(request, 6, encoder_tokens=7)] == [2, 0]
    manager.free(request)
    assert manager.usage == 0.0


@pytest.mark.parametrize("group", [full(), mla(), window(5), chunked(8), mamba(), mamba(mode="all")])
def test_every_kind_serves_a_request_to_its_end(group):
    """A kind of attention loses or keeps blocks when its requests end."""
    manager = manager_of(group, blocks_total=20)
    request = manager.request("r", list(range(24)))
    for start in range(0, 24, 8):
        assert manager.allocate_slots(request, 8, manager.get_computed_blocks(request) if not start else None)
        request.computed_tokens = start + 8
        manager.begin_step()
        assert manager.check() == []
    for token in range(6):
        assert decode(manager, request, token) is not None
        manager.begin_step()
    manager.free(request)
    assert manager.usage == 0.0
    assert manager.check() == []
    assert found(manager, list(range(25))) >= 20
