"""TieredPool: which block goes first when some of them also lie below."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtier.allocator.block_metrics import BlockMetrics
from kvtier.allocator.block_pool import BlockPool
from kvtier.allocator.tiered_pool import TieredPool
from kvtier.errors import InvariantError
from tests.manager_state import remembered


def name_of(block):
    return b"name of %d" % block


def pool_of(blocks_free, clean=(), nameless=(), **more):
    """Free blocks 1, 2, ... in this order, all named but `nameless`; those of `clean` lie below."""
    pool = TieredPool(blocks_free + 1, nameless_first=False, **more)
    blocks = pool.take(blocks_free)
    pool.dropped_dirty = 0
    named = [block for block in blocks if block not in nameless]
    pool.names.add(0, named, [name_of(block) for block in named])
    pool.free(blocks)
    for block in clean:
        pool.mark_clean(block, name_of(block))
    return pool


def taken(pool, count):
    """What is taken, having checked what is left."""
    blocks = pool.take(count)
    assert pool.check() == []
    return blocks


def test_a_new_pool_is_taken_in_order_and_loses_nothing():
    """A manager with tiers below has other block tables from its first request on."""
    pool = TieredPool(6)
    assert taken(pool, 3) == [1, 2, 3]
    assert pool.dropped_dirty == 0


def test_the_first_clean_block_in_order_is_reused():
    """What nobody copied is lost while copied blocks lie beside it."""
    pool = pool_of(6, clean=[3, 5])
    assert taken(pool, 1) == [3]
    assert taken(pool, 1) == [5]
    assert pool.free_blocks() == [1, 2, 4, 6]
    assert pool.dropped_dirty == 0


def test_a_block_without_a_name_needs_no_copy():
    """Blocks that nobody can hit stay while those with content are dropped."""
    pool = pool_of(5, clean=[4], nameless=[3])
    assert taken(pool, 2) == [3, 4]
    assert pool.dropped_dirty == 0


def test_without_a_clean_block_the_head_goes_and_is_counted():
    """Nothing can be allocated, or what was lost cannot be seen."""
    pool = pool_of(4)
    assert taken(pool, 2) == [1, 2]
    assert pool.dropped_dirty == 2
    assert pool.names.finder(0)(name_of(1)) is None


def test_clean_blocks_come_before_dirty_ones_within_one_take():
    """A batch that needs both takes a dirty block first, and loses it for nothing if the request is refused."""
    pool = pool_of(6, clean=[2, 5])
    assert taken(pool, 4) == [2, 5, 1, 3]
    assert pool.dropped_dirty == 2
    assert pool.free_blocks() == [4, 6]


def test_a_take_that_cannot_be_served_changes_nothing():
    """Blocks are moved in the order, or counted as dropped, though nobody got them."""
    pool = pool_of(3, clean=[2])
    before = remembered(pool)
    for count in (4, -1):
        with pytest.raises(InvariantError, match="cannot take"):
            pool.take(count)
    assert remembered(pool) == before
    assert taken(pool, 0) == []
    assert remembered(pool) == before


def test_the_mark_goes_with_the_name():
    """A block that has other content by now is taken for copied, and its content is lost without being counted."""
    pool = pool_of(3, clean=[1, 2])
    assert pool.is_clean(1)
    name = pool.names.first[1]
    assert taken(pool, 1) == [1]
    assert not pool.is_clean(1)
    pool.names.add(0, [1], [name])  # the same content again: nobody has said that it lies below still
    assert not pool.is_clean(1)
    pool.evict([2])
    assert not pool.is_clean(2)
    pool.names.add(0, [2], [b"other"])
    assert not pool.is_clean(2)


def test_a_mark_for_another_name_is_none():
    """A copy that ended late marks the block's next content."""
    pool = pool_of(3, nameless=[3])
    pool.mark_clean(1, b"what it held before")
    pool.mark_clean(3, name_of(3))
    assert not pool.is_clean(1)
    assert not pool.is_clean(3)
    pool.names.add(0, [3], [name_of(3)])
    assert not pool.is_clean(3)


def test_a_hit_keeps_the_mark():
    """Each hit makes the tiers copy the block again."""
    pool = pool_of(3, clean=[2])
    pool.touch([2])
    pool.free([2])
    assert pool.is_clean(2)
    assert pool.free_blocks() == [1, 3, 2]


