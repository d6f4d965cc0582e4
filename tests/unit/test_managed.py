"""ManagedTop: a block manager's blocks go down and come back, and its decisions stay its own."""

import pytest

from kvtier.cache.manager import KVCacheManager
from kvtier.engine.managed import Lookup, ManagedTop
from kvtier.errors import UsageError
from kvtier.events import BlocksStored
from kvtier.testing.replay import _Player
from kvtier.testing.replay_log import config_of, rows_of
from tests.compat.test_kept_logs import LOGS
from tests.managed_world import FULL, MLA, Below, Pages, World, group_for, model_of
from tests.manager_state import remembered

SIZES = [("full", 4), ("full", 8)]
PROMPT = list(range(100, 125))  # 6 blocks of 4, and a token


def world_with_prompt_below(groups=(FULL,), tokens=PROMPT, **more):
    """A world whose tiers have a prompt, and whose pages forgot it."""
    world = World(groups, **more)
    world.serve(tokens)
    world.flush()
    forget_pages(world)
    return world


def forget_pages(world):
    """Nobody finds anything in the pages any more."""
    assert world.manager.reset()
    world.manager.take_stats()


# ---------------------------------------------------------------- down and up


@pytest.mark.parametrize(
    "groups", [(FULL,), (MLA,), (FULL, FULL), (FULL, ("full", 8)), (("full", 8), MLA), (("full", 4), ("full", 6))]
)
def test_what_was_evicted_comes_back_byte_for_byte(groups):
    """A prompt that comes again is computed again, or read with other bytes (the world looks at each)."""
    world = World(groups, blocks=8 * len(groups), host_slots=20 * len(groups))
    prompts = [[number] * 12 + list(range(13)) for number in range(5)]
    for tokens in prompts:
        assert world.serve(tokens) == 0
        world.flush()
    assert world.pool.dropped_dirty == 0
    assert [world.serve(tokens) for tokens in prompts] == [24] * 5
    assert world.pages.met["load done"] > 0
    assert world.pages.met["load failed"] == 0
    world.drain()


@pytest.mark.parametrize("hash_name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_hash_can_name_what_lies_below(hash_name):
    """Keys of 16 bytes, or of a pickle, are lost on their way to the tiers."""
    world = world_with_prompt_below(hash_name=hash_name)
    assert world.serve(PROMPT) == 24
    world.drain()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, ("full", 8))])
def test_a_restart_finds_what_lies_below(groups):
    """What was kept is of no use to the next process."""
    world = World(groups, blocks=20)
    world.serve(PROMPT)
    world.flush()
    world.drain()
    again = World(groups, blocks=20, disk=world.below.disk)
    assert again.serve(PROMPT) == 24
    again.drain()


def test_a_second_manager_over_the_same_tiers_finds_the_firsts_blocks():
    """Two arenas cannot share what lies below."""
    world = World()
    world.serve(PROMPT)
    world.flush()
    other = World(below=world.below)
    assert other.serve(PROMPT) == 24
    assert other.pages.met["load done"] == 6


