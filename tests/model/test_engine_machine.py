"""The whole engine under random requests, faults and orders, against a dict that shares no code with it.

Two drivers over one world: a Hypothesis machine, which shrinks what it finds, and seeded walks, which go deeper.
"""

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.types import Status
from tests.engine_world import DISK, World

KEYS = {"family": st.integers(0, 1), "depth": st.integers(1, 5), "branch": st.integers(0, 1)}


class EngineMachine(RuleBasedStateMachine):
    """One rule per operation of the world."""

    @initialize(
        host=st.booleans(), groups=st.integers(1, 2), policies=st.tuples(*[st.sampled_from(["lru", "arc"])] * 3)
    )
    def start(self, host, groups, policies):
        self.world = World(host, groups, policies)

    @rule(deadline_s=st.sampled_from([1.0, 9.0]), **KEYS)
    def request(self, family, depth, branch, deadline_s):
        self.world.request(self.world.keys_of(family, depth, branch), deadline_s)

    @rule(keep=st.booleans(), **KEYS)
    def serve(self, family, depth, branch, keep):
        self.world.serve(self.world.keys_of(family, depth, branch), keep)

    @rule(release=st.booleans(), **KEYS)
    def look(self, family, depth, branch, release):
        self.world.look(self.world.keys_of(family, depth, branch), release)

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def compute(self, data):
        self.world.compute(data.draw(st.sampled_from(sorted(self.world.leases))))

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def release(self, data):
        self.world.release(data.draw(st.sampled_from(sorted(self.world.leases))))

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.pending))))

    @rule()
    def plan(self):
        self.world.plan()

    @precondition(lambda self: self.world.engine.held)
    @rule(data=st.data())
    def finish(self, data):
        self.world.finish(data.draw(st.sampled_from(self.world.finishable())))

    @rule(status=st.sampled_from([None, Status.FAILED, Status.NO_ROOM]))
    def break_writes(self, status):
        self.world.disk.fail_write = status

    @rule(status=st.sampled_from([None, Status.FAILED, Status.MISSING, Status.CORRUPT]))
    def break_reads(self, status):
        self.world.disk.fail_read = status

    @rule(place=st.integers(0, DISK - 1))
    def damage(self, place):
        self.world.disk.corrupt.add(place)

    @rule(seconds=st.sampled_from([0.3, 2.0, 40.0]))
    def wait(self, seconds):
        self.world.engine.clock.advance(seconds)

    @rule(**KEYS)
    def prefetch(self, family, depth, branch):
        self.world.engine.core.prefetch(self.world.keys_of(family, depth, branch), self.world.engine.clock.now())

    @rule()
    def flush(self):
        self.world.engine.core.submit_flush()

    @rule(blocks=st.one_of(st.none(), st.integers(0, DISK)))
    def squeeze(self, blocks):
        self.world.squeeze(blocks)

    @rule(slots=st.integers(1, 12))
    def resize(self, slots):
        self.world.resize(slots)

    @rule()
    def reset(self):
        self.world.reset()

    @rule()
    def restart(self):
        self.world.restart()

    @invariant()
    def bookkeeping_agrees(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.wind_up()


class TestEngine(EngineMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.soak
class TestEngineForLong(EngineMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
    )


# ---------------------------------------------------------------- seeded walks

WEIGHTS = {
    "request": 14,
    "serve": 14,
    "look": 4,
    "compute": 12,
    "release": 14,
    "cancel": 2,
    "plan": 20,
    "finish": 30,
    "run": 4,
    "wait": 4,
    "prefetch": 5,
    "flush": 5,
    "resize": 4,
    "squeeze": 1,
    "restart": 3,
    "reset": 1,
    "break_writes": 1,
    "break_reads": 1,
    "mend": 4,
    "damage": 1,
}


def walk(seed, steps):
    """Let chance call the world; returns the counters of all engines it had."""
    rng = random.Random(seed)
    world = World(seed % 3 > 0, 1 + seed % 2, rng.choices(["lru", "arc"], k=3))
    total = Counter()
    for _ in range(steps):
        name = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        if name == "restart":
            total.update(numbers(world.engine.core.stats()))
        step(world, name, rng)
        world.check()
    total.update(numbers(world.wind_up()))
    return total


def step(world, name, rng):
    keys = world.keys_of(rng.randrange(3), rng.randint(1, 5), rng.randrange(2))
    if name == "request":
        world.request(keys, rng.choice([1.0, 9.0]))
    elif name == "serve":
        world.serve(keys, rng.random() < 0.2)
    elif name == "look":
        world.look(keys, rng.random() < 0.5)
    elif name in ("compute", "release") and world.leases:
        getattr(world, name)(rng.choice(sorted(world.leases)))
    elif name == "cancel" and world.pending:
        world.cancel(rng.choice(sorted(world.pending)))
    elif name == "finish" and world.engine.held:
        world.finish(rng.choice(world.finishable()))
    elif name in ("plan", "run", "reset", "restart"):
        getattr(world, name)()
    elif name == "wait":
        world.engine.clock.advance(rng.choice([0.3, 2.0, 40.0]))
    elif name == "prefetch":
        world.engine.core.prefetch(keys, world.engine.clock.now())
    elif name == "flush":
        world.engine.core.submit_flush()
    elif name == "resize":
        world.resize(rng.randint(1, 2 * world.gpu))
    elif name == "squeeze":
        world.squeeze(rng.randint(0, world.disk.blocks_max))
    elif name == "break_writes":
        world.disk.fail_write = rng.choice([Status.FAILED, Status.NO_ROOM])
    elif name == "break_reads":
        world.disk.fail_read = rng.choice([Status.FAILED, Status.MISSING, Status.CORRUPT])
    elif name == "mend":
        world.disk.fail_write = world.disk.fail_read = world.disk.allowed_bytes = None
        world.disk.corrupt.clear()
    elif name == "damage":
        world.disk.corrupt.add(rng.randrange(world.disk.blocks_max))


def numbers(stats):
    """Counters as one flat mapping."""
    flat = {name: value for name, value in stats.items() if isinstance(value, int)}
    for tier, values in stats["tiers"].items():
        flat |= {f"{tier}.{name}": value for name, value in values.items() if isinstance(value, int)}
    return flat


def test_seeded_walks_find_no_wrong_byte_and_reach_everything():
    """A rare order of events serves wrong bytes or loses a slot; or the walks no longer get to where it hurts."""
    total = Counter()
    for seed in range(60):
        total.update(walk(seed, 250))
    reached = ["restored_tokens", "deadline_cuts", "failed_cuts", "duplicate_blocks", "late_results", "no_room"]
    reached += ["matches_expired", "prefetched_blocks", "gpu.dropped_dirty", "gpu.reclaimed", "host.restored_tokens"]
    reached += ["lmdb.restored_tokens", "lmdb.evicted", "lmdb.corrupt", "lmdb.missing", "lmdb.read_failed"]
    reached += ["lmdb.write_failed", "lmdb.no_room", "host.reclaimed"]
    assert not [name for name in reached if total[name] < 5], total


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_long_walks(seed):
    """As above, for longer."""
    walk(seed, 20_000)
