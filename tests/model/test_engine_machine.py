"""The explorer's operations in the order that Hypothesis chooses, which shrinks what it finds to a short story.

The seeds of the explorer (`test_explore`) go deeper; this says in a few operations what is wrong.
"""

from math import ceil
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvtier.testing.exploring.ending import wind_up
from kvtier.testing.exploring.run import look
from kvtier.testing.exploring.schedule import WEIGHTS
from kvtier.testing.exploring.setup import Setup
from kvtier.testing.exploring.world import World

OPERATIONS = [operation for operation, weight in WEIGHTS.items() for _ in range(ceil(weight / 2))]


class EngineMachine(RuleBasedStateMachine):
    """One rule; what chance decides within an operation is drawn by Hypothesis, too."""

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed):
        rng = Random(seed)
        self.world = World(Setup.drawn(rng), rng)

    @rule(operation=st.sampled_from(OPERATIONS), rng=st.randoms(use_true_random=False))
    def operate(self, operation, rng):
        told = operation(self.world, rng)
        if told is not None:
            note(f"{operation.__name__}: {told}")
            look(self.world)

    def teardown(self):
        if hasattr(self, "world"):
            wind_up(self.world)
            self.world.end_engine()


class TestEngine(EngineMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.soak
class TestEngineForLong(EngineMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
    )
