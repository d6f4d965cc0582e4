"""BlockPool: who is in use, and who is reused next."""

import random

import pytest

from kvtier.allocator.block_pool import BlockPool
from kvtier.errors import InvariantError, KvtierError, UsageError
from tests.manager_state import remembered


def pool_of(blocks_free, named=()):
    """A pool of so many free blocks: first those without a name, the last one first, then those of `named`."""
    pool = BlockPool(blocks_free + 1)
    blocks = pool.take(blocks_free)
    pool.names.add(0, named, [bytes([block]) for block in named])
    pool.free([block for block in blocks[::-1] if block not in named])
    pool.free(named)
    return pool


@pytest.mark.parametrize("blocks_total", [0, 1, -3, True, 9.0, "9", None])
def test_a_pool_that_holds_nothing_is_refused(blocks_total):
    """An engine starts with a pool from which nothing can ever be taken."""
    with pytest.raises(UsageError, match="give at least 2"):
        BlockPool(blocks_total)


def test_new_blocks_are_taken_in_order_and_the_null_block_never():
    """Two managers that do the same have different block tables, or somebody writes into the null block."""
    pool = BlockPool(6)
    assert pool.free_blocks() == [1, 2, 3, 4, 5]
    assert pool.take(2) == [1, 2]
    assert pool.take(0) == []
    assert pool.take(3) == [3, 4, 5]
    assert pool.blocks_free == 0
    assert pool.check() == []


def test_named_blocks_join_the_tail_in_the_order_given():
    """What was used last is reused first, so that prefixes are lost early."""
    pool = pool_of(6, named=[3, 1])
    assert pool.free_blocks() == [6, 5, 4, 2, 3, 1]
    blocks = pool.take(4)
    assert blocks == [6, 5, 4, 2]
    pool.names.add(0, [5, 2], [b"five", b"two"])
    pool.free([2, 5])
    assert pool.free_blocks() == [3, 1, 2, 5]


def test_nameless_blocks_join_the_head_in_the_order_given():
    """Blocks that nobody can hit are kept while those with content are reused."""
    pool = pool_of(5, named=[1, 2])
    blocks = pool.take(2)
    assert blocks == [5, 4]
    pool.free([4, 5])
    assert pool.free_blocks() == [4, 5, 3, 1, 2]


def test_a_batch_of_both_keeps_each_order():
    """Freeing a request whose last block is not full mixes up the order of the others."""
    pool = BlockPool(8)
    pool.take(7)
    pool.names.add(0, [2, 4, 6], [b"two", b"four", b"six"])
    pool.free([7, 6, 5, 4, 3, 2])
    assert pool.free_blocks() == [7, 5, 3, 6, 4, 2]
    assert pool.check() == []


def test_taking_forgets_what_the_block_held():
    """A request's new block can be hit by its old content."""
    pool = pool_of(2, named=[1, 2])
    find = pool.names.finder(0)
    assert find(b"\1") == 1
    assert pool.take(1) == [1]
    assert find(b"\1") is None
    assert find(b"\2") == 2
    assert pool.names.first == [None, None, b"\2"]


@pytest.mark.parametrize("block", [1, 2, 3])
def test_touch_takes_from_the_head_the_middle_and_the_tail(block):
    """A hit block stays among the free ones, or takes its neighbours with it."""
    pool = pool_of(3, named=[1, 2, 3])
    pool.touch([block])
    others = [other for other in (1, 2, 3) if other != block]
    assert pool.free_blocks() == others
    assert (pool.refs[block], pool.blocks_free) == (1, 2)
    assert pool.check() == []
    pool.touch([block])
    assert (pool.refs[block], pool.blocks_free) == (2, 2)
    pool.free([block])
    assert pool.free_blocks() == others
    pool.free([block])
    assert pool.free_blocks() == [*others, block]


def test_a_block_is_free_when_the_last_one_lets_go():
    """A block that is still read is given to somebody else."""
    pool = pool_of(2, named=[1])
    pool.touch([1, 1])
    pool.free([1])
    assert pool.take(1) == [2]
    with pytest.raises(InvariantError):
        pool.take(1)
    pool.free([1])
    assert pool.take(1) == [1]


