"""The encoder caches under random calls, against models of plain lists that share nothing with them.

The models recount everything at each question and plan by walking over all items. Requests have so few items that
those a request holds are freed in ascending order; the goldens in `tests/unit/test_encoder.py` have longer ones.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.cache.encoder import EncoderCache, EncoderDecoderCache, EncoderItem
from kvtier.cache.encoder_step import carry_out, plan_encoding
from kvtier.errors import UsageError

REQUESTS = ("a", "b", "c")
SIZES = {"u": 1, "v": 2, "w": 3, "x": 4}
PLACES = [(name, gap) for name in SIZES for gap in (0, 1)]
INDEXES, BOTH = range(4), (False, True)

# Each call of the world, and what its arguments may be.
CALLS = {
    "arrive": (REQUESTS, PLACES, PLACES, PLACES),
    "lookup": (REQUESTS, INDEXES),
    "mistake": (REQUESTS, list(SIZES), range(1, 5)),
    "make_room_and_allocate": (REQUESTS, INDEXES, range(1, 9), range(4)),
    "free_item": (REQUESTS, INDEXES),
    "free": (REQUESTS,),
    "plan": (REQUESTS, range(6), range(12), range(1, 10), range(3), BOTH, BOTH),
    "step_ends": (REQUESTS, range(10), range(3)),
    "take_evicted": (),
    "reset": (range(8),),
}


class SharedModel:
    """What `EncoderCache` promises. holds: (request, index, name); kept: names; idle: the longest idle first."""

    def __init__(self, total):
        self.total, self.holds, self.kept, self.idle, self.gone = total, [], [], [], []

    def free_room(self):
        return self.total - sum(SIZES[name] for name in self.kept)

    def begin(self, request, index, name):
        self.holds = [hold for hold in self.holds if hold != (request, index, name)] + [(request, index, name)]
        self.idle = [other for other in self.idle if other != name]

    def end(self, request, index):
        (name,) = [hold[2] for hold in self.holds if hold[:2] == (request, index)]
        self.holds.remove((request, index, name))
        if all(hold[2] != name for hold in self.holds):
            self.idle.append(name)

    def lookup(self, request, index, name):
        if name in self.kept:
            self.begin(request, index, name)
        return name in self.kept

    def make_room(self, name, compute_left, planned):
        needed = SIZES[name] + planned
        if SIZES[name] > compute_left or needed > self.free_room() + sum(SIZES[other] for other in self.idle):
            return False
        while self.free_room() < needed:
            self.gone.append(self.idle[0])
            self.kept.remove(self.idle.pop(0))
        return True

    def may_allocate(self, request, index, name):
        taken = any(hold[:2] == (request, index) for hold in self.holds)
        return not taken and name not in self.kept and SIZES[name] <= self.free_room()

    def allocate(self, request, index, name):
        self.kept.append(name)
        self.begin(request, index, name)

    def take(self):
        told = [name for at, name in enumerate(self.gone) if name not in self.gone[:at] and name not in self.kept]
        self.gone = []
        return told

    def plan(self, request, items, computed, new, left, ahead, split):
        encode, repeats = [], []
        for index, (name, offset) in enumerate(items):
            last = offset + SIZES[name]
            if new == 0 or last <= computed or offset >= computed + new + ahead:
                continue
            before = max(0, offset - computed - ahead)
            if not split and computed < offset and computed + new < last:
                return before, left, encode, repeats
            if name in [items[other][0] for other in encode]:
                repeats.append(index)
            elif not self.lookup(request, index, name):
                if not self.make_room(name, left, sum(SIZES[items[other][0]] for other in encode)):
                    return before, left, encode, repeats
                encode.append(index)
                left -= SIZES[name]
        return new, left, encode, repeats

    def passed(self, request, items, computed, ahead):
        past = {i for i, (name, offset) in enumerate(items) if offset + SIZES[name] + ahead <= computed}
        return [index for holder, index, _ in sorted(self.holds) if holder == request and index in past]

    def reset(self):
        self.__init__(self.total)


class ApartModel(SharedModel):
    """What `EncoderDecoderCache` promises: `kept` has a name for each hold, `gone` the names by step."""

    def __init__(self, total):
        super().__init__(total)
        self.gone = [[], []]

    def end(self, request, index):
        (hold,) = [hold for hold in self.holds if hold[:2] == (request, index)]
        self.holds.remove(hold)
        self.kept.remove(hold[2])

    def may_allocate(self, request, index, name):
        taken = any(hold[:2] == (request, index) for hold in self.holds)
        return not taken and SIZES[name] <= self.free_room()

    def allocate(self, request, index, name):
        super().allocate(request, index, name)
        self.gone[-1].append(name)

    def take(self):
        self.gone.append([])
        return sorted(set(self.gone[-3]), key=self.gone[-3].index)

    def passed(self, request, items, computed, ahead):
        return [index for holder, index, _ in self.holds if holder == request and computed > 0]

    def plan(self, request, items, computed, new, left, ahead, split):
        encode = []
        for index, (name, _) in enumerate(items):
            if computed or not new:
                break
            if not self.make_room(name, left, sum(SIZES[items[other][0]] for other in encode)):
                return 0, left, encode, []
            encode.append(index)
            left -= SIZES[name]
        return new, left, encode, []


class World:
    """One cache of ours and its model: every call, sensible or not, on both; what makes no sense must be refused."""

    def __init__(self, shared, total):
        self.shared = shared
        self.cache = EncoderCache(total) if shared else EncoderDecoderCache(total)
        self.model = SharedModel(total) if shared else ApartModel(total)
        self.prompts = {
            request: [("u", 0), ("x", 1 if shared else 0), ("v", 5 if shared else 0)] for request in REQUESTS
        }

    def item(self, request, index):
        name, offset = self.prompts[request][index]
        return EncoderItem(name, offset, SIZES[name], SIZES[name])

    def held(self, request):
        return sorted(hold[1] for hold in self.model.holds if hold[0] == request)

    def arrive(self, request, *parts):
        if self.held(request):
            return
        self.prompts[request], offset = [], 0
        for name, gap in parts:
            offset += gap if self.shared else 0
            self.prompts[request].append((name, offset))
            offset += SIZES[name] if self.shared else 0

    def lookup(self, request, index):
        if self.shared and index < len(self.prompts[request]):
            answer = self.cache.lookup(request, index, self.item(request, index))
            assert answer == self.model.lookup(request, index, self.prompts[request][index][0])

    def mistake(self, request, other, size):
        """An item in the place of one that is held, or of another size than the one that is kept."""
        wrong = EncoderItem(other, 0, size, size)
        if self.shared and other in self.model.kept and size != SIZES[other]:
            self.refused(self.cache.lookup, request, 0, wrong)
        if 0 in self.held(request) and wrong != self.item(request, 0):
            self.refused(self.cache.allocate, request, 0, wrong)

    def make_room_and_allocate(self, request, index, left, planned):
        if index >= len(self.prompts[request]):
            return
        item, name = self.item(request, index), self.prompts[request][index][0]
        assert self.cache.make_room(item, left, planned) == self.model.make_room(name, left, planned)
        if self.model.may_allocate(request, index, name):
            self.cache.allocate(request, index, item)
            self.model.allocate(request, index, name)
        else:
            self.refused(self.cache.allocate, request, index, item)

    def free_item(self, request, index):
        if index not in self.held(request):
            self.refused(self.cache.free_item, request, index)
            return
        self.cache.free_item(request, index)
        self.model.end(request, index)

    def free(self, request):
        held = self.held(request)
        if held:
            self.cache.free(request)
            for index in held:
                self.model.end(request, index)
        else:
            self.refused(self.cache.free, request)

    def plan(self, request, computed, new, left, ahead, split, goes):
        prompt = self.prompts[request]
        items = [self.item(request, index) for index in range(len(prompt))]
        plan = plan_encoding(self.cache, request, items, computed, new, left, lookahead_tokens=ahead, split_items=split)
        told = (plan.new_tokens, plan.compute_left, list(plan.encode), list(plan.repeats))
        expected = self.model.plan(request, prompt, computed, new, left, ahead, split)
        # a request that is left out of the step encodes nothing, and costs the others nothing
        assert told == (expected if expected[0] else (0, left, [], []))
        if set(self.held(request)) & set(plan.encode):
            self.refused(carry_out, self.cache, request, items, plan)
        elif goes and plan.new_tokens:
            carry_out(self.cache, request, items, plan)
            for index in plan.encode:
                self.model.allocate(request, index, prompt[index][0])
            for index in plan.repeats:
                self.model.begin(request, index, prompt[index][0])

    def step_ends(self, request, computed, ahead):
        passed = self.model.passed(request, self.prompts[request], computed, ahead)
        self.cache.free_passed(request, computed, ahead)
        for index in passed:
            self.model.end(request, index)

    def refused(self, call, *args):
        with pytest.raises(UsageError):
            call(*args)

    def take_evicted(self):
        assert self.cache.take_evicted() == self.model.take()

    def reset(self, dice):
        if dice == 0:
            self.cache.reset()
            self.model.reset()

    def do(self, name, *args):
        getattr(self, name)(*args)
        self.compare()

    def compare(self):
        assert self.cache.check() == []
        assert self.cache.embeddings_free == self.model.free_room()
        for request in REQUESTS:
            assert sorted(self.cache.held(request)) == self.held(request)
        if self.shared:
            assert self.cache.embeddings_idle == sum(SIZES[name] for name in self.model.idle)
            kept = {name: SIZES[name] if name in self.model.kept else None for name in SIZES}
            assert {name: self.cache.embeddings_of(name) for name in SIZES} == kept


class EncoderMachine(RuleBasedStateMachine):
    """Hypothesis chooses the calls, and shortens the list of those that fail."""

    @initialize(shared=st.booleans(), total=st.integers(4, 9))
    def start(self, shared, total):
        self.world = World(shared, total)

    @rule(call=st.one_of([st.tuples(st.just(name), *map(st.sampled_from, args)) for name, args in CALLS.items()]))
    def call(self, call):
        self.world.do(*call)


class TestEncoder(EncoderMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def walk(seed, steps):
    rng = random.Random(seed)
    world = World(shared=seed % 3 > 0, total=rng.randrange(4, 10))
    for _ in range(steps):
        name = rng.choice(list(CALLS))
        world.do(name, *map(rng.choice, CALLS[name]))


@pytest.mark.parametrize("seed", range(12))
def test_a_long_walk(seed):
    """A cache goes wrong that has been in use for a while."""
    walk(seed, 400)


@pytest.mark.soak
def test_many_long_walks():
    """As above, for what comes up once in many thousand calls."""
    for seed in range(1000, 1400):
        walk(seed, 500)
