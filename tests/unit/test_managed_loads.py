"""ManagedTop: what a request loads, and what it holds meanwhile."""

import pytest

from kvtier.errors import UsageError
from kvtier.events import BlocksStored
from tests.managed_prompt import PROMPT, world_with_prompt_below
from tests.manager_state import remembered


def test_a_lookup_holds_nothing_and_changes_nothing():
    """Asking leaves pins behind, and the host tier fills up with them."""
    world = world_with_prompt_below()
    before = remembered(world.manager), world.below.core.stats()["matches"]
    assert world.top.get_computed_blocks(world.request(PROMPT)).tokens == 24
    assert (remembered(world.manager), world.below.core.stats()["matches"]) == before


def test_blocks_are_found_only_when_their_bytes_are_there():
    """Another request reads a block before it was loaded (vLLM's delayed naming)."""
    world = world_with_prompt_below(blocks=20, events=True)
    world.manager.take_events()
    first, second = world.request(PROMPT), world.request(PROMPT)
    assert world.admit(first)
    for _ in range(2):  # asked, then under way
        lookup = world.top.get_computed_blocks(second)
        assert (lookup.hit.tokens, lookup.external_tokens) == (0, 24)
        assert world.manager.take_events() == []
        world.below.run()
        world.step()
    assert len(world.pages.moves) == 1
    world.pages.end()
    assert world.step() == [first]
    assert first.computed_tokens == 24
    (event,) = world.manager.take_events()
    assert isinstance(event, BlocksStored)
    assert len(event.hashes) == 6
    assert world.top.get_computed_blocks(second).hit.tokens == 24
    world.drain()


def test_two_requests_load_the_same_prefix_side_by_side():
    """One's load ends the other's, or both write into the same blocks."""
    world = world_with_prompt_below(blocks=20)
    requests = [world.request(PROMPT) for _ in range(2)]
    for request in requests:
        assert world.admit(request)
    tables = [set(world.manager.block_ids(request)[0]) for request in requests]
    assert not tables[0] & tables[1]
    world.end_loads()
    for request in requests:
        assert request.computed_tokens == 24
        assert world.proceed(request)
    world.drain()


def test_a_request_that_loads_gets_no_tokens_before_step_returned_it():
    """An engine computes on blocks that are still written."""
    world = world_with_prompt_below(blocks=20)
    request = world.request(PROMPT)
    assert not world.top.is_loading(request)
    world.admit(request)
    assert world.top.is_loading(request)
    before = remembered(world.manager)
    with pytest.raises(UsageError, match="is loading; wait until"):
        world.top.allocate_slots(request, 1)
    assert remembered(world.manager) == before
    world.end_loads()
    assert not world.top.is_loading(request)
    world.drain()


def test_the_blocks_of_a_load_are_told():
    """The engine does not know which blocks its copies will write."""
    world = world_with_prompt_below(blocks=20)
    request = world.request(PROMPT)
    lookup = world.top.get_computed_blocks(request)
    new = world.top.allocate_slots(request, 1, lookup)
    assert [len(row) for row in new] == [6]
    assert new == world.manager.block_ids(request)
    world.top.free(request)


def test_a_load_that_finds_no_blocks_takes_nothing():
    """A refused request leaves pins below, or holds blocks."""
    world = world_with_prompt_below(blocks=8)
    other = world.request([9] * 16)
    world.admit(other)
    lookup = world.top.get_computed_blocks(waits := world.request(PROMPT))
    assert lookup.external_tokens == 24
    before = remembered(world.manager)
    assert world.top.allocate_slots(waits, 1, lookup) is None
    assert remembered(world.manager) == before
    assert world.below.core.stats()["matches"] == 0
    assert not world.top.is_loading(waits)
    world.free(other)
    assert world.serve(PROMPT) == 24
    world.drain()


def test_a_refused_hit_leaves_nothing_pinned_below():
    """A caller's mistake keeps slots of the host tier for half a minute."""
    world = world_with_prompt_below(blocks=20)
    world.serve(PROMPT[:9])
    request = world.request(PROMPT)
    lookup = world.top.get_computed_blocks(request)
    assert lookup.hit.tokens == 8
    world.manager.evict_blocks(lookup.hit.groups[0])
    with pytest.raises(UsageError, match="its hit is gone"):
        world.top.allocate_slots(request, 1, lookup)
    assert world.below.core.stats()["matches"] == 0
    assert world.top.check() == []


def test_what_was_loaded_is_clean():
    """A block that certainly lies below counts as lost when it is reused, and others go before it."""
    world = world_with_prompt_below(blocks=7)
    request = world.request(PROMPT)
    world.admit(request)
    world.end_loads()
    world.free(request)
    assert all(world.pool.is_clean(block) for block in world.pool.free_blocks() if world.pool.names.first[block])
    world.admit(world.request([1] * 25))
    assert world.pool.dropped_dirty == 0
    world.drain()
