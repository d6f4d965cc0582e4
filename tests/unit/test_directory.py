"""The directory's names, states and counts, and the table of legal moves."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.cache.directory import Directory
from kvtier.cache.stored import StoredBlocks
from kvtier.cache.transitions import MOVES, Move, State, after
from kvtier.errors import InvariantError
from kvtier.types import StoreKey


def test_a_move_outside_the_table_names_state_and_move():
    """An illegal move goes unnoticed, or its error does not help."""
    with pytest.raises(InvariantError, match="GONE cannot FILLED"):
        after(State.GONE, Move.FILLED)


def test_every_state_can_be_reached_and_left():
    """A copy can get stuck in a state."""
    reached = {State.GONE} | {MOVES[pair] for pair in MOVES}
    left = {state for (state, move), following in MOVES.items() if following is not state}
    assert reached == left == set(State)


def test_columns_grow_and_handles_are_used_again():
    """A million blocks do not fit, or a handle is given to two blocks."""
    directory = Directory(2)
    handles = [directory.admit(StoreKey(b"%d" % i), 10) for i in range(5000)]
    assert len(set(handles)) == 5000
    assert directory.find(StoreKey(b"4999")) == handles[4999]
    directory.move(handles[7], 0, Move.PUBLISH)
    assert directory.has_copy(handles[7])
    directory.move(handles[7], 0, Move.RECLAIM)
    directory.move(handles[7], 0, Move.ACKNOWLEDGED)
    assert not directory.has_copy(handles[7])
    assert directory.ghosts() == 5000
    directory.retire(handles[7])
    directory.retire(handles[7])  # nothing happens any more
    assert directory.ghosts() == 4999
    assert directory.find(StoreKey(b"7")) is None
    assert directory.admit(StoreKey(b"new"), 20) == handles[7]
    assert directory.length_bytes(handles[7]) == 20
    assert directory.check() == []


def stored(keys):
    count = len(keys)
    numbers = np.arange(count)
    return StoredBlocks([StoreKey(key) for key in keys], numbers * 3, numbers + 7, numbers + 1, numbers * 0 + 4096)


def test_blocks_enrolled_at_once_are_what_they_are_one_by_one():
    """After a restart a block has another place, length or generation, or its handle is given twice."""
    keys = [b"%d" % i for i in range(3000)]
    handles = np.random.default_rng(0).permutation(5000)[:3000]
    free = sorted(set(range(5000)) - set(handles.tolist()))
    ghosts = {free[0]: (StoreKey(b"g"), 5), free[1]: (StoreKey(b"17"), 6), int(handles[3]): (StoreKey(b"h"), 7)}
    directory = Directory(3, persistent=[2])
    assert directory.enroll(2, stored(keys), handles, ghosts) == [free[1], handles[3]]
    assert directory.check() == []
    assert (directory.ready, directory.idle_clean) == ([0, 0, 3000], [0, 0, 3000])
    for i, handle in enumerate(handles.tolist()):
        found = directory.find(StoreKey(keys[i])), directory.place(handle, 2), directory.generation(handle, 2)
        assert (*found, directory.length_bytes(handle)) == (handle, 3 * i, i + 7, i + 1)
    assert (directory.find(StoreKey(b"g")), directory.length_bytes(free[0])) == (free[0], 5)
    assert directory.ghosts() == 1
    new = {directory.admit(StoreKey(b"new%d" % i), 1) for i in range(3000)}
    assert len(new) == 3000
    assert not new & {*handles.tolist(), free[0]}
    assert set(free) <= {*new, free[0]}
    with pytest.raises(InvariantError, match="enrolled first"):
        directory.enroll(2, stored([b"more"]), np.array([9999]))


def test_letting_go_more_often_than_held_is_a_bug():
    """A double release makes a count negative (LMCache#3381)."""
    directory = Directory(1)
    handle = directory.admit(StoreKey(b"a"), 10)
    directory.move(handle, 0, Move.PUBLISH)
    directory.hold([handle], 0)
    directory.unhold([handle], 0)
    with pytest.raises(InvariantError, match="let go more often"):
        directory.unhold([handle], 0)


def test_check_sees_a_wrong_count():
    """The recount compares nothing."""
    directory = Directory(2)
    handle = directory.admit(StoreKey(b"a"), 10)
    directory.move(handle, 0, Move.PUBLISH)
    directory.idle_clean[0] += 1
    assert any("idle_clean" in finding for finding in directory.check())


class DirectoryMachine(RuleBasedStateMachine):
    """Any legal moves and holds over three tiers, against plain dicts."""

    @initialize()
    def start(self):
        self.directory = Directory(3)
        self.handles = {}
        self.states = {}
        self.holds = {}

    @rule(number=st.integers(0, 5), tier=st.integers(0, 2), move=st.sampled_from(list(Move)))
    def move(self, number, tier, move):
        key = StoreKey(b"%d" % number)
        handle = self.directory.admit(key, 10)
        assert self.handles.setdefault(number, handle) == handle
        state = self.states.get((number, tier), State.GONE)
        following = MOVES.get((state, move))
        if following is None:
            with pytest.raises(InvariantError):
                self.directory.move(handle, tier, move)
            return
        if following is State.GONE and self.holds.get((number, tier)):
            return  # callers never end a held copy
        assert self.directory.move(handle, tier, move) is following
        self.states[number, tier] = following

    @rule(number=st.integers(0, 5), tier=st.integers(0, 2), hold=st.booleans())
    def hold(self, number, tier, hold):
        if number not in self.handles or self.states.get((number, tier), State.GONE) is State.GONE:
            return
        held = self.holds.get((number, tier), 0)
        if hold:
            self.directory.hold([self.handles[number]], tier)
            self.holds[number, tier] = held + 1
        elif held:
            ending = held == 1 and self.states[number, tier] is State.RECLAIMED
            handle = self.handles[number]
            assert self.directory.unhold([handle], tier) == ([handle] if ending else [])
            self.holds[number, tier] = held - 1

    @invariant()
    def agrees(self):
        assert self.directory.check() == []
        ready = [[n for n in self.handles if self.states.get((n, t)) is State.READY] for t in range(3)]
        assert self.directory.ready == [len(numbers) for numbers in ready]
        idle = [[n for n in numbers if not self.holds.get((n, t))] for t, numbers in enumerate(ready)]
        assert self.directory.idle == [len(numbers) for numbers in idle]
        for number, handle in self.handles.items():
            tops = [t for t in range(3) if number in ready[t]]
            assert self.directory.top(handle) == (tops[0] if tops else None)
            for tier in range(3):
                below = any(number in ready[t] for t in range(tier + 1, 3))
                assert self.directory.is_clean(handle, tier) == (below or tier == 2)


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_refuses_a_block_makes_all_copies_above_it_clean():
    """A block that no tier below wants is copied round among those above; or its handle's next block is not wanted."""
    directory = Directory(3, [2])
    handle = directory.admit(StoreKey(b"key-of-one"), 10)
    for tier in (0, 1):
        directory.move(handle, tier, Move.PUBLISH)
    assert [directory.is_clean(handle, tier) for tier in (0, 1)] == [True, False]
    directory.refuse([handle], 2)
    assert directory.refused_by(2) == [handle]
    assert directory.idle_clean == [1, 1, 0]
    directory.take_out([handle], 1)
    assert (directory.is_clean(handle, 0), directory.is_below(handle, 0)) == (True, False)
    directory.reconsider([handle])
    assert directory.idle_clean == [0, 0, 0]
    assert directory.check() == []
    directory.refuse([handle], 1)
    directory.take_out([handle], 0)
    directory.retire(handle)
    assert directory.admit(StoreKey(b"key-of-another"), 10) == handle
    assert directory.refused_by(1) == []
