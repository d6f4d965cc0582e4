"""BlockNames: which block holds which content."""

import pytest

from kvtier.allocator.block_names import GROUPS_MAX, BlockNames
from kvtier.errors import UsageError
from kvtier.events import BlockRemoved, BlocksCleared


def names_of(groups=1, events=True, **named):
    """Names of blocks 1 .. 7 of group 0, by keyword: `a=1` names block 1 `a`."""
    names = BlockNames(8, groups, events)
    names.add(0, list(named.values()), [name.encode() for name in named])
    return names


@pytest.mark.parametrize("groups", [0, GROUPS_MAX + 1, -1])
def test_groups_that_a_byte_cannot_tell_apart_are_refused(groups):
    """Two groups find each other's blocks."""
    with pytest.raises(UsageError, match=f"1 to {GROUPS_MAX}"):
        BlockNames(4, groups, False)


def test_groups_do_not_find_each_others_blocks():
    """A block of one layer's KV is read as another's."""
    names = names_of(groups=2, a=1)
    names.add(1, [2], [b"a"])
    assert (names.finder(0)(b"a"), names.finder(1)(b"a")) == (1, 2)
    names.forget(1)
    assert (names.finder(0)(b"a"), names.finder(1)(b"a")) == (None, 2)
    assert names.take_events() == [BlockRemoved(0, b"a")]
    assert names.check() == []


def test_of_duplicates_the_first_named_is_found_then_the_next():
    """Requests with equal content get blocks in another order than vLLM's, or none though one is there."""
    names = names_of(a=5)
    find = names.finder(0)
    for block in (3, 6, 1):
        names.add(0, [block], [b"a"])
    assert find(b"a") == 5
    names.forget(6)
    assert find(b"a") == 5
    names.forget(5)
    assert find(b"a") == 3
    names.add(0, [5], [b"a"])
    names.forget(3)
    assert find(b"a") == 1
    names.forget(1)
    names.forget(5)
    assert find(b"a") is None
    assert names.check() == []
    assert names.take_events() == [BlockRemoved(0, b"a")] * 5


def test_forgetting_a_block_without_a_name_is_nothing():
    """Taking a nameless block tells of a removal that never was."""
    names = names_of(a=1)
    names.forget(2)
    names.forget(0)
    assert names.take_events() == []
    assert names.finder(0)(b"a") == 1


def test_a_prefix_inside_a_block_is_a_further_name():
    """A prompt that ends inside a block cannot be resumed there, or takes the full block's name away."""
    names = names_of(full=1)
    assert names.add_inner(0, 1, b"part", 2)
    assert not names.add_inner(0, 1, b"part", 2)
    assert not names.add_inner(0, 1, b"full", 2)
    find = names.finder(0)
    assert (find(b"part"), find(b"full"), names.first[1]) == (1, 1, b"full")
    names.forget(1)
    assert (find(b"part"), find(b"full")) == (None, None)
    assert names.take_events() == [BlockRemoved(0, b"full"), BlockRemoved(0, b"part")]
    assert names.check() == []


def test_the_full_block_replaces_the_name_of_its_part():
    """A block is found by a prefix that its later content has overwritten."""
    names = names_of()
    assert names.add_inner(0, 1, b"two", 2)
    assert names.add_inner(0, 1, b"three", 3)
    assert names.finder(0)(b"two") is None
    assert names.finder(0)(b"three") == 1
    names.add(0, [1], [b"full"])
    assert names.finder(0)(b"three") is None
    assert names.finder(0)(b"full") == 1
    assert names.take_events() == [BlockRemoved(0, b"two"), BlockRemoved(0, b"three")]
    assert names.check() == []


def test_an_inner_name_may_be_a_duplicate():
    """Two prompts that end at the same token inside their blocks break the index."""
    names = names_of()
    assert names.add_inner(0, 1, b"part", 2)
    assert names.add_inner(0, 2, b"part", 2)
    assert not names.add_inner(0, 2, b"part", 2)
    assert names.finder(0)(b"part") == 1
    names.forget(1)
    assert names.finder(0)(b"part") == 2
    assert names.check() == []


