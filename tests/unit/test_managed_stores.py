"""ManagedTop: what is copied down, and names that are taken back meanwhile."""

import pytest

from tests.managed_prompt import PROMPT, forget_pages, manager_without_tiers, world_with_prompt_below
from tests.managed_world import World


def test_only_what_is_reused_soon_is_copied():
    """All that ends is copied at once, used again or not."""
    world = World(blocks=20, ahead=0.25)
    world.serve([1] * 60)
    assert world.pool.free_blocks()[:6] == [16, 17, 18, 19, 20, 15]
    world.settle()
    assert world.top.counters.stored == 0
    world.serve([2] * 12)
    world.settle()
    assert world.pages.met["store done"] == world.top.counters.stored > 0
    assert world.pool.dirty(5) == []
    assert len(world.pool.dirty(20)) > 5


def test_flush_copies_all_that_nobody_uses():
    """A shutdown loses what was not due yet."""
    world = World(blocks=30, ahead=0.05)
    runs = world.request([3] * 20)
    world.admit(runs)
    world.serve(PROMPT)
    world.serve([2] * 20)
    assert len(world.pool.dirty(30)) == 11
    world.flush()
    assert world.top.is_idle
    assert world.pool.dirty(30) == []
    assert world.top.counters.stored == 11
    assert len(world.below.disk.rows) == 11
    world.drain()


def test_what_lies_below_already_is_not_copied_again():
    """Every eviction costs a copy."""
    world = world_with_prompt_below()
    forget_pages(world)
    world.serve([9] * 20)
    world.pool.reset()
    stored = world.top.counters.stored
    request = world.manager.request("alone", PROMPT, reads_cache=False)
    world.admit(request)  # computed once more, under the same names
    world.free(request)
    world.flush()
    assert world.top.counters.stored == stored
    assert world.top.counters.known == 6
    assert world.pool.dirty(12) == []


def test_two_blocks_with_one_name_are_copied_once_and_both_clean():
    """A name that two requests computed side by side is copied twice, or one of its blocks is dirty for ever."""
    world = World(blocks=60)
    twins = [world.manager.request(name, PROMPT, reads_cache=False) for name in "ab"]
    for request in twins:
        assert world.admit(request)
    for request in twins:
        world.free(request)
    world.flush()
    assert world.top.counters.stored == 6
    assert world.top.counters.known == 0
    assert sum(world.pool.is_clean(block) for block in range(1, 61)) == 12
    world.drain()


def storing(blocks=12, **more):
    """A world with a store under way; the blocks that it reads."""
    world = World(blocks=blocks, **more)
    world.serve(PROMPT)
    world.step()
    world.below.plan()
    world.step()
    (move,) = world.pages.moves
    assert move.kind == "store"
    return world, list(move.blocks)


def test_a_block_that_is_copied_is_not_reused():
    """The copy reads another's bytes and keeps them under the old name."""
    world, moving = storing()
    assert not set(moving) & set(world.pool.free_blocks())
    request = world.request([5] * (4 * world.pool.blocks_free))
    assert world.admit(request)
    assert not set(moving) & set(world.manager.block_ids(request)[0])
    assert not world.admit(world.request([6] * 4))
    world.pages.end()
    world.step()
    assert world.admit(world.request([6] * 4))
    world.drain()


def test_a_block_that_is_copied_may_be_hit():
    """A copy makes a prefix invisible, and it is computed again."""
    world, moving = storing()
    request = world.request(PROMPT)
    assert world.top.get_computed_blocks(request).hit.tokens == 24
    assert world.admit(request)
    assert set(moving) <= set(world.manager.block_ids(request)[0])
    world.pages.end()
    world.step()
    assert not set(moving) & set(world.pool.free_blocks())
    world.free(request)
    world.drain()


@pytest.mark.parametrize("ends_first", ["request", "copy"])
def test_a_hit_on_a_copied_block_ends_before_or_after_the_copy(ends_first):
    """A block is free twice, or never."""
    world, _ = storing()
    request = world.request(PROMPT)
    assert world.admit(request)
    for what in ("request", "copy") if ends_first == "request" else ("copy", "request"):
        if what == "request":
            world.free(request)
        else:
            world.pages.end()
            world.step()
        world.check()
    world.drain()


def test_a_copy_leaves_the_order_of_reuse():
    """The blocks that were used last are reused first."""
    world = World(blocks=20)
    for number in range(3):
        world.serve([number] * 20)
    before = world.pool.free_blocks()
    world.flush()
    assert world.top.counters.stored == 15
    assert world.pool.free_blocks() == before


def test_with_all_copied_in_time_the_same_blocks_are_reused_as_without_tiers():
    """Tiers below make the pages keep old prefixes and give up new ones."""
    world, plain = World(blocks=20), manager_without_tiers(blocks=20)
    for number in range(12):
        tokens = [number % 7] * (8 + 3 * number % 17)
        ours, theirs = (owner.request(f"r{number}", tokens, reads_cache=False) for owner in (world.manager, plain))
        assert world.admit(ours)
        assert plain.allocate_slots(theirs, len(tokens)) is not None
        assert world.manager.block_ids(ours) == plain.block_ids(theirs)
        world.free(ours)
        plain.free(theirs)
        world.settle()
    assert world.pool.dropped_dirty == 0


def test_reset_waits_for_moves_and_leaves_nothing_in_the_pages():
    """Old prefixes are found after the weights have changed, or a copy's bytes are overwritten."""
    world, _ = storing()
    assert not world.manager.reset()
    assert world.top.get_computed_blocks(world.request(PROMPT)).hit.tokens == 24
    world.settle()
    assert any(world.pool.is_clean(block) for block in range(1, 13))
    assert world.manager.reset()
    assert world.top.get_computed_blocks(world.request(PROMPT)).hit.tokens == 0
    assert not any(world.pool.is_clean(block) for block in range(1, 13))
    world.drain()


def test_reset_is_refused_while_a_load_is_under_way():
    """A load's blocks are given away under it."""
    world = world_with_prompt_below()
    request = world.request(PROMPT)
    world.admit(request)
    world.free(request)
    assert not world.manager.reset()
    world.settle()
    assert world.manager.reset()


def test_a_block_evicted_while_it_is_copied_is_not_clean():
    """A block that was found to be wrong counts as kept."""
    world, moving = storing()
    world.manager.evict_blocks(moving)
    world.pages.end()
    world.step()
    assert not any(world.pool.is_clean(block) for block in moving)
    world.check()
    world.drain()


def test_a_block_evicted_while_it_is_copied_is_not_found_below():
    """What the engine found to be wrong comes back from below."""
    world, moving = storing()
    world.manager.evict_blocks(moving)
    world.pages.end()
    world.step()
    lookup = world.top.get_computed_blocks(world.request(PROMPT))
    assert lookup.external_tokens == 0


def test_evicting_the_blocks_of_a_load_changes_nothing_for_it():
    """A block without a name is evicted, and its load never ends."""
    world = world_with_prompt_below(blocks=20)
    request = world.request(PROMPT)
    world.admit(request)
    world.manager.evict_blocks(world.manager.block_ids(request)[0])
    world.end_loads()
    assert request.computed_tokens == 24
    world.drain()
