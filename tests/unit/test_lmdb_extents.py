"""The extent allocator against a model that is a set of intervals."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.allocator.extents import ExtentAllocator

EXTENT_PAGES = 12
EXTENTS_MAX = 3
STRIDES = (1, 2, 5, 12)


class Extents(RuleBasedStateMachine):
    """Takes, owns and gives back slots; the model keeps page -> (place, stride)."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(EXTENT_PAGES, EXTENTS_MAX)
        self.pages: dict[int, int] = {}  # page -> place of the slot over it
        self.places: dict[int, tuple[int, int]] = {}  # place -> stride, owner

    @rule(stride=st.sampled_from(STRIDES), slots=st.integers(1, 20), owner=st.integers(1, 3))
    def take(self, stride: int, slots: int, owner: int) -> None:
        places = self.allocator.take(stride, slots)
        while len(places) < slots and self.allocator.lend(stride) is not None:
            places += self.allocator.take(stride, slots - len(places))
        assert len(places) == slots or self.allocator.free_slots(stride) == 0
        for place in places:
            for page in range(place, place + stride):
                assert page not in self.pages, "two slots overlap"
                self.pages[page] = place
            assert place // EXTENT_PAGES == (place + stride - 1) // EXTENT_PAGES, "a slot straddles extents"
            self.places[place] = stride, owner
        self.allocator.own(dict.fromkeys(places, owner))

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.places)), min_size=1))
        kept = {owner for place, (_, owner) in self.places.items() if place not in leaving}
        assert self.allocator.owners_left_by(leaving) == {self.places[place][1] for place in leaving} - kept
        expected = sorted(self.allocator.emptied_by(leaving))
        assert sorted(self.allocator.give_back(leaving)) == expected
        for place in leaving:
            stride, _ = self.places.pop(place)
            for page in range(place, place + stride):
                del self.pages[page]

    @invariant()
    def agrees(self) -> None:
        assert self.allocator.check() == []
        assert self.allocator.used_pages == len(self.pages)
        lent = {place // EXTENT_PAGES for place in self.places}
        assert {extent for extent, _, _ in self.allocator.lent()} == lent
        assert len(lent) <= EXTENTS_MAX
        for owner in (1, 2, 3):
            assert set(self.allocator.owned_by(owner)) == {p for p, (_, who) in self.places.items() if who == owner}
        slots = [(place // EXTENT_PAGES, place % EXTENT_PAGES // stride) for place, (stride, _) in self.places.items()]
        assert self.allocator.slots_of(self.places) == slots
        assert self.allocator.owners_of(slots) == [owner for _, owner in self.places.values()]


TestExtents = Extents.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_neighbours_stay_neighbours() -> None:
    """A batch of one prefix would be scattered, and read back with one call per block."""
    allocator = ExtentAllocator(64, 2)
    allocator.lend(1)
    assert allocator.take(1, 10) == list(range(10))
    allocator.give_back([3, 4, 5])
    assert allocator.take(1, 5) == [3, 4, 5, 10, 11]


def test_adopted_extents_count() -> None:
    """After a restart slots in use would be given away, or free ones lost."""
    allocator = ExtentAllocator(8, 3)
    allocator.adopt(1, 2, [0, 3], [7, 7])
    assert allocator.take(2, 9) == [10, 12]
    assert allocator.used_pages == 4
    assert [allocator.lend(1), allocator.lend(1), allocator.lend(1)] == [0, 2, None]
    assert allocator.owned_by(7) == [8, 14]


def test_places_between_slots_are_nowhere() -> None:
    """A stale place could point into the middle of a slot of another size class."""
    allocator = ExtentAllocator(8, 1)
    allocator.lend(3)
    assert allocator.slots_of(range(-1, 9)) == [
        None, (0, 0), None, None, (0, 1), None, None, None, None, None,
    ]  # fmt: skip
