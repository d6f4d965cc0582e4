"""SlotPool against a model of sets and dicts that shares no helper with it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.allocator import slot_pool
from kvtier.allocator.slot_pool import SlotPool
from kvtier.errors import InvariantError

SLOTS = st.integers(-1, 8)
HANDLES = st.integers(0, 3)


class PoolMachine(RuleBasedStateMachine):
    """Any order of verbs, right and wrong ones; a wrong one raises and changes nothing."""

    @initialize(null_slot=st.booleans())
    def begin(self, null_slot: bool) -> None:
        self.total = 7
        self.pool = SlotPool(self.total, null_slot)
        self.free = set(range(int(null_slot), self.total))
        self.taken: set[int] = set()
        self.quarantined: set[int] = set()
        self.holds: dict[int, int] = {}
        self.generations = dict.fromkeys(range(self.total), 0)

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        slots = self.pool.take(count)
        if count > len(self.free):
            assert slots is None
            return
        assert slots is not None
        assert len(slots) == len(set(slots)) == count
        assert set(slots) <= self.free
        self.free -= set(slots)
        self.taken |= set(slots)
        for slot in slots:
            self.generations[slot] += 1

    @rule(slots=st.lists(SLOTS, max_size=4))
    def give(self, slots: list[int]) -> None:
        if len(set(slots)) < len(slots) or not set(slots) <= self.taken:
            with pytest.raises(InvariantError):
                self.pool.give(slots)
            return
        self.pool.give(slots)
        self.taken -= set(slots)
        self.free |= set(slots)
        for slot in slots:
            self.holds.pop(slot, None)

    @rule(slot=SLOTS, handle=HANDLES)
    def occupy(self, slot: int, handle: int) -> None:
        if slot not in self.taken or self.holds.get(slot, handle) != handle:
            with pytest.raises(InvariantError):
                self.pool.occupy(slot, handle)
            return
        self.pool.occupy(slot, handle)
        self.holds[slot] = handle

    @rule(slot=st.integers(0, 6))
    def vacate(self, slot: int) -> None:
        self.pool.vacate(slot)
        self.holds.pop(slot, None)

    @rule(slot=SLOTS)
    def quarantine(self, slot: int) -> None:
        if slot not in self.taken:
            with pytest.raises(InvariantError):
                self.pool.quarantine(slot)
            return
        self.pool.quarantine(slot)
        self.taken.remove(slot)
        self.quarantined.add(slot)

    @rule(slot=SLOTS)
    def acknowledge(self, slot: int) -> None:
        if slot not in self.quarantined:
            with pytest.raises(InvariantError):
                self.pool.acknowledge(slot)
            return
        self.pool.acknowledge(slot)
        self.quarantined.remove(slot)
        self.free.add(slot)
        self.holds.pop(slot, None)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.check() == []
        assert self.pool.slots_free == len(self.free)
        assert self.pool.slots_quarantined == len(self.quarantined)
        for slot in range(self.total):
            assert self.pool.is_free(slot) == (slot in self.free)
            assert self.pool.occupant(slot) == self.holds.get(slot)
            assert self.pool.generation(slot) == self.generations[slot]
        for handle in range(5):
            holders = {slot for slot, held in self.holds.items() if held == handle}
            for besides in range(self.total):
                other = self.pool.duplicate_of(handle, besides)
                if holders - {besides}:
                    assert other in holders - {besides}
                else:
                    assert other is None


TestSlotPool = PoolMachine.TestCase
TestSlotPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slots_come_out_in_runs() -> None:
    """A prefix is scattered over the pool, and its copies cannot be joined."""
    pool = SlotPool(12, null_slot=True)
    assert pool.take(6) == [1, 2, 3, 4, 5, 6]
    assert pool.take(2) == [7, 8]
    pool.give([5, 4, 3])  # a request lets go of its deepest block first
    assert pool.take(3) == [3, 4, 5]


def test_a_generation_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 2**32nd taking of a slot fails."""
    pool = SlotPool(1, null_slot=False)
    pool._generation[0] = slot_pool.GENERATIONS - 1
    assert pool.take(1) == [0]
    assert pool.generation(0) == 0


def test_the_null_slot_is_nobodys() -> None:
    """Content is put into the block that padding reads."""
    pool = SlotPool(2, null_slot=True)
    for call in (
        lambda: pool.give([0]),
        lambda: pool.occupy(0, 1),
        lambda: pool.quarantine(0),
        lambda: pool.take(-1),
    ):
        with pytest.raises(InvariantError):
            call()
    assert pool.take(2) is None
    assert pool.take(1) == [1]


def test_check_sees_each_disagreement() -> None:
    """The recount passes over damage, and every test that relies on it proves nothing."""

    def damaged(column: str, value: object) -> list[str]:
        pool = SlotPool(4, null_slot=False)
        pool.take(3)
        for slot in (0, 1):
            pool.occupy(slot, 7)
        if isinstance(value, tuple):
            getattr(pool, column)[value[0]] = value[1]
        else:
            setattr(pool, column, value)
        return pool.check()

    assert "free queue and the states" in str(damaged("_state", (2, 0)))
    assert "holds 7 and is free" in str(damaged("_state", (0, 0)))
    assert "in quarantine" in str(damaged("slots_quarantined", 1))
    assert "disagree" in str(damaged("_occupant", (2, 7)))
    assert "disagree" in str(damaged("_more_slots", {7: []}))
    assert "disagree" in str(damaged("_first_slot", (7, 2)))