def test_a_move_takes_all_names_along_and_tells_nobody():
    """The state that a running request leaves behind can no longer be hit, or is announced as removed."""
    names = names_of(full=1)
    names.add_inner(0, 1, b"part", 2)
    names.move(1, 4)
    find = names.finder(0)
    assert (find(b"full"), find(b"part"), names.first[1], names.first[4]) == (4, 4, None, b"full")
    assert names.take_events() == []
    names.move(1, 5)
    assert names.first[5] is None
    names.forget(4)
    assert (find(b"full"), find(b"part")) == (None, None)
    assert names.check() == []


def test_a_moved_inner_name_is_still_replaced_by_a_longer_one():
    """A state is found by a prefix that is shorter than what it holds."""
    names = names_of(groups=2)
    names.add_inner(1, 1, b"two", 2)
    names.move(1, 4)
    assert names.add_inner(1, 4, b"three", 3)
    assert (names.finder(1)(b"two"), names.finder(1)(b"three")) == (None, 4)
    assert names.take_events() == [BlockRemoved(1, b"two")]


def test_a_moved_duplicate_is_found_last():
    """Moving a block changes which of several duplicates is found."""
    names = names_of(a=1)
    names.add(0, [2], [b"a"])
    names.move(1, 4)
    assert names.finder(0)(b"a") == 2
    names.forget(2)
    assert names.finder(0)(b"a") == 4
    assert names.check() == []


def test_clear_empties_the_finders_that_were_given_away():
    """After new weights a group still finds the old ones' blocks."""
    names = names_of(a=1, b=2)
    names.add(0, [3], [b"a"])
    names.add_inner(0, 4, b"part", 2)
    find = names.finder(0)
    names.clear()
    assert [find(name) for name in (b"a", b"b", b"part")] == [None] * 3
    assert names.first == [None] * 8
    assert names.take_events() == [BlocksCleared()]
    assert names.check() == []
    names.add(0, [5], [b"a"])
    assert find(b"a") == 5


def test_the_version_grows_when_a_name_goes_or_moves():
    """A hit that is gone is taken for one that is still there."""
    names = names_of(a=1, b=2)
    seen = [names.version]
    for change in (lambda: names.forget(1), lambda: names.move(2, 3), names.clear):
        change()
        seen.append(names.version)
    assert seen == sorted(set(seen))


def test_events_come_once_and_in_order():
    """Another's copy of the index differs from the index."""
    names = names_of(a=1, b=2)
    names.forget(2)
    names.forget(1)
    names.clear()
    assert names.take_events() == [BlockRemoved(0, b"b"), BlockRemoved(0, b"a"), BlocksCleared()]
    assert names.take_events() == []


def test_without_events_nothing_is_kept():
    """A manager that nobody listens to grows for ever."""
    names = names_of(events=False, a=1)
    names.forget(1)
    names.clear()
    assert names.events is None
    assert names.take_events() == []


def damage_first(names):
    names.first[1] = None


def damage_index(names):
    names._index[0][b"ghost"] = 3


def damage_twins(names):
    names._twins[0].clear()


def damage_more(names):
    names._more[7] = [b"more"]


def damage_group(names):
    names._index = names._index[::-1]


def damage_hidden(names):
    names._twins[0][b"hidden"] = {6: None}


@pytest.mark.parametrize("damage", [damage_first, damage_index, damage_twins, damage_more, damage_group, damage_hidden])
def test_check_finds_what_is_damaged(damage):
    """`check` passes whatever happens, and the tests that call it prove nothing."""
    names = names_of(groups=2, a=1, b=2)
    names.add(0, [3], [b"a"])
    names.add_inner(0, 2, b"part", 2)
    assert names.check() == []
    damage(names)
    assert names.check()