def test_the_null_block_may_stand_in_any_batch():
    """Tables with gaps lose count of the free blocks."""
    pool = pool_of(3, named=[2])
    pool.touch([0, 2, 0])
    assert pool.blocks_free == 2
    pool.free([0, 2, 0, 0])
    assert pool.free_blocks() == [3, 1, 2]
    assert pool.check() == []


@pytest.mark.parametrize("count", [4, -1, 10**9])
def test_what_cannot_be_taken_changes_nothing(count):
    """Half of a request's blocks are lost when there are too few."""
    pool = pool_of(3, named=[1])
    before = remembered(pool)
    with pytest.raises(KvtierError, match="3 are free"):
        pool.take(count)
    assert remembered(pool) == before


def test_evicted_blocks_keep_their_place_and_their_users():
    """Withdrawing a damaged block's name takes it away from who has it, or reorders the free ones."""
    pool = pool_of(3, named=[1, 2, 3])
    pool.touch([2])
    pool.evict([2, 3, 3])
    assert pool.names.first == [None, b"\1", None, None]
    assert pool.refs == [0, 0, 1, 0]
    assert pool.free_blocks() == [1, 3]


def test_reset_is_refused_while_a_block_is_in_use():
    """Old weights' prefixes survive, or a running request's blocks lose their names under it."""
    pool = pool_of(3, named=[1, 2])
    pool.touch([1])
    before = remembered(pool)
    assert not pool.reset()
    assert remembered(pool) == before
    pool.free([1])
    assert pool.reset()
    assert pool.names.first == [None] * 4
    assert pool.names.finder(0)(b"\1") is None
    assert pool.free_blocks() == [3, 2, 1]
    assert pool.check() == []


def test_usage_is_the_share_in_use():
    """Operators see a full pool as empty."""
    pool = BlockPool(5)
    assert pool.usage == 0.0
    pool.take(1)
    assert pool.usage == 0.25
    pool.take(3)
    assert pool.usage == 1.0


def test_random_verbs_agree_with_a_plain_list():
    """Some order of verbs loses a block, or breaks the order of reuse."""
    rng = random.Random(5)
    pool, free, refs = BlockPool(12), list(range(1, 12)), dict.fromkeys(range(1, 12), 0)
    names = {}
    for turn in range(1500):
        verb = rng.choice(["take", "touch", "free", "name", "evict"])
        held = [block for block in refs if refs[block]]
        if verb == "take":
            count = rng.randint(0, min(3, len(free)))
            taken, free = free[:count], free[count:]
            assert pool.take(count) == taken
            for block in taken:
                refs[block] = 1
                names.pop(block, None)
        elif verb == "touch":
            blocks = rng.sample(list(refs), 2)
            pool.touch(blocks)
            free = [block for block in free if block not in blocks]
            for block in blocks:
                refs[block] += 1
        elif verb == "free" and held:
            blocks = rng.sample(held, min(len(held), 3))
            pool.free(blocks)
            gone = [block for block in blocks if refs[block] == 1]
            free = [b for b in gone if b not in names] + free + [b for b in gone if b in names]
            for block in blocks:
                refs[block] -= 1
        elif verb == "name" and held:
            block = rng.choice(held)
            names[block] = b"%d" % rng.choice([turn, 0])
            pool.names.add(0, [block], [names[block]])
        elif verb == "evict":
            names.pop(block := rng.randint(1, 11), None)
            pool.evict([block])
        assert pool.free_blocks() == free
        assert pool.refs[1:] == list(refs.values())
        assert pool.names.first[1:] == [names.get(block) for block in refs]
        assert pool.check() == []


def damage_next(pool):
    pool._next[1] = 3


def damage_count(pool):
    pool.blocks_free -= 1


def damage_refs(pool):
    pool.refs[4] = -1


def damage_taken(pool):
    pool.refs[1] = 1


def damage_null(pool):
    pool.names.first[0] = b"null"


def damage_loop(pool):
    pool._next[3] = 1


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (damage_next, "two directions"),
        (damage_count, "counted as free"),
        (damage_refs, "block 4 has -1 references"),
        (damage_taken, "unused"),
        (damage_null, "null block has a name"),
        (damage_loop, "two directions"),
    ],
)
def test_check_finds_what_is_damaged(damage, text):
    """`check` passes whatever happens, and the tests that call it prove nothing."""
    pool = pool_of(4, named=[1, 2, 3])
    assert pool.check() == []
    damage(pool)
    assert any(text in finding for finding in pool.check())