@pytest.mark.parametrize("groups", [(FULL,), (FULL, ("full", 8)), (("full", 8), FULL)])
def test_a_prefix_may_lie_partly_in_pages_and_partly_below(groups):
    """The wrong blocks are loaded behind a hit, or the hit is loaded once more."""
    world = world_with_prompt_below(groups, blocks=20)
    world.serve(PROMPT[:9])
    world.manager.reset()
    first = world.request([*PROMPT[:9]])
    assert world.admit(first)
    world.end_loads()
    world.proceed(first)
    loaded = world.top.counters.loaded
    lookup = world.top.get_computed_blocks(world.request(PROMPT))
    assert (lookup.hit.tokens, lookup.external_tokens, lookup.tokens) == (8, 16, 24)
    assert world.serve(PROMPT) == 24
    assert world.top.counters.loaded - loaded == sum(16 // size for size in world.sizes)
    world.drain()


def test_a_hit_and_a_load_end_where_every_group_has_a_block():
    """Half a block of one group is taken for loaded."""
    world = world_with_prompt_below(SIZES, tokens=PROMPT[:22], blocks=20)
    lookup = world.top.get_computed_blocks(world.request(PROMPT[:22]))
    assert (lookup.hit.tokens, lookup.external_tokens) == (0, 16)
    assert world.serve(PROMPT[:22]) == 16
    world.drain()


def test_the_last_token_is_always_computed():
    """A request whose whole prompt lies below has no logits to go on with."""
    world = world_with_prompt_below()
    for tokens, external in [(24, 20), (25, 24), (4, 0), (5, 4), (1, 0)]:
        assert world.top.get_computed_blocks(world.request(PROMPT[:tokens])).external_tokens == external


def test_eagle_drops_the_last_block_wherever_it_lies():
    """A draft model lacks the hidden states of a block that was loaded, or the dropped block of a hit is loaded."""
    world = World(blocks=20, eagle=True)
    world.serve(PROMPT)
    world.flush()
    lookup = world.top.get_computed_blocks(world.request(PROMPT))
    assert (lookup.hit.tokens, lookup.external_tokens) == (20, 0)
    forget_pages(world)
    lookup = world.top.get_computed_blocks(world.request(PROMPT))
    assert (lookup.hit.tokens, lookup.external_tokens) == (0, 20)
    assert world.serve(PROMPT) == 20
    world.drain()


def test_a_request_that_reads_no_cache_reads_none_below():
    """Prompt log-probabilities are missing for what was loaded."""
    world = world_with_prompt_below()
    request = world.manager.request("alone", PROMPT, reads_cache=False)
    assert world.top.get_computed_blocks(request).tokens == 0


# ---------------------------------------------------------------- a load


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


# ---------------------------------------------------------------- stores


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


# ---------------------------------------------------------------- names that are taken back


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


# ---------------------------------------------------------------- what is asked for


def manager_without_tiers(blocks=12, **more):
    return KVCacheManager([group_for(*FULL)], blocks + 1, tokens_max=64, **more)


@pytest.mark.parametrize("settings", [{}, {"tiers_below": True, "caching": False}])
def test_a_manager_that_was_not_made_for_tiers_is_refused(settings):
    """Dirty blocks are reused before clean ones, or nothing is ever found below."""
    below = Below(model_of())
    with pytest.raises(UsageError, match="make it with tiers_below=True, and caching"):
        ManagedTop(manager_without_tiers(**settings), below, Pages(below, (FULL,), 13))


@pytest.mark.parametrize("groups", [(MLA,), (("full", 8),), (FULL, FULL)])
def test_a_manager_with_other_groups_than_the_model_is_refused(groups):
    """Blocks are copied with another length than they have."""
    below = Below(model_of(groups))
    with pytest.raises(UsageError, match="they must be the same"):
        ManagedTop(manager_without_tiers(tiers_below=True), below, Pages(below, (FULL,), 13))


@pytest.mark.parametrize("ahead", [-0.1, 1.0, 2, float("nan"), "0.5", None])
def test_a_share_that_is_none_is_refused(ahead):
    """Everything is copied all the time, or nothing ever."""
    below = Below(model_of())
    with pytest.raises(UsageError, match="ahead"):
        ManagedTop(manager_without_tiers(tiers_below=True), below, Pages(below, (FULL,), 13), ahead=ahead)


class Facade:
    """The verbs of a manager, asked of a managed top. It copies nothing: `step` is never called."""

    def __init__(self, top):
        self.top = top

    def __getattr__(self, name):
        return getattr(self.top.manager, name)

    def get_computed_blocks(self, request):
        lookup = self.top.get_computed_blocks(request)
        assert lookup.external_tokens == 0
        return lookup.hit

    def allocate_slots(self, request, new_tokens, hit=None, **more):
        return self.top.allocate_slots(request, new_tokens, None if hit is None else Lookup(hit, 0), **more)

    def free(self, request):
        self.top.free(request)

    def preempt(self, request):
        self.top.preempt(request)

    def check(self):
        return self.top.check()


@pytest.mark.parametrize("name", ["full_0_60_17_4", "full_1_200_33_8", "eagle_0_180_33_3", "mla_0_180_33_8"])
def test_with_nothing_below_it_decides_as_the_manager_alone(name):
    """An engine with empty tiers no longer decides as vLLM, whose logs these are.

    Up to where one takes the name off a free block: that is reused then before any that would be lost.
    """
    (path,) = [path for path in LOGS if path.name.startswith(name)]
    first, *rows = rows_of(path)
    config = config_of(path, first)
    plain, ours = (_Player(config, "config" in first) for _ in range(2))
    ours.manager = Facade(top_like(config, plain.manager.groups))
    for number, row in enumerate(rows):
        if any(not plain.manager.pool.refs[block] for block in row.get("blocks", ())):
            assert number > 20
            return
        if "stats" in row:
            assert ours.stats() == plain.stats()
        else:
            assert ours.play(row) == plain.play(row)
        assert ours._snapshot() == plain._snapshot()
        assert ours.manager.check() == []


def top_like(config, groups):
    """A managed top with the settings of a log, over empty tiers."""
    kinds = tuple((group.spec.kind, group.spec.block_tokens) for group in groups)
    names = ("tokens_max", "tokens_in_flight", "eagle", "hash_tokens", "retention_tokens", "watermark")
    settings = {name: config[name] for name in names}
    manager = KVCacheManager(groups, config["blocks_total"], events=True, tiers_below=True, **settings)
    below = Below(model_of(kinds))
    return ManagedTop(manager, below, Pages(below, kinds, config["blocks_total"]))
