"""ManagedTop: a block manager's blocks go down and come back, and its decisions stay its own."""

import pytest

from kvtier.cache.manager import KVCacheManager
from kvtier.engine.managed import Lookup, ManagedTop
from kvtier.errors import UsageError
from kvtier.testing.replay import _Player
from kvtier.testing.replay_log import config_of, rows_of
from tests.compat.test_kept_logs import LOGS
from tests.managed_prompt import PROMPT, SIZES, forget_pages, manager_without_tiers, world_with_prompt_below
from tests.managed_world import FULL, MLA, Below, Pages, World, model_of


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
