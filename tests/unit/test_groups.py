"""The kinds of attention: which prefix each can serve, which blocks it names, and when it lets go of them."""

import pytest

from kvtier.cache.groups import GroupManager, manager_class, register_group
from kvtier.cache.groups.full import FullGroup
from kvtier.cache.groups.mamba import AlignedMambaGroup, MambaGroup
from kvtier.cache.groups.window import SlidingWindowGroup
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Mamba, SlidingWindow, Spec
from kvtier.errors import UsageError
from tests.manager_state import chunked, cross, full, mamba, manager_of, remembered, serve, window

TOKENS = list(range(100, 140))


def hit_of(manager, tokens):
    return manager.get_computed_blocks(manager.request("looker", tokens))


def named(manager, table):
    """Positions of a table whose blocks can be found."""
    return [i for i, block in enumerate(table) if block and manager.pool.names.first[block]]


def step(manager, request, tokens, **more):
    """A step of a request that has begun or begins."""
    hit = None if request.computed_tokens else manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, tokens, hit, **more)
    request.computed_tokens += tokens + (hit.tokens if hit else 0)
    manager.begin_step()
    return new


# ---------------------------------------------------------------- the table of kinds


def test_each_spec_has_its_manager():
    """A model's layers are served by the rules of another kind of attention."""
    assert manager_class(full().spec) is FullGroup
    assert manager_class(window(5).spec) is SlidingWindowGroup
    assert manager_class(mamba().spec) is AlignedMambaGroup
    assert manager_class(mamba(mode="all").spec) is MambaGroup


def test_a_derived_spec_has_its_parents_manager_until_it_gets_its_own():
    """A spec of one's own cannot be served, or replaces the built-in one for all."""

    class Sparse(FullAttention):
        pass

    class SparseGroup(FullGroup):
        pass

    spec = Sparse(block_tokens=4, kv_heads=1, head_dim=1, dtype="float32")
    assert manager_class(spec) is FullGroup
    register_group(Sparse, SparseGroup)
    assert manager_class(spec) is SparseGroup
    assert manager_class(full().spec) is FullGroup
    with pytest.raises(UsageError, match="has a manager already, SparseGroup"):
        register_group(Sparse, FullGroup)


@pytest.mark.parametrize(
    ("spec", "manager", "text"),
    [
        (FullAttention, FullGroup, "has a manager already, FullGroup"),
        (SlidingWindow, FullGroup, "derive a spec of your own"),
        (int, FullGroup, "is no spec"),
        ("full", FullGroup, "is no spec"),
        (full().spec, FullGroup, "is no spec"),
        (Spec, int, "is no manager"),
        (Spec, "x", "is no manager"),
        (Spec, None, "is no manager"),
    ],
)
def test_what_cannot_be_registered_is_refused(spec, manager, text):
    """A typing error changes how all models are served."""
    with pytest.raises(UsageError, match=text):
        register_group(spec, manager)


def test_a_spec_without_a_manager_says_what_to_do():
    """A new kind of layer gives a traceback."""

    class Odd(Spec):
        kind = "odd"

    with pytest.raises(UsageError, match="call register_group"):
        manager_class(Odd(block_tokens=4))
    assert issubclass(FullGroup, GroupManager)


# ---------------------------------------------------------------- full attention


def test_full_attention_serves_up_to_the_first_gap():
    """A request begins behind a block that nobody has."""
    manager = manager_of(blocks_total=20)
    serve(manager, "r", TOKENS[:20])
    manager.evict_blocks([3])
    assert hit_of(manager, TOKENS[:20]).groups == ([1, 2],)


def test_eagle_drops_one_block_or_what_there_is():
    """The draft model begins without a hidden state."""
    manager = manager_of(full(eagle=True), blocks_total=20)
    serve(manager, "r", TOKENS[:5])
    assert hit_of(manager, TOKENS[:9]).tokens == 0
    serve(manager, "s", TOKENS[:9])
    assert hit_of(manager, TOKENS[:9]).tokens == 4


