"""KVCacheManager: requests of models with several groups, windows and states."""

import pytest

from tests.manager_request import PROMPT, decode, found
from tests.manager_state import chunked, cross, full, mamba, manager_of, mla, remembered, serve, window


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
