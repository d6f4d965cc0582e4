"""A block manager over tiers under random requests, failures and orders of what moves, down to each byte it reads.

Two drivers over one world: a Hypothesis machine, which shrinks what it finds, and seeded walks, which go deeper.
"""

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.testing.dict_tier import DictTier
from kvtier.types import Status
from tests.fakecuda.fake import fake_cuda
from tests.managed_device import on_device
from tests.managed_world import FULL, MLA, TOKENS_MAX, World

__all__ = ["fake_cuda"]
GROUPS = {
    "full": (FULL,),
    "mla": (MLA,),
    "two": (FULL, FULL),
    "sizes": (FULL, ("full", 8)),
    "odd": (("full", 4), ("mla", 6)),
}
BASE = [(7 * i * i + i) % 5 for i in range(TOKENS_MAX)]
REQUESTS_MAX = 5
PICK, BIT = st.integers(0, 9), st.booleans()
FAILS = [(), (), (), (0,), (1,), (2, 3), "all", "all"]


class Chance:
    """A world whose operations take any number for a choice, and do nothing where there is none."""

    def __init__(self, groups, blocks, host_slots, disk_blocks):
        kinds = GROUPS[groups]
        disk = DictTier(blocks_max=disk_blocks)
        self.world = World(kinds, blocks * len(kinds), host_slots * len(kinds), disk, ahead=0.5)
        self.waiting, self.others = [], []
        self.met = Counter()

    # ---------------------------------------------------------------- requests

    def arrive(self, family, common, own):
        if len(self.everyone()) + len(self.waiting) < REQUESTS_MAX:
            tokens = [token + 5 * family for token in BASE[: min(common, TOKENS_MAX - 14)]] + [own % 2] * own
            self.waiting.append(self.world.request(tokens))

    def admit(self, pick):
        if self.waiting:
            request = one_of(self.waiting, pick)
            again = request.preemptions > 0
            if self.world.admit(request):
                self.waiting.remove(request)
                loads = request.request_id in self.world.loading
                self.met.update(loads=loads, hits=not loads and request.read_tokens > 0, resumed=again)
            else:
                self.met["refused"] += 1

    def proceed(self, pick, more):
        """More tokens, or those that were not loaded; who finds no blocks is preempted, as an engine does."""
        world = self.world
        ready = [*world.running.values(), *world.loaded.values()]
        if not ready:
            return
        request = one_of(ready, pick)
        if request.computed_tokens < len(request.tokens):
            tokens = []
        else:
            tokens = [more % 2] * min(1 + more % 3, TOKENS_MAX - len(request.tokens))
            if not tokens:
                world.free(request)
                return
        if not world.proceed(request, tokens):
            world.preempt(request)
            self.waiting.append(request)

    def preempt(self, pick):
        if self.everyone():
            request = one_of(self.everyone(), pick)
            self.met["preempted loads"] += request.request_id in self.world.loading
            self.world.preempt(request)
            self.waiting.append(request)

    def free(self, pick):
        if self.everyone():
            request = one_of(self.everyone(), pick)
            self.met["freed loads"] += request.request_id in self.world.loading
            self.world.free(request)
            self.met["freed"] += 1

    def everyone(self):
        world = self.world
        return [*world.running.values(), *world.loading.values(), *world.loaded.values()]

    # ---------------------------------------------------------------- what moves

    def step(self):
        self.back(self.world.step())

    def turn(self):
        self.back(self.world.turn())

    def back(self, requests):
        for request in requests:
            self.met["some" if request.computed_tokens else "nothing"] += 1

    def plan(self):
        self.world.below.plan()

    def finish(self, pick):
        """The oldest batch of a lane: a lane keeps its order."""
        held = self.world.below.held
        lanes = {(batch.source, batch.target): i for i, batch in reversed(list(enumerate(held)))}
        if lanes:
            self.world.below.finish(one_of(sorted(lanes.values()), pick))

    def end(self, pick, fails):
        if self.world.pages.moves:
            self.world.pages.end(pick % len(self.world.pages.moves), fails)

    def flush(self):
        self.world.top.flush()

    def empty(self):
        """All go, all is copied, and the pages forget what they had."""
        for request in self.everyone():
            self.world.free(request)
        self.world.top.flush()
        for _ in range(6):
            self.world.turn()
        self.met["resets"] += self.world.manager.reset()

    # ---------------------------------------------------------------- what goes wrong

    def break_disk(self, reads, writes):
        self.world.below.disk.fail_read, self.world.below.disk.fail_write = reads, writes

    def damage(self, pick):
        self.world.below.disk.corrupt ^= {pick}

    def wait(self, seconds):
        self.world.below.now_s += seconds

    def crowd(self, pick):
        """Others take slots of the host tier, or give them back."""
        below = self.world.below
        if self.others:
            below.give_up(self.others.pop())
        else:
            self.others.append(below.occupy(1 + pick % below.host.traits.slots))

    def forget(self, pick):
        """Names are taken back: of a block, of all pages, or of all tiers."""
        if pick > 1:
            self.world.manager.evict_blocks([1 + pick % (self.world.pool.blocks_total - 1)])
        elif pick == 1:
            self.met["resets"] += self.world.manager.reset()
        else:
            self.world.below.own[self.world.below.core.submit_drop()] = None

    def check(self):
        self.world.check()
        self.world.check_content()

    def end_all(self):
        """Everybody goes, everything ends: nothing is left."""
        self.world.drain()
        self.met.update(self.world.pages.met)
        self.met["dropped dirty"] += self.world.pool.dropped_dirty
        self.met["refused stores"] += self.world.top.counters.refused


