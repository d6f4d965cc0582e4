"""Operations around the top tier's sleep: everybody leaves, its memory goes, it comes back, or is refused meanwhile.

Each returns what it did; None if there was nothing to do it to. Units: operations, slots.
"""

from collections.abc import Callable
from random import Random

from kvtier.errors import Asleep
from kvtier.testing.exploring.world import World

ALONE, AWAKE_ALREADY, RESTORED = 0.7, 0.9, 0.7  # odds


def is_asleep(world: World) -> bool:
    """Whether the top tier gives no slots for that reason."""
    return world.engine.core.residency.levels[0].asleep


def unless_asleep(world: World, verb: Callable[[], str]) -> str:
    """What needs slots, or its refusal."""
    try:
        told = verb()
    except Asleep:
        told = ""
    assert told or is_asleep(world), "a cache that is awake says that it sleeps"
    return told or "refused: it sleeps"


def send_away(world: World) -> None:
    """Nobody has a lease any more, or waits for one."""
    for ticket, pending in list(world.requests.pending.items()):
        if not pending.cancelled and ticket not in world.jobs.kinds:
            world.cancel(ticket)
    for ticket in list(world.requests.leases):
        world.requests.release(ticket)
    for job_id in list(world.jobs.running):
        world.jobs.end(job_id, world.rng, 0.0)


def resize(world: World, rng: Random) -> str | None:
    if world.setup.shape[0] != "gpu":
        return None
    slots = rng.randint(2, world.setup.gpu_slots_max)
    return unless_asleep(world, lambda: world.questions.resize(slots))


def sleep(world: World, rng: Random) -> str | None:
    """The top tier's memory is given back, often after everybody has gone."""
    if world.setup.shape[0] != "gpu":
        return None
    if rng.random() < ALONE:
        send_away(world)
    return world.questions.sleep(leased=len(world.engine.core._leases) > 0)


def wake(world: World, rng: Random) -> str | None:
    """It is wanted again; sometimes it was awake."""
    if world.setup.shape[0] != "gpu" or (not is_asleep(world) and rng.random() < AWAKE_ALREADY):
        return None
    return world.questions.wake(restore=rng.random() < RESTORED)
