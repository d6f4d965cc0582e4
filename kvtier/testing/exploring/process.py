"""The end of a process, by crash, by close or with its device, and the beginning of the next over what it has left.

Owns nothing. Always: of the writes under way some are in the store, whole, and the others are not; nothing is
remembered but what the disk holds, and a lease of an earlier process is good for nothing.

Units: batches, rows of the disk.
"""

from kvtier.cache.leases import Lease
from kvtier.errors import DeviceLost, UsageError
from kvtier.testing.exploring.store import GlassDisk
from kvtier.testing.exploring.world import World

STALE_TRIED = 2


def crash(world: World, carried_out: int) -> str:
    """The process dies. Of the writes under way the first so many are in the store, whole; the rest is not."""
    engine = world.engine
    if engine.disk is not None:
        for flying in engine.underway.writes_to(engine.disk)[:carried_out]:
            if flying.done is None:
                world.carry(flying)
    return _restart(world)


def close(world: World) -> str:
    """The process ends well: what is under way ends first."""
    world.engine.underway.hurry()
    while endable := world.engine.underway.endable(world.clock.now()):
        world.end(endable[0])
    return _restart(world)


def lose_device(world: World, *, flushed: bool) -> str:
    """The device of the top tier is gone. All that waits for it hears of it; a process must start anew."""
    world.deaf = 0
    core = world.engine.core
    core.lose_device()
    world.listen()
    waiting = [ticket for ticket, pending in world.requests.pending.items() if not pending.cancelled]
    waiting += world.questions.of_the_top
    assert not waiting, f"tickets {waiting} wait for slots of a lost device"
    world.check()
    try:
        core.submit_reserve(core.blank_match(world.keys_of(0, 1, 0), "late", 0), 1, 0.0, 0.0)
    except DeviceLost:
        world.coverage.happened("device lost")
    else:
        raise AssertionError("slots of a lost device are given away")
    for ticket in list(world.requests.leases):
        world.requests.release(ticket)
    for job_id in list(world.jobs.running):
        world.jobs.end(job_id, world.rng, 1.0)
    if flushed:
        world.questions.flush()
    world.run()
    world.check()
    return close(world)


def _restart(world: World) -> str:
    rows = world.checks.rows()
    for point, asked in world.questions.points().items():
        if asked:
            world.coverage.cancelled(point)
    world.end_engine()
    stale = [*world.requests.stale, *(held.lease for held in world.requests.leases.values())]
    world.orders.restarted()
    if world.budget is not None:
        world.budget.restarted()
    world.begin()
    if not isinstance(world.medium, GlassDisk):
        rows = world.checks.rows()  # with writes whose acknowledgement nobody heard
    world.truth.restart(rows)
    world.expect_restored(len(rows))
    for lease in stale[-STALE_TRIED:]:
        _expect_foreign(world, lease)
    return f"{len(rows)} rows on the disk"


def _expect_foreign(world: World, lease: Lease) -> None:
    try:
        world.engine.core.release_lease(lease)
    except UsageError:
        return
    raise AssertionError("a lease of an earlier process is taken")
