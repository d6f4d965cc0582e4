"""The schedule: which operations there are, how often each is drawn, and what chance decides about them.

Owns the odds of one run: some operations are drawn far more often in one run than in another, so that runs differ in
kind and not only in order. Always: an operation draws from the one `Random` of its run and from nothing else.

Units: operations, seconds of simulated time.
"""

from collections.abc import Callable
from random import Random

from kvtier.testing.exploring import caller_ops, disk_ops, engine_ops, hint_ops, sleep_ops
from kvtier.testing.exploring.world import World

Operation = Callable[[World, Random], str | None]  # None: there is nothing to do it to

WEIGHTS: dict[Operation, float] = {
    caller_ops.request: 9,
    caller_ops.serve: 12,
    caller_ops.recall: 5,
    caller_ops.match: 4,
    caller_ops.peek: 2,
    caller_ops.unmatch: 3,
    caller_ops.reserve: 3,
    caller_ops.commit: 12,
    caller_ops.release: 16,
    caller_ops.cancel: 5,
    caller_ops.misuse: 1,
    caller_ops.owner_died: 0.5,
    caller_ops.prefilled: 2,
    caller_ops.store_job: 2,
    caller_ops.load_job: 2,
    caller_ops.end_job: 8,
    hint_ops.hint: 6,
    hint_ops.ends: 1.5,
    hint_ops.false_ends: 0.4,
    engine_ops.plan: 18,
    engine_ops.tear: 4,
    engine_ops.carry: 8,
    engine_ops.take: 8,
    engine_ops.end: 26,
    engine_ops.run: 4,
    engine_ops.wait: 5,
    engine_ops.repeat_ack: 2,
    engine_ops.prefetch: 5,
    engine_ops.nobody_came: 0.5,
    engine_ops.nap: 2,
    engine_ops.be_deaf: 2,
    engine_ops.flush: 3,
    engine_ops.drop: 1.5,
    engine_ops.epoch: 1,
    sleep_ops.resize: 3,
    sleep_ops.sleep: 0.7,
    sleep_ops.wake: 2,
    engine_ops.abandon: 1,
    engine_ops.crash: 1.5,
    engine_ops.restart: 1.2,
    engine_ops.lose_device: 0.4,
    disk_ops.fail: 1,
    disk_ops.mend: 2,
    disk_ops.squeeze: 1,
    disk_ops.damage: 1,
    disk_ops.spoil: 2.5,
    disk_ops.day: 0.8,
    disk_ops.hang: 0.7,
    disk_ops.cancel_on_the_way: 1.5,
}
ROUGH = (disk_ops.fail, disk_ops.squeeze, disk_ops.damage, disk_ops.spoil)
FACTORS = (0.2, 1.0, 1.0, 3.0)


class Schedule:
    """Draws operations for one run."""

    def __init__(self, rng: Random, rough: float) -> None:
        """rough: how often the disk fails, in proportion to the usual."""
        self._rng = rng
        self._operations = list(WEIGHTS)
        self._weights = [weight * rng.choice(FACTORS) for weight in WEIGHTS.values()]
        for index, operation in enumerate(self._operations):
            if operation in ROUGH:
                self._weights[index] *= rough

    def step(self, world: World) -> str:
        """One operation that there is something to do it to; what it was."""
        while True:
            (operation,) = self._rng.choices(self._operations, self._weights)
            told = operation(world, self._rng)
            if told is not None:
                return f"{operation.__name__}: {told}"
