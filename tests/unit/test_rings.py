"""Rings against plain lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.allocator.rings import INDEX_MAX, NOWHERE, Rings
from kvtier.errors import InvariantError

RINGS = (1, 2, 3)
INDEXES = st.lists(st.integers(0, 20), max_size=6)  # an index may come twice
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), INDEXES, st.sampled_from(RINGS), st.none() | st.sets(st.sampled_from(RINGS))),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("pop"), st.sampled_from(RINGS)),
    )
)


class Lists:
    """The same verbs on three lists; raises ValueError where rings must refuse."""

    def __init__(self) -> None:
        self.rings: dict[int, list[int]] = {ring: [] for ring in RINGS}

    def ring_of(self, index: int) -> int:
        return next((ring for ring, members in self.rings.items() if index in members), NOWHERE)

    def move(self, indexes: list[int], ring: int, sources: set[int] | None) -> None:
        for index in indexes:
            here = self.ring_of(index)
            if sources is None or here in sources:
                if here != NOWHERE:
                    self.rings[here].remove(index)
                self.rings[ring].append(index)

    def remove(self, index: int) -> None:
        if self.ring_of(index) == NOWHERE:
            raise ValueError
        self.rings[self.ring_of(index)].remove(index)

    def pop(self, ring: int) -> int | None:
        return self.rings[ring].pop(0) if self.rings[ring] else None


@given(STEPS, st.integers(0, 10))
def test_they_keep_the_order_of_lists(steps: list[tuple], room: int) -> None:
    """A handle lies in the wrong list, in two, or in none."""
    rings, model = Rings(len(RINGS), room), Lists()
    for verb, *arguments in steps:
        try:
            expected = getattr(model, verb)(*arguments)
        except ValueError:
            with pytest.raises(InvariantError):
                getattr(rings, verb)(*arguments)
        else:
            assert getattr(rings, verb)(*arguments) == expected
        assert {ring: list(rings.walk(ring)) for ring in RINGS} == model.rings
        assert {ring: rings.members(ring).tolist() for ring in RINGS} == model.rings
        assert {ring: list(rings.walk_back(ring))[::-1] for ring in RINGS} == model.rings
        assert [rings.lens[ring] for ring in RINGS] == [len(model.rings[ring]) for ring in RINGS]
        assert [rings.ring_of(index) for index in range(25)] == [model.ring_of(index) for index in range(25)]
        assert rings.check() == []


def test_what_is_no_index_is_refused() -> None:
    """-1 means the last member, or a batch that fails leaves a ring open."""
    rings = Rings(2)
    rings.move([4], 1)
    for index in (-1, INDEX_MAX + 1):
        assert rings.ring_of(index) == NOWHERE
        with pytest.raises(InvariantError):
            rings.move([3, index, 5], 1)
        rings.move([index], 1, sources=(1, 2))
        with pytest.raises(InvariantError):
            rings.remove(index)
    assert list(rings.walk(1)) == [4, 3]
    assert rings.check() == []


def test_columns_grow_by_a_quarter() -> None:
    """A tier of ten million handles takes twice the memory it needs, or each new handle copies all columns."""
    rings = Rings(4)
    lengths = set()
    for index in range(10_000):
        rings.move((index,), 1 + index % 4)
        lengths.add(len(rings.where))
    assert len(rings.where) <= 10_000 * 1.25
    assert len(lengths) < 50
    assert len(rings._next) == len(rings._prev) == len(rings.where) + 5
    assert rings.check() == []


@pytest.mark.parametrize(
    ("column", "at", "value", "finding"),
    [
        ("_next", 3, 1, "directions disagree"),
        ("_prev", 5, 1, "directions disagree"),
        ("_next", 5, 3, "does not close"),
        ("_next", 4, 9, "does not close"),
        ("where", 4, 2, "0 linked, 1 marked, 0 counted"),
        ("where", 1, 2, "does not close"),
        ("lens", 1, 2, "3 linked, 3 marked, 2 counted"),
    ],
)
def test_check_sees_damage(column: str, at: int, value: int, finding: str) -> None:
    """The recount passes over damage, and every test that relies on it proves nothing."""
    rings = Rings(2, 5)
    rings.move(range(3), 1)
    getattr(rings, column)[at] = value
    assert any(finding in text for text in rings.check())


@given(st.lists(st.tuples(st.sampled_from(RINGS), st.integers(0, 60)), unique_by=lambda step: step[1], max_size=40))
def test_many_at_once_enter_as_one_by_one(members):
    """A policy that comes back after a restart has another order, or links that lead nowhere."""
    one_by_one, at_once = Rings(3), Rings(3)
    for half in (members[:20], members[20:]):
        for ring in RINGS:
            part = [index for where, index in half if where == ring]
            one_by_one.move(part, ring)
            at_once.fill(ring, np.array(part, np.int64))
    for ring in RINGS:
        assert list(at_once.walk(ring)) == list(one_by_one.walk(ring))
    assert at_once.lens == one_by_one.lens
    assert at_once.check() == []
    indexes = np.arange(100)
    for rings in ((), (1,), (2, 3)):
        assert at_once.marked(indexes, rings).tolist() == [at_once.ring_of(i) in rings for i in range(100)]