def test_reset_forgets_the_marks():
    """A block is taken for copied although its content was forgotten."""
    pool = pool_of(3, clean=[2])
    assert pool.reset()
    assert not pool.is_clean(2)
    pool.names.add(0, [2], [name_of(2)])
    assert not pool.is_clean(2)


def test_reset_is_refused_and_keeps_the_marks_while_a_block_is_lent():
    """The bytes under a copy are given to somebody else."""
    pool = pool_of(3, clean=[2])
    pool.lend([1])
    assert not pool.reset()
    assert pool.is_clean(2)
    pool.give_back([1])
    assert pool.reset()


def test_dirty_are_the_next_to_be_lost_in_order():
    """Blocks are copied that are safe, or too late, or of which nobody knows where they end."""
    pool = pool_of(6, clean=[2], nameless=[3, 6])
    pool.names.add_inner(0, 3, b"half of it", 2)
    assert pool.dirty(0) == []
    assert pool.dirty(3) == [1]
    assert pool.dirty(100) == [1, 4, 5]


def test_a_block_named_for_its_first_part_is_dropped_and_counted():
    """A block that cannot be copied is never reused."""
    pool = pool_of(2, nameless=[1, 2])
    pool.names.add_inner(0, 1, b"half of it", 2)
    assert taken(pool, 2) == [2, 1]
    assert pool.dropped_dirty == 1


def test_lent_blocks_are_not_taken_and_come_back_to_the_head_in_order():
    """A block is overwritten while it is copied, or the order of reuse is lost with each copy."""
    pool = pool_of(5)
    pool.lend([1, 2, 3])
    assert pool.blocks_free == 2
    assert pool.check() == []
    assert taken(pool, 1) == [4]
    with pytest.raises(InvariantError):
        pool.take(2)
    pool.give_back([1, 2, 3])
    assert pool.free_blocks() == [1, 2, 3, 5]
    assert pool.check() == []


def test_copying_in_turns_leaves_the_order():
    """When all has been copied, what was used last is reused first."""
    pool = pool_of(7)
    while dirty := pool.dirty(7)[:3]:
        pool.lend(dirty)
        for block in dirty:
            pool.mark_clean(block, name_of(block))
        pool.give_back(dirty)
    assert pool.free_blocks() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("safe", [{"clean": [1, 2]}, {"nameless": [1, 2]}])
def test_what_was_copied_comes_behind_what_was_before_it(safe):
    """The blocks that were used last are reused first, and those at the head never: a part of the pool lies idle."""
    pool = pool_of(5, **safe)
    pool.lend([3, 4])
    pool.give_back([3, 4])
    assert pool.free_blocks() == [1, 2, 3, 4, 5]


def test_a_lent_block_may_be_hit_and_stays_with_who_hit_it():
    """A hit during a copy is lost, or gives its block away when the copy ends."""
    pool = pool_of(4)
    pool.lend([1, 2])
    pool.touch([2, 3])
    pool.give_back([1, 2])
    assert pool.free_blocks() == [1, 4]
    assert pool.blocks_free == 2
    assert pool.refs[1:] == [0, 1, 1, 0]
    assert pool.check() == []
    pool.free([3, 2])
    assert pool.free_blocks() == [1, 4, 3, 2]


def test_a_hit_that_ends_before_the_copy_does_leaves_the_block_lent():
    """The block is given to somebody else under the copy."""
    pool = pool_of(3)
    pool.lend([1])
    pool.touch([1])
    pool.free([1])
    assert pool.free_blocks() == [2, 3]
    pool.give_back([1])
    assert sorted(pool.free_blocks()) == [1, 2, 3]
    assert pool.check() == []