STATUS = [None, None, Status.FAILED]


class ManagedMachine(RuleBasedStateMachine):
    """One rule per operation of the world."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        blocks=st.integers(15, 24),
        host_slots=st.sampled_from([4, 9, 20]),
        disk_blocks=st.sampled_from([3, 1000]),
    )
    def start(self, groups, blocks, host_slots, disk_blocks):
        self.chance = Chance(groups, blocks, host_slots, disk_blocks)

    @rule(family=st.integers(0, 2), common=st.sampled_from([3, 12, 26, TOKENS_MAX]), own=st.integers(1, 6))
    def arrive(self, family, common, own):
        self.chance.arrive(family, common, own)

    @rule(pick=PICK)
    def admit(self, pick):
        self.chance.admit(pick)

    @rule(pick=PICK, more=PICK)
    def proceed(self, pick, more):
        self.chance.proceed(pick, more)

    @rule(pick=PICK)
    def preempt(self, pick):
        self.chance.preempt(pick)

    @rule(pick=PICK)
    def free(self, pick):
        self.chance.free(pick)

    @rule()
    def step(self):
        self.chance.step()

    @rule()
    def plan(self):
        self.chance.plan()

    @rule(pick=PICK)
    def finish(self, pick):
        self.chance.finish(pick)

    @rule(pick=PICK, fails=st.sampled_from(FAILS))
    def end(self, pick, fails):
        self.chance.end(pick, fails)

    @rule()
    def turn(self):
        self.chance.turn()

    @rule()
    def flush(self):
        self.chance.flush()

    @rule()
    def empty(self):
        self.chance.empty()

    @rule(reads=st.sampled_from([*STATUS, Status.MISSING]), writes=st.sampled_from([*STATUS, Status.NO_ROOM]))
    def break_disk(self, reads, writes):
        self.chance.break_disk(reads, writes)

    @rule(pick=PICK)
    def damage(self, pick):
        self.chance.damage(pick)

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def wait(self, seconds):
        self.chance.wait(seconds)

    @rule(pick=st.integers(0, 20))
    def crowd(self, pick):
        self.chance.crowd(pick)

    @rule(pick=st.integers(0, 30))
    def forget(self, pick):
        self.chance.forget(pick)

    @invariant()
    def bookkeeping_and_bytes_agree(self):
        if hasattr(self, "chance"):
            self.chance.check()

    def teardown(self):
        if hasattr(self, "chance"):
            self.chance.end_all()


def one_of(some, pick):
    return list(some)[pick % len(some)]


class TestManaged(ManagedMachine.TestCase):
    settings = settings(
        max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.soak
class TestManagedForLong(ManagedMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )


# ---------------------------------------------------------------- seeded walks

WEIGHTS = {
    "arrive": 14,
    "admit": 20,
    "proceed": 14,
    "preempt": 4,
    "free": 12,
    "step": 25,
    "plan": 15,
    "finish": 20,
    "end": 20,
    "turn": 6,
    "flush": 1,
    "empty": 2,
    "break_disk": 2,
    "damage": 1,
    "wait": 2,
    "crowd": 3,
    "forget": 1,
}


def walk(groups, seed, steps):
    """Let chance call the world; returns what has happened."""
    rng = random.Random(seed)
    chance = Chance(groups, rng.randrange(15, 24), rng.choice([6, 20, 20]), rng.choice([5, 1000, 1000]))
    for _ in range(steps):
        name = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        getattr(chance, name)(*arguments(name, rng))
        chance.check()
    chance.end_all()
    return chance.met


def arguments(name, rng):
    if name == "arrive":
        return rng.randrange(3), rng.choice([3, 12, 26, 26, 40, TOKENS_MAX]), rng.randrange(1, 7)
    if name == "proceed":
        return rng.randrange(10), rng.randrange(10)
    if name == "end":
        return rng.randrange(10), rng.choice(FAILS)
    if name == "break_disk":
        return rng.choice([*STATUS, Status.MISSING]), rng.choice([*STATUS, Status.NO_ROOM])
    if name == "wait":
        return (rng.choice([0.1, 1.0, 40.0]),)
    return (rng.randrange(30),) if name in ("admit", "preempt", "free", "finish", "damage", "crowd", "forget") else ()


EXPECTED = (
    "loads hits resumed refused freed some nothing resets preempted_loads freed_loads dropped_dirty refused_stores "
    "load_done load_failed store_done store_failed"
)


@pytest.mark.parametrize("groups", GROUPS)
def test_seeded_walks_read_no_wrong_byte_and_reach_everything(groups):
    """A rare order of events gives a request wrong bytes, or loses a block; or the walks no longer reach it."""
    met = Counter()
    for seed in range(5):
        met.update(walk(groups, seed, 400))
    assert not [event for event in EXPECTED.split() if not met[event.replace("_", " ")]], met


@pytest.mark.parametrize("groups", GROUPS)
def test_seeded_walks_on_a_device_are_ordered_with_the_kernels(groups, fake_cuda, monkeypatch):
    """A rare order of events moves a block while a kernel uses it: the fake device fails in that call."""
    close = on_device(monkeypatch, fake_cuda)
    met = Counter()
    for seed in range(2):
        met.update(walk(groups, seed, 200))
        close()
    assert met["load done"]
    assert met["store done"]


@pytest.mark.soak
@pytest.mark.parametrize("groups", GROUPS)
def test_long_walks(groups):
    """As above, for longer."""
    for seed in range(1000, 1100):
        walk(groups, seed, 600)
