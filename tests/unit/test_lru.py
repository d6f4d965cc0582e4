"""LRU against an OrderedDict that knows nothing of it."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvariantError, UsageError
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Hint
from kvtier.policies.lru import LRU
from kvtier.policies.snapshot import SnapshotFormat

HANDLES = st.lists(st.integers(0, 12), unique=True, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(list(Access)), HANDLES, st.sampled_from([0, 4096, 2**32 - 1])),
        st.tuples(st.sampled_from(["evict", "forget"]), HANDLES, st.just(0)),
    ),
    max_size=40,
)


def model_touch(model: "OrderedDict[int, int]", access: Access, handles: list[int], size_class: int) -> None:
    for handle in handles:
        if access in (Access.FILL, Access.MOVED):
            model[handle] = size_class
        if handle in model:
            model.move_to_end(handle)


def model_candidates(model: "OrderedDict[int, int]", count: int, pinned: set[int], size_class: int | None) -> list[int]:
    eligible = [h for h, held in model.items() if h not in pinned and size_class in (None, held)]
    return eligible[:count] if len(eligible) >= count else []


@given(STEPS, st.sets(st.integers(0, 12), max_size=4))
def test_it_orders_like_an_ordered_dict(steps: list[tuple[object, list[int], int]], pinned: set[int]) -> None:
    """The wrong block leaves."""
    policy, model = LRU(8), OrderedDict()
    for verb, handles, size_class in steps:
        if isinstance(verb, Access):
            policy.touch(handles, verb, size_class)
            model_touch(model, verb, handles, size_class)
        elif verb == "forget":
            policy.forget(handles)
            for handle in handles:
                model.pop(handle, None)
        else:
            residents = [handle for handle in handles if handle in model]
            policy.evict(residents)
            for handle in residents:
                del model[handle]
        assert policy.check() == []
        assert len(policy) == len(model)
        for count in range(5):
            for wanted in (None, 0, 4096):
                chosen = policy.candidates(count, pinned, wanted, incoming=3)
                assert chosen == model_candidates(model, count, pinned, wanted)
    restored = LRU(8)
    restored.touch([11, 1], Access.FILL, 7)
    restored.restore(policy.snapshot())
    assert restored.check() == []
    assert restored.candidates(len(model)) == list(model)
    for size_class in set(model.values()):
        alike = [handle for handle, held in model.items() if held == size_class]
        assert restored.candidates(len(alike), size_class=size_class) == alike


def test_the_deepest_block_leaves_first() -> None:
    """A prefix loses its head while its tail stays, which nobody can use any more."""
    policy = LRU(8)
    policy.touch([1, 2, 3], Access.FILL)
    policy.touch([3, 2, 1], Access.RELEASE)
    assert policy.candidates(2) == [3, 2]


def test_only_a_fill_sets_the_size_class() -> None:
    """A reuse, which does not know the size, makes a block of another class."""
    policy = LRU(8)
    policy.touch([5], Access.FILL, 4096)
    policy.touch([5, 6], Access.REUSE)
    assert policy.candidates(1, size_class=4096) == [5]
    assert len(policy) == 1


def test_misuse_is_an_error() -> None:
    """A handle that is not resident is evicted in silence, and the directory and the policy part."""
    policy = LRU(8)
    with pytest.raises(InvariantError):
        policy.evict([4])
    with pytest.raises(InvariantError):
        policy.touch([4], Access.FILL, 2**32)
    assert len(policy) == 0


def test_a_snapshot_that_cannot_be_is_refused() -> None:
    """A snapshot whose sum is right but whose content is not links one handle twice."""
    policy = LRU(8)
    policy.touch([1, 2], Access.FILL)
    good = policy.snapshot()
    assert good[24:32] == b"\1\0\0\0\2\0\0\0"
    for columns, message in [
        ([[], [], [1, 1], [0, 0]], "twice"),
        ([[1], [], [1], [0, 0]], "twice"),
        ([[], [], [1, 2**31], [0, 0]], "range"),
        ([[3], [], [1, 2], [0, 0]], "size"),
    ]:
        state = SnapshotFormat("lru", b"KVTLRU\x00\x03", head="", columns=4).pack((), columns)
        with pytest.raises(ValueError, match=message):
            policy.restore(state)
    assert policy.snapshot() == good


def test_the_registry_makes_one() -> None:
    """`policy: lru` in the YAML finds nothing."""
    assert len(POLICIES.get("lru")(8)) == 0
    with pytest.raises(KeyError, match="'lru'"):
        POLICIES.get("lru2")


def test_what_has_ended_leaves_next() -> None:
    """A session that is over would keep its blocks as long as one that goes on, or leave from its shallow end."""
    policy = LRU(8)
    policy.touch([9, 8, 3, 2, 1], Access.FILL)
    assert policy.hint([3, 2, 1, 77], Hint(ends=True)) == 3
    assert policy.hint([9], Hint(returns_in=5)) == 0
    policy.hint([8], Hint(ends=True, shared=True))
    assert policy.candidates(5) == [3, 2, 1, 8, 9]
    policy.touch([2], Access.REUSE)
    assert policy.candidates(5) == [3, 1, 8, 9, 2]
    assert policy.candidates(2, {3}) == [1, 8]
    policy.hint([9], Hint(ends=True))  # told later: it stays longer, for hints may be wrong
    assert policy.candidates(5) == [3, 1, 9, 8, 2]
    again = LRU(8)
    again.restore(policy.snapshot())
    assert again.candidates(5) == [3, 1, 9, 8, 2]
    again.touch([3], Access.RELEASE)
    assert again.candidates(5) == [1, 9, 8, 2, 3]
    assert again.check() == []


@pytest.mark.parametrize(
    "wrong", [{}, {"ends": True, "returns_in": 3}, {"returns_in": -1}, {"returns_in": 1, "shared": True}]
)
def test_a_hint_says_one_thing(wrong: dict[str, int]) -> None:
    """A hint that says nothing, or two things, would be taken for one of them."""
    with pytest.raises(UsageError, match="a hint says"):
        Hint(**wrong)
