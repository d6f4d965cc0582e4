"""One run of the explorer: a seed, its setup, its schedule, and the end, at which nothing may be left over.

Owns nothing that outlives the run. Always: the same seed and number of operations give the same run, whatever ran
before it and in however many processes.

Units: operations, seconds of simulated time.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.ending import wind_up
from kvtier.testing.exploring.schedule import Schedule
from kvtier.testing.exploring.setup import Setup
from kvtier.testing.exploring.store import Disk
from kvtier.testing.exploring.world import World

STEPS = 220
Tell = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """How a run ended. `failure` is empty if nothing was wrong; else what, where and after which operation."""

    seed: int
    failure: str = ""
    failed_at: int | None = None  # operation, from 1; None: at the end
    coverage: Coverage = field(default_factory=Coverage)


def explore(
    seed: int, steps: int = STEPS, tell: Tell | None = None, disk: Callable[[Setup], Disk] | None = None
) -> Result:
    """Run a seed. tell: hears of every operation. disk: makes the disk under the cache, for a tier of your own."""
    rng = Random(seed)
    setup = Setup.drawn(rng)
    say = tell or _say_nothing
    say(f"seed {seed}: {setup}")
    result = Result(seed)
    try:
        world = World(setup, rng, disk(setup) if disk and "disk" in setup.shape else None)
    except Exception:  # noqa: BLE001  a cache that cannot be opened is a finding, too
        result.failure, result.failed_at = traceback.format_exc(limit=-4), 0
        return result
    result.coverage = world.coverage
    schedule = Schedule(rng, setup.rough)
    step: int | None = 0
    try:
        world.check()
        for step in range(1, steps + 1):
            told = schedule.step(world)
            say(f"{step:4} {world.clock.now():8.2f} s  {told}")
            for heard in look(world):
                say(f"{'':16} -> {heard}")
        step = None
        say("     wind up")
        wind_up(world)
    except Exception:  # noqa: BLE001  whatever goes wrong is what is looked for
        result.failure, result.failed_at = traceback.format_exc(limit=-4), step
    finally:
        world.end_engine()
    return result


def look(world: World) -> list[str]:
    """After an operation: fetch the answers, unless nobody listens, and check all that must hold. Returns them."""
    world.deaf = max(0, world.deaf - 1)
    heard = [] if world.deaf else world.listen()
    world.check()
    return heard


def _say_nothing(text: str) -> None:
    """Nobody listens."""