def test_metrics_are_not_told_of_copies():
    """Each copy counts as a reuse, and the gaps between reuses mean nothing."""
    now = iter(range(1000))
    metrics = BlockMetrics(lambda: float(next(now)), 1.0)
    pool = pool_of(3, metrics=metrics)
    pool.lend([1, 2])
    pool.give_back([1, 2])
    pool.touch([2])
    pool.evict([1, 2])
    assert [len(life.reuse_gaps_s) for life in metrics.take()] == [0, 0]
    pool.lend([1])
    pool.touch([3])
    pool.touch([3])
    pool.evict([3])
    assert [len(life.reuse_gaps_s) for life in metrics.take()] == [1], "metrics are gone after a copy"


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "free", "touch", "name", "twin", "reset", "lend"]), st.integers(0, 20)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, events=st.booleans())
def test_it_decides_as_the_plain_pool_while_nothing_is_clean(steps, events):
    """With tiers that keep nothing an engine decides otherwise than with none, and no longer as vLLM."""
    plain, tiered = BlockPool(9, 2, events), TieredPool(9, 2, events)
    held = []
    for number, (what, pick) in enumerate(steps):
        if what == "take":
            count = min(pick % 4, plain.blocks_free)
            blocks = plain.take(count)
            assert tiered.take(count) == blocks
            held += blocks
        elif what in ("free", "name", "twin", "touch") and held:
            block = held[pick % len(held)]
            if what == "free":
                held.remove(block)
                for pool in (plain, tiered):
                    pool.free([block])
            elif what == "touch":
                held.append(block)
                for pool in (plain, tiered):
                    pool.touch([block])
            elif plain.names.first[block] is None:
                for pool in (plain, tiered):
                    pool.names.add(pick % 2, [block], [b"twin" if what == "twin" else b"%d" % number])
        elif what == "touch" and plain.blocks_free:
            block = plain.free_blocks()[pick % plain.blocks_free]
            held.append(block)
            for pool in (plain, tiered):
                pool.touch([block])
        elif what == "reset":
            assert plain.reset() == tiered.reset()
        elif what == "lend":  # a copy that is refused
            blocks = plain.free_blocks()[: pick % 4]
            tiered.lend(blocks)
            tiered.give_back(blocks)
        assert tiered.free_blocks() == plain.free_blocks()
        assert (tiered.refs, tiered.names.first) == (plain.refs, plain.names.first)
        assert tiered.names.take_events() == plain.names.take_events()
        assert tiered.check() == []


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=60))
def test_a_list_of_free_blocks_says_the_same(steps):
    """A rare order of copies, hits and evictions reuses a block out of turn, or drops one for nothing."""
    pool, order = TieredPool(9), list(range(1, 9))
    held, lent, clean = [], [], {}

    def safe(block):
        return pool.names.first[block] is None or clean.get(block) == pool.names.first[block]

    for number, (what, pick) in enumerate(steps):
        free = [block for block in order if block not in lent]
        if what == 0 and free:
            count = 1 + pick % len(free)
            expected = [block for block in free if safe(block)][:count]
            dirty = [block for block in free if block not in expected][: count - len(expected)]
            before = pool.dropped_dirty
            assert pool.take(count) == expected + dirty
            assert pool.dropped_dirty == before + len(dirty)
            held += expected + dirty
            for block in expected + dirty:
                order.remove(block)
                clean.pop(block, None)
        elif what == 1 and held:
            block = held.pop(pick % len(held))
            pool.free([block])
            if block not in held:
                order.insert(0 if pool.names.first[block] is None else len(order), block)
        elif what == 2 and held:
            block = held[pick % len(held)]
            if pool.names.first[block] is None:
                pool.names.add(0, [block], [b"%d" % number])
        elif what == 3 and order:
            block = order.pop(pick % len(order))
            pool.touch([block])
            held.append(block)
        elif what == 4 and free and not lent:
            lent = free[: 1 + pick % len(free)]
            pool.lend(lent)
        elif what == 5 and lent:
            for block in lent[pick % 2 :]:
                pool.mark_clean(block, pool.names.first[block])
                clean[block] = pool.names.first[block]
            pool.give_back(lent)
            lent = []
        elif what == 6:
            pool.evict([1 + pick % 8])
            clean.pop(1 + pick % 8, None)
        assert pool.check() == []
        assert pool.free_blocks() == [block for block in order if block not in lent]
        assert pool.blocks_free == len(pool.free_blocks())
        named = [block for block in range(1, 9) if pool.names.first[block] is not None]
        assert [block for block in range(1, 9) if pool.is_clean(block)] == [block for block in named if safe(block)]