def test_only_the_groups_that_say_so_drop_a_block():
    """The target's layers compute again what only the draft's must; or the draft's do not."""
    for groups, expected in (((full(), window(5, eagle=True)), 8), ((full(eagle=True), window(5)), 8)):
        manager = manager_of(*groups, blocks_total=40, eagle=True)
        serve(manager, "r", TOKENS[:13])
        assert hit_of(manager, TOKENS[:13]).tokens == expected


# ---------------------------------------------------------------- sliding windows


@pytest.mark.parametrize(("tokens", "needed"), [(2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_needs_the_blocks_it_touches(tokens, needed):
    """A hit lacks the first tokens of the window; or is refused for want of blocks that nobody reads."""
    manager = manager_of(window(tokens), blocks_total=20)
    _, _, ((*table,),) = serve(manager, "r", TOKENS[:20])
    manager.evict_blocks(table[: 5 - needed])
    hit = hit_of(manager, TOKENS[:21])
    assert (hit.tokens, hit.groups) == (20, ([0] * (5 - needed) + table[5 - needed :],))
    manager.evict_blocks([table[5 - needed]])
    assert hit_of(manager, TOKENS[:21]).tokens == 0


def test_what_begins_the_prompt_serves_however_short():
    """A prompt shorter than the window is never a hit."""
    manager = manager_of(window(30), blocks_total=20)
    serve(manager, "r", TOKENS[:9])
    assert hit_of(manager, TOKENS).tokens == 8


def test_a_window_of_one_token_keeps_nothing():
    """A token that looks at itself only holds every block before it."""
    manager = manager_of(window(1), blocks_total=30)
    request = manager.request("r", TOKENS[:9])
    step(manager, request, 8)
    step(manager, request, 1)
    assert manager.block_ids(request) == ([0, 0, 2],)


def test_a_window_lets_go_behind_itself_and_what_it_retains():
    """A running request holds blocks that it cannot read; or drafts that are computed again find none."""
    for retained, gone in ((0, 4), (4, 3), (8, 2)):
        manager = manager_of(window(5, retained_tokens=retained), blocks_total=20)
        request = manager.request("r", TOKENS[:24])
        step(manager, request, 20)
        step(manager, request, 4)
        (table,) = manager.block_ids(request)
        assert (table[:gone], all(table[gone:])) == ([0] * gone, True)


def test_beside_larger_blocks_a_window_names_what_a_hit_can_use():
    """Blocks from which no request can begin crowd out others' names; or those that one needs have none."""
    manager = manager_of(full(16), window(5), blocks_total=40)
    request, _, _ = serve(manager, "r", TOKENS[:40])
    assert named(manager, manager.block_ids(request)[1]) == [3, 7]


def test_retention_keeps_what_resuming_at_its_boundaries_needs():
    """A window group keeps every boundary though told to keep few; or loses the end of the prompt."""
    for retention, expected in ((None, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (16, [3, 7, 8]), (0, [8])):
        manager = manager_of(full(), window(5), blocks_total=40, retention_tokens=retention)
        request, _, _ = serve(manager, "r", TOKENS[:38])
        assert named(manager, manager.block_ids(request)[1]) == expected


def test_a_prefix_that_others_share_is_kept():
    """Many requests with one system prompt never find it in the window groups."""
    manager = manager_of(full(), window(5), blocks_total=60, retention_tokens=0)
    serve(manager, "first", TOKENS[:38])
    second = manager.request("second", [*TOKENS[:20], *range(18)])
    hit = manager.get_computed_blocks(second)
    assert (hit.tokens, hit.boundary_tokens) == (0, 20)
    second.shared_prefix_tokens = hit.boundary_tokens
    manager.allocate_slots(second, 38, hit)
    assert named(manager, manager.block_ids(second)[1]) == [4, 8]
    assert hit_of(manager, [*TOKENS[:20], 9, 9]).tokens == 20


# ---------------------------------------------------------------- chunked local attention


def test_chunks_before_the_current_one_are_served_without_being_there():
    """A long prompt's earlier chunks are looked for, though nobody reads them."""
    manager = manager_of(chunked(8), blocks_total=20)
    assert hit_of(manager, TOKENS[:7]).groups == ([],)
    assert hit_of(manager, TOKENS[:9]).groups == ([0, 0],)
    _, _, ((*table,),) = serve(manager, "r", TOKENS[:14])
    assert hit_of(manager, TOKENS[:14]).groups == ([0, 0, table[-2]],)


def test_chunks_are_let_go_when_the_next_begins():
    """A request of Llama 4 holds its whole prompt; or the current chunk is gone."""
    manager = manager_of(chunked(8), blocks_total=20)
    request = manager.request("r", TOKENS[:24])
    serve_steps = [(12, 0), (6, 2), (6, 4)]
    for tokens, gone in serve_steps:
        manager.allocate_slots(request, tokens)
        request.computed_tokens += tokens
        (table,) = manager.block_ids(request)
        assert (table[:gone], all(table[gone:])) == ([0] * gone, True)


# ---------------------------------------------------------------- recurrent states


def test_aligned_states_keep_the_one_before_and_the_one_that_runs():
    """A long prompt holds a state for each of its blocks; or the state that the step reads is gone."""
    manager = manager_of(mamba(), blocks_total=20)
    request = manager.request("r", TOKENS[:21])
    step(manager, request, 8)
    assert manager.block_ids(request) == ([0, 1],)
    step(manager, request, 8)
    assert manager.block_ids(request) == ([0, 1, 0, 2],)
    step(manager, request, 4)
    (table,) = manager.block_ids(request)
    assert table[:2] == [0, 0]
    assert table[3:] == [2, table[4]]
    assert hit_of(manager, TOKENS[:21]).groups == ([0, 0, 0, 0, table[4]],)


def test_states_of_drafts_move_along():
    """A draft's state is computed where the prompt's state stands."""
    manager = manager_of(mamba(drafts=2), blocks_total=20)
    request = manager.request("r", TOKENS[:21])
    step(manager, request, 8)
    assert manager.block_ids(request) == ([0, 1, 2, 3],)
    step(manager, request, 8)
    (table,) = manager.block_ids(request)
    assert len(table) == 6
    assert len({block for block in table if block}) == 4
    assert set(table[3:]) >= {2, 3}


def test_all_states_are_kept_for_others():
    """Mode `all` keeps as few states as mode `align`."""
    manager = manager_of(mamba(mode="all"), blocks_total=20)
    serve(manager, "r", TOKENS[:12])
    manager.begin_step()
    assert [hit_of(manager, TOKENS[:end]).tokens for end in (5, 9, 13)] == [4, 8, 12]


def test_retention_thins_out_states():
    """Prefixes are kept at each block though told to keep few; or none is kept at the prompt's end."""
    for retention, expected in ((None, [4, 8, 12, 16]), (8, [8, 16]), (0, [16])):
        manager = manager_of(full(), mamba(mode="all"), blocks_total=40, retention_tokens=retention)
        request, _, _ = serve(manager, "r", TOKENS[:17])
        manager.begin_step()
        manager.free(request)
        lengths = {hit_of(manager, TOKENS[:end]).tokens for end in range(2, 19)}
        assert sorted(lengths - {0}) == expected


def test_hits_end_inside_blocks_where_every_group_can():
    """Short prompts of a hybrid model with large blocks are never found."""
    manager = manager_of(full(8), mamba(8), blocks_total=20, hash_tokens=4)
    request = manager.request("r", TOKENS[:14])
    for tokens in (8, 4, 2):
        step(manager, request, tokens)
    hit = hit_of(manager, TOKENS[:14])
    assert hit.tokens == 12
    assert [len(blocks) for blocks in hit.groups] == [2, 2]
    coarse = manager_of(full(8), mamba(8), blocks_total=20, hash_tokens=8)
    request = coarse.request("r", TOKENS[:14])
    for tokens in (8, 6):
        step(coarse, request, tokens)
    assert hit_of(coarse, TOKENS[:14]).tokens == 8


def test_a_state_from_elsewhere_and_the_next_one_are_counted_both():
    """A load that comes with the first step fails in the middle when one block is free, instead of being refused."""
    manager = manager_of(mamba(), blocks_total=2)
    request = manager.request("r", TOKENS[:13])
    hit = manager.get_computed_blocks(request)
    before = remembered(manager)
    assert manager.allocate_slots(request, 1, hit, external_tokens=12) is None
    assert remembered(manager) == before


def test_a_block_that_this_step_computes_is_not_copied_from():
    """A request gets a copy of a block that is not written yet: wrong bytes."""
    manager = manager_of(full(8), mamba(8), blocks_total=30, hash_tokens=4, eagle=True)
    first = manager.request("first", TOKENS[:8])
    step(manager, first, 4)
    step(manager, first, 4)
    manager.copied(manager.take_copies())
    (block,), _ = manager.block_ids(first)
    manager.free(first)
    manager.evict_blocks([block])  # the KV of tokens 0 to 7; the state after token 3 remains
    second = manager.request("second", TOKENS[:12])
    manager.allocate_slots(second, 8, manager.get_computed_blocks(second))
    ((computed_now,), _) = manager.block_ids(second)
    third = manager.request("third", [*TOKENS[:8], *range(10)])
    hit = manager.get_computed_blocks(third)
    manager.allocate_slots(third, 4, hit)
    assert computed_now not in [source for source, _ in manager.take_copies()]


# ---------------------------------------------------------------- what does not go together


@pytest.mark.parametrize(
    ("groups", "more", "text"),
    [
        ((), {}, "give a list with a Group"),
        ((full(), cross(8)), {}, "make the manager with caching=False"),
        ((full(8), chunked(8)), {}, "give all groups the same block_tokens"),
        ((full(6), full(4)), {"hash_tokens": 3}, r"divides all block sizes, \[6, 4\]"),
        ((full(8),), {"hash_tokens": 4}, "with one group, hits end at its blocks of 8 tokens"),
        ((full(), window(5, block_tokens=6)), {"retention_tokens": 8}, "give a multiple of 12"),
        ((full(),), {"retention_tokens": 8}, "has no effect"),
        ((full(), chunked(8)), {"retention_tokens": 8}, "has no effect"),
    ],
)
def test_groups_that_cannot_be_served_together_are_refused(groups, more, text):
    """A model runs with rules that do not hold for one of its groups."""
    with pytest.raises(UsageError, match=text):
        KVCacheManager(groups, 20, tokens_max=64, **more)


def test_a_states_mode_decides_its_manager_only_for_its_own_class():
    """A recurrent layer of one's own is served as an aligned one."""

    class Own(Mamba):
        pass

    assert manager_class(Own(block_tokens=4, shapes=((1,),), dtypes=("float32",))) is MambaGroup


def test_a_block_that_grows_can_be_read_up_to_where_it_was_before_this_step():
    """A request waits for as long as another one decodes inside the block that its hit ends in."""
    manager = manager_of(full(16), mamba(16), blocks_total=40, hash_tokens=2)
    prompt = list(range(7))
    first = manager.request("first", prompt)
    for tokens in (6, 1):
        manager.begin_step()
        assert manager.allocate_slots(first, tokens) is not None
        first.computed_tokens += tokens
        manager.copied(manager.take_copies())
    for turn in range(3):
        manager.begin_step()
        first.append([50 + turn])
        assert manager.allocate_slots(first, 1) is not None
        first.computed_tokens += 1
        again = manager.request(f"again-{turn}", prompt)
        hit = manager.get_computed_blocks(again)
        assert hit.tokens == 6
        assert manager.allocate_slots(again, 1, hit) is not None
        manager.copied(manager.take_copies())
        manager.free(again)
        assert manager.check() == []
