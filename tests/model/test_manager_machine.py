"""The KV cache manager under random requests, against what an engine would find in its blocks.

Two drivers over one world: a Hypothesis machine, which shrinks what it finds, and seeded walks, which go deeper.
"""

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.manager_model import BASE, TOKENS_MAX, World
from tests.manager_settings import SETTINGS

PICK, BIT = st.integers(0, 7), st.integers(0, 1)
BUDGET = st.sampled_from([1, 3, 8, 20, TOKENS_MAX])
LIMITS = {"reserved_blocks": st.sampled_from([0, 0, 2])}


class ManagerMachine(RuleBasedStateMachine):
    """One rule per operation of the world."""

    @initialize(name=st.sampled_from(sorted(SETTINGS)), small_blocks=st.integers(13, 33))
    def start(self, name, small_blocks):
        self.world = world_of(name, small_blocks)

    @precondition(lambda self: len(self.world.waiting) < 6)
    @rule(common=st.integers(0, TOKENS_MAX - 4), own=st.integers(1, 9), last=BIT, reads_cache=st.booleans())
    def arrive(self, common, own, last, reads_cache):
        self.world.arrive([*BASE[:common], *[last] * own][: TOKENS_MAX - 4], reads_cache or last == 1)

    @precondition(lambda self: self.world.earlier)
    @rule(pick=PICK, own=st.integers(0, 5), last=BIT)
    def arrive_again(self, pick, own, last):
        earlier = one_of(self.world.earlier, pick)
        self.world.arrive([*earlier.tokens, *[last] * own][: TOKENS_MAX - 2])

    @precondition(lambda self: self.world.waiting)
    @rule(pick=PICK, budget=BUDGET, load_steps=st.integers(0, 3), delayed=st.booleans(), whole=BIT, **LIMITS)
    def admit(self, pick, budget, load_steps, delayed, whole, reserved_blocks):
        request_id = one_of(self.world.waiting, pick)
        limits = {"whole_must_fit": bool(whole), "reserved_blocks": reserved_blocks}
        self.world.admit(request_id, budget, load_steps, delayed, **limits)

    @precondition(lambda self: self.world.loading)
    @rule(pick=PICK)
    def finish_load(self, pick):
        self.world.finish_load(one_of(self.world.loading, pick))

    @precondition(lambda self: self.world.idle())
    @rule(pick=PICK, budget=BUDGET, drafts=PICK, lookahead=PICK, accepted=PICK, sampled=BIT, **LIMITS)
    def proceed(self, pick, budget, drafts, lookahead, accepted, sampled, reserved_blocks):
        request_id = one_of(self.world.idle(), pick)
        self.world.proceed(request_id, budget, drafts, lookahead, accepted, sampled, reserved_blocks=reserved_blocks)

    @rule()
    def run(self):
        self.world.run()

    @rule()
    def acknowledge(self):
        self.world.acknowledge()

    @precondition(lambda self: self.world.idle())
    @rule(pick=PICK)
    def preempt(self, pick):
        self.world.preempt(one_of(self.world.idle(), pick))

    @precondition(lambda self: self.world.idle())
    @rule(pick=PICK)
    def free(self, pick):
        self.world.free(one_of(self.world.idle(), pick))

    @rule(pick=st.integers(0, 20))
    def evict(self, pick):
        blocks = range(1, self.world.pool.blocks_total)
        self.world.evict([one_of(blocks, pick), one_of(blocks, -pick)])

    @rule()
    def reset(self):
        self.world.reset()

    @invariant()
    def bookkeeping_agrees(self):
        if hasattr(self, "world"):
            self.world.check()


def world_of(name, small_blocks):
    """A pool for so many blocks of 4 tokens in each group: one to three of the longest requests."""
    setting = SETTINGS[name]
    return World(setting, 1 + sum(small_blocks * 4 // spec.block_tokens for spec in setting.specs))


def one_of(some, pick):
    return list(some)[pick % len(some)]


class TestManager(ManagerMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.soak
class TestManagerForLong(ManagerMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )


# ---------------------------------------------------------------- seeded walks

WEIGHTS = {
    "arrive": 12,
    "admit": 20,
    "proceed": 35,
    "run": 25,
    "finish_load": 8,
    "acknowledge": 10,
    "preempt": 3,
    "free": 8,
    "evict": 2,
    "reset": 1,
    "empty": 1,
}


def walk(name, seed, steps):
    """Let chance call the world; returns what has happened."""
    rng = random.Random(seed)
    world = world_of(name, rng.choice([13, 19, 33]))
    for _ in range(steps):
        step(world, rng.choices(list(WEIGHTS), WEIGHTS.values())[0], rng)
        world.check()
    return world.met


def step(world, name, rng):
    limits = {"reserved_blocks": rng.choice([0, 0, 0, 2])}
    budget, idle = rng.choice([1, 3, 8, 20, TOKENS_MAX]), world.idle()
    if name == "arrive" and len(world.waiting) < 6:
        world.arrive(prompt(world, rng), rng.random() < 0.9)
    elif name == "admit" and world.waiting:
        limits["whole_must_fit"] = rng.random() < 0.3
        load_steps = rng.choice([0, 0, 0, 1, 2, 3])
        world.admit(rng.choice(list(world.waiting)), budget, load_steps, rng.random() < 0.5, **limits)
    elif name == "proceed" and idle:
        drafts, lookahead = rng.choice([0, 0, 1, 3]), rng.choice([0, 0, 1, 3])
        world.proceed(rng.choice(idle), budget, drafts, lookahead, rng.randrange(4), rng.randrange(2), **limits)
    elif name == "finish_load" and world.loading:
        world.finish_load(rng.choice(list(world.loading)))
    elif name in ("preempt", "free") and idle:
        getattr(world, name)(rng.choice(idle))
    elif name == "evict":
        world.evict(rng.sample(range(1, world.pool.blocks_total), 2))
    elif name in ("run", "acknowledge", "reset"):
        getattr(world, name)()
    elif name == "empty" and not world.loading:
        world.run()
        world.acknowledge()
        for request_id in world.idle():
            world.free(request_id)
        world.reset()


def prompt(world, rng):
    if world.earlier and rng.random() < 0.35:
        more = [rng.randrange(2) for _ in range(rng.randrange(10))]
        return (rng.choice(world.earlier).tokens + more)[: TOKENS_MAX - 2]
    length = rng.randrange(1, TOKENS_MAX - 4)
    common = rng.randrange(length + 1)
    length += -length % 4 * (rng.random() < 0.3)
    return BASE[:common] + [rng.randrange(2) for _ in range(length - common)]


@pytest.mark.parametrize("name", SETTINGS)
def test_seeded_walks_find_no_wrong_byte_and_reach_everything(name):
    """A rare order of events gives a request wrong content or loses a block; or the walks no longer reach it."""
    met = Counter()
    for seed in range(4):
        met.update(walk(name, seed, 250))
    setting = SETTINGS[name]
    expected = ["granted", "refused", "freed", "preempted", "resumed", "resets"]
    expected += ["hits"] * setting.caching + ["loads"] * setting.loads + ["copies"] * setting.inside
    assert not [event for event in expected if not met[event]], met


@pytest.mark.soak
@pytest.mark.parametrize("name", SETTINGS)
def test_long_walks(name):
    """As above, for longer."""
    for seed in range(1000, 1100):
        walk(name, seed, 500)
