"""ARC under every verb of the protocol, against a model of ordered dicts that shares nothing with it.

`tests/unit/test_arc.py` holds ARC to its paper, access by access. Here is what the paper does not know: pinned blocks
and size classes, fills that nobody made room for, victims that somebody else chose, blocks that are dropped, tiers
that change their size, restarts.
"""

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.policies.arc import ARC
from kvtier.policies.base import Access
from tests.arc_state import ArcState, arc_state

HANDLES = range(14)
handle_lists = st.lists(st.sampled_from(HANDLES), unique=True, max_size=5)
size_classes = st.sampled_from([0, 4096, 8192])
capacities = st.sampled_from([3, 4, 5, 6, 2, 1, 0])


class ArcModel:
    """What `Policy` and ARC's docstring promise, said with four ordered dicts: handle -> size class, oldest first."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, int]() for _ in range(4))
        self.counted: set[int] = set()
        self.told: list[int] = []

    def home(self, handle: int | None) -> "OrderedDict[int, int] | None":
        return next((own for own in (self.t1, self.t2, self.b1, self.b2) if handle in own), None)

    def residents(self) -> dict[int, int]:
        return {**self.t1, **self.t2}

    def enter(self, handle: int, size_class: int, *, moved: bool) -> None:
        home = self.home(handle)
        if home is None:
            self.trim(self.c - (not moved), 2 * self.c - 1)
        self.p = self.p_after(handle)
        target = self.t2 if moved or (home is not None and home is not self.t1) else self.t1
        self.leave(handle)
        target[handle] = size_class

    def leave(self, handle: int) -> None:
        for own in (self.t1, self.t2, self.b1, self.b2):
            own.pop(handle, None)
        self.counted.discard(handle)

    def reuse(self, handle: int) -> None:
        if handle in self.residents():
            size_class = self.residents()[handle]
            self.leave(handle)
            self.t2[handle] = size_class

    def release(self, handle: int) -> None:
        if handle in self.residents():
            home = self.home(handle)
            assert home is not None
            home.move_to_end(handle)

    def p_after(self, incoming: int | None) -> float:
        if incoming in self.counted:
            return self.p
        if incoming in self.b1:
            return min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
        if incoming in self.b2:
            return max(0, self.p - max(len(self.b1) / len(self.b2), 1))
        return self.p

    def candidates(self, count: int, pinned: set[int], size_class: int | None, incoming: int | None) -> list[int]:
        p, t1 = self.p_after(incoming), len(self.t1)
        allowed = [
            [h for h, held in own.items() if h not in pinned and size_class in (None, held)]
            for own in (self.t1, self.t2)
        ]
        chosen: list[int] = []
        for _ in range(count):
            first = 0 if t1 >= 1 and (t1 > p or (incoming in self.b2 and t1 == p)) else 1
            giver = first if allowed[first] else 1 - first
            if not allowed[giver]:
                return []
            chosen.append(allowed[giver].pop(0))
            t1 -= giver == 0
        return chosen

    def evict(self, handles: list[int], incoming: int | None) -> None:
        self.p = self.p_after(incoming)
        if incoming in self.b1 or incoming in self.b2:
            self.counted.add(incoming)
        for handle in handles:
            if handle in self.t1:
                self.b1[handle] = self.t1.pop(handle)
            else:
                self.b2[handle] = self.t2.pop(handle)
        self.trim(self.c, 2 * self.c)

    def trim(self, recent_max: int, total_max: int) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > recent_max:
            self.drop(self.b1)
        while (self.b1 or self.b2) and len(self.residents()) + len(self.b1) + len(self.b2) > total_max:
            self.drop(self.b2 or self.b1)

    def drop(self, ghosts: "OrderedDict[int, int]") -> None:
        handle = next(iter(ghosts))
        self.leave(handle)
        self.told.append(handle)

    def resize(self, c: int) -> None:
        self.c, self.p = c, min(self.p, c)
        self.trim(c, 2 * c)

    def rename(self, names: dict[int, int]) -> None:
        for own in (self.t1, self.t2, self.b1, self.b2):
            renamed = [(names[handle], size_class) for handle, size_class in own.items() if handle in names]
            own.clear()
            own.update(renamed)
        self.counted = {names[handle] for handle in self.counted if handle in names}

    def state(self) -> ArcState:
        lists = [list(own) for own in (self.t1, self.t2, self.b1, self.b2)]
        return ArcState(self.p, self.c, *lists, self.residents(), self.counted)


class ArcMachine(RuleBasedStateMachine):
    @initialize(c=capacities)
    def begin(self, c: int) -> None:
        self.policy, self.model = ARC(c), ArcModel(c)

    @rule(handles=st.lists(st.sampled_from(HANDLES), min_size=4, max_size=16))
    def serve(self, handles: list[int]) -> None:
        """What an engine does all day: without it there are hardly any ghosts."""
        for handle in handles:
            if handle in self.model.residents():
                self.reuse([handle])
                continue
            if len(self.model.residents()) >= self.model.c:
                self.make_room(1, set(), None, handle)
            self.enter([handle], 4096, moved=False)

    @rule(handles=handle_lists, size_class=size_classes, moved=st.booleans())
    def enter(self, handles: list[int], size_class: int, moved: bool) -> None:
        self.policy.touch(handles, Access.MOVED if moved else Access.FILL, size_class)
        for handle in handles:
            self.model.enter(handle, size_class, moved=moved)

    @rule(handles=handle_lists)
    def reuse(self, handles: list[int]) -> None:
        self.policy.touch(handles, Access.REUSE)
        for handle in handles:
            self.model.reuse(handle)

    @rule(handles=handle_lists)
    def release(self, handles: list[int]) -> None:
        self.policy.touch(handles, Access.RELEASE)
        for handle in handles:
            self.model.release(handle)

    @rule(
        count=st.integers(0, 4),
        pinned=st.sets(st.sampled_from(HANDLES), max_size=4),
        size_class=st.none() | size_classes,
        incoming=st.none() | st.sampled_from(HANDLES),
        ghost=st.none() | st.integers(0, 3),
        fill=st.booleans(),
    )
    def make_room_while_some_stay(
        self,
        count: int,
        pinned: set[int],
        size_class: int | None,
        incoming: int | None,
        ghost: int | None,
        fill: bool,
    ) -> None:
        ghosts = [*self.model.b1, *self.model.b2]
        if ghost is not None and ghost < len(ghosts):
            incoming = ghosts[ghost]
        self.make_room(count, pinned, size_class, incoming)
        if fill and incoming is not None:
            self.enter([incoming], 4096, moved=False)

    def make_room(self, count: int, pinned: set[int], size_class: int | None, incoming: int | None) -> None:
        victims = self.policy.candidates(count, pinned, size_class, incoming)
        assert victims == self.model.candidates(count, pinned, size_class, incoming)
        self.policy.evict(victims, incoming)
        self.model.evict(victims, incoming)

    @rule(handles=handle_lists, incoming=st.none() | st.sampled_from(HANDLES))
    def evict_others(self, handles: list[int], incoming: int | None) -> None:
        victims = [handle for handle in handles if handle in self.model.residents()]
        self.policy.evict(victims, incoming)
        self.model.evict(victims, incoming)

    @rule(handle=st.sampled_from(HANDLES))
    def forget(self, handle: int) -> None:
        self.policy.forget([handle])
        self.model.leave(handle)
        self.model.told = [told for told in self.model.told if told != handle]

    @rule(c=capacities, names=st.permutations(HANDLES), lost=st.sets(st.sampled_from(HANDLES), max_size=3))
    def restart(self, c: int, names: list[int], lost: set[int]) -> None:
        renamed = {handle: names[handle] for handle in HANDLES if handle not in lost}
        state = self.policy.snapshot()
        self.policy = ARC(c)
        self.policy.restore(state, renamed)
        self.model.told = []
        self.model.rename(renamed)
        self.model.resize(c)

    @rule(c=capacities)
    def resize(self, c: int) -> None:
        self.policy.resize(c)
        self.model.resize(c)

    @rule()
    def hear_of_ghosts(self) -> None:
        expected = [handle for handle in self.model.told if self.model.home(handle) is None]
        assert sorted(self.policy.forgotten()) == sorted(set(expected))
        self.model.told = []

    @invariant()
    def they_agree(self) -> None:
        assert self.policy.check() == []
        assert arc_state(self.policy.snapshot()) == self.model.state()
        assert len(self.policy) == len(self.model.residents())
        assert self.policy.ghosts() == [*self.model.b1, *self.model.b2]


ArcMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArc = ArcMachine.TestCase


def some_step(machine: ArcMachine, rng: random.Random) -> None:
    """Mostly what an engine does all day."""
    handles = rng.sample(HANDLES, rng.randrange(1, 5))
    verbs: dict[Callable[[], None], int] = {
        lambda: machine.serve(rng.choices(HANDLES, k=4)): 40,
        lambda: machine.make_room(1, set(handles[1:]), None, handles[0]): 20,
        lambda: machine.make_room(2, set(), 4096, handles[0]): 5,
        lambda: machine.enter(handles[:2], 8192, moved=rng.random() < 0.5): 5,
        lambda: machine.reuse(handles): 5,
        lambda: machine.release(handles): 5,
        lambda: machine.forget(handles[0]): 5,
        lambda: machine.evict_others(handles[:2], handles[-1]): 5,
        lambda: machine.resize(rng.randrange(1, 8)): 2,
        lambda: machine.restart(rng.randrange(3, 8), rng.sample(HANDLES, len(HANDLES)), {handles[0]}): 2,
        machine.hear_of_ghosts: 5,
    }
    rng.choices(list(verbs), list(verbs.values()))[0]()


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life(seed: int) -> None:
    """What goes wrong goes wrong only after hundreds of steps, which are more than a shrinkable example has."""
    rng = random.Random(seed)
    machine = ArcMachine()
    machine.begin(5)
    for _ in range(1500):
        some_step(machine, rng)
        machine.they_agree()
