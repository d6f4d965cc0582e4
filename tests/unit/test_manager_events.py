"""KVCacheManager: what it counts and tells of a request's blocks, and how their names are taken back."""

from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.events import BlockRemoved, BlocksCleared, BlocksStored
from tests.manager_request import PROMPT, found
from tests.manager_state import full, manager_of, remembered, serve, window


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
