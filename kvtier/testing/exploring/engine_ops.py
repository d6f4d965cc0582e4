"""Operations on the cache as a whole: movement, time, drops, sizes, and the end of its process.

Each returns what it did; None if there was nothing to do it to. Units: operations, seconds of simulated time.
"""

from random import Random

from kvtier.testing.exploring import process
from kvtier.testing.exploring.caller_ops import keys_drawn, recall
from kvtier.testing.exploring.sleep_ops import is_asleep, send_away
from kvtier.testing.exploring.world import EPOCHS, World
from kvtier.types import BatchDone

HINT_KEPT_S = 31.0  # longer than what a hint brought up is kept

# ---------------------------------------------------------------- movement and time


def plan(world: World, rng: Random) -> str:
    return f"{len(world.plan())} batches"


def tear(world: World, rng: Random) -> str | None:
    """A batch begins to write into its target."""
    startable = world.engine.underway.startable(world.clock.now())
    if not startable:
        return None
    flying = rng.choice(startable)
    world.engine.underway.tear(flying)
    return repr(flying)


def carry(world: World, rng: Random) -> str | None:
    """A batch is carried out; its acknowledgement is on its way."""
    startable = world.engine.underway.startable(world.clock.now())
    if not startable:
        return None
    flying = rng.choice(startable)
    world.carry(flying)
    return repr(flying)


def take(world: World, rng: Random) -> str | None:
    """A device's stream takes a batch: who can wait on a stream waits no longer for its acknowledgement."""
    takeable = world.engine.underway.takeable()
    if not takeable:
        return None
    flying = rng.choice(takeable)
    world.engine.enqueue(flying)
    return repr(flying)


def end(world: World, rng: Random) -> str | None:
    """A batch is acknowledged."""
    endable = world.engine.underway.endable(world.clock.now())
    if not endable:
        return None
    flying = rng.choice(endable)
    world.end(flying)
    return repr(flying)


def run(world: World, rng: Random) -> str:
    return f"{world.run()} batches ended"


def wait(world: World, rng: Random) -> str:
    seconds = rng.choice((0.01, 0.1, 0.3, 1.0, 2.0, 40.0))
    world.clock.advance(seconds)
    return f"{seconds} s"


def repeat_ack(world: World, rng: Random) -> str | None:
    """An acknowledgement that was taken arrives once more: it is noted, and nothing else."""
    if not world.engine.acknowledged:
        return None
    done = rng.choice(world.engine.acknowledged)
    expect_ignored(world, done)
    return f"batch {done.batch_id}"


def expect_ignored(world: World, done: BatchDone) -> None:
    before = world.engine.state()
    late = world.engine.core.counters.engine()["late_results"]
    world.engine.core.apply(done, world.clock.now())
    assert world.engine.state() == before, f"batch {done.batch_id} was acknowledged twice, and it mattered"
    assert world.engine.core.counters.engine()["late_results"] == late + 1


def prefetch(world: World, rng: Random) -> str:
    world.engine.core.prefetch(keys_drawn(world, rng), world.clock.now())
    return f"{world.engine.core.counters.engine()['prefetched_blocks']} blocks so far"


def nobody_came(world: World, rng: Random) -> str:
    """What was brought up for a hint waits for its request, until it is let go."""
    world.engine.core.prefetch(keys_drawn(world, rng), world.clock.now())
    world.run()
    world.clock.advance(HINT_KEPT_S)
    return f"{len(world.plan())} batches"


def nap(world: World, rng: Random) -> str | None:
    """All of the top tier's memory goes and comes back empty, and somebody asks for what lies below by then."""
    if world.setup.shape[:2] != ("gpu", "host") or world.deaf or is_asleep(world):
        return None
    send_away(world)
    told = [world.questions.sleep(leased=len(world.engine.core._leases) > 0)]
    world.run()
    told.append(world.questions.wake(restore=False))
    world.run()
    told.append(recall(world, rng) or "nothing is left")
    return "; ".join(told)


def be_deaf(world: World, rng: Random) -> str | None:
    """Nobody fetches answers for a while."""
    if world.deaf:
        return None
    world.be_deaf(rng.randint(1, 6))
    return f"for {world.deaf} operations"


# ---------------------------------------------------------------- the whole cache


def flush(world: World, rng: Random) -> str:
    return world.questions.flush()


def drop(world: World, rng: Random) -> str:
    """A namespace is dropped: this one, or another that there is."""
    known = [world.engine.namespaces.fingerprint_of(i) for i in range(len(world.engine.namespaces))]
    return world.questions.drop(rng.choice((world.engine.fingerprint, rng.choice(known))))


def epoch(world: World, rng: Random) -> str:
    chosen = rng.choice(EPOCHS)
    world.set_epoch(chosen)
    return chosen


def abandon(world: World, rng: Random) -> str | None:
    """Nobody waits for a flush, drop, resize, sleep or wake any more."""
    waiting = [t for t in sorted(world.questions.asked) if t not in world.questions.abandoned]
    return world.questions.abandon(rng.choice(waiting)) if waiting else None


def crash(world: World, rng: Random) -> str:
    return process.crash(world, rng.randint(0, 4))


def restart(world: World, rng: Random) -> str:
    return process.close(world)


def lose_device(world: World, rng: Random) -> str:
    """The top tier's device is gone; what lies below it survives into the next process."""
    return process.lose_device(world, flushed=rng.random() < 0.5)
