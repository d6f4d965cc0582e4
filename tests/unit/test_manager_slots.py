"""KVCacheManager: how a request grows, and who gets the slots that are left."""

import pytest

from kvtier.errors import UsageError
from tests.manager_request import PROMPT, decode, found
from tests.manager_state import full, manager_of, remembered, serve, window


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
