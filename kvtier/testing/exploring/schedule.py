"""The schedule: which operations there are, how often each is drawn, and what chance decides about them.

Owns the odds of one run: some operations are drawn far more often in one run than in another, so that runs differ in
kind and not only in order. Always: an operation draws from the one `Random` of its run and from nothing else.

Units: operations, seconds of simulated time.
"""

from collections.abc import Callable
from random import Random

from kvtier.blocks.hashing import Keys
from kvtier.testing.exploring.store import GlassDisk
from kvtier.testing.exploring.world import EPOCHS, World
from kvtier.testing.faulty import Odds
from kvtier.types import PAGE_BYTES, BatchDone

OWNERS = ("ann", "bob", "cid")
FAMILIES, DEPTH_MAX, BRANCHES = 3, 4, 2
AGAIN = 0.4
Operation = Callable[[World, Random], str | None]  # None: there is nothing to do it to


def _keys(world: World, rng: Random) -> Keys:
    """A prompt, often one that was asked for just now."""
    if world.recent and rng.random() < AGAIN:
        return world.keys_of(*rng.choice(world.recent))
    prompt = rng.randrange(FAMILIES), rng.randint(1, DEPTH_MAX), rng.randrange(BRANCHES)
    world.recent = [*world.recent[-1:], prompt]
    return world.keys_of(*prompt)


# ---------------------------------------------------------------- requests


def match(world: World, rng: Random) -> str:
    """A lookup that is kept for a while."""
    keys = _keys(world, rng)
    tokens_max = rng.choice((None, None, None, keys.tokens - 1, 0))
    made = world.requests.match(keys, rng.choice(OWNERS), tokens_max, rng.choice((0.0, 0.5, 3.0, 30.0)))
    world.requests.matches.append(made)
    return repr(made)


def peek(world: World, rng: Random) -> str:
    keys = _keys(world, rng)
    return f"{world.requests.peek(keys, rng.choice((None, keys.tokens - 1)))} tokens"


def unmatch(world: World, rng: Random) -> str | None:
    """A match is given back, sometimes twice."""
    if not world.requests.matches:
        return None
    chosen = rng.choice(world.requests.matches)
    for _ in range(rng.choice((1, 1, 2))):
        world.engine.core.release_match(chosen)
    return repr(chosen)


def request(world: World, rng: Random) -> str:
    """A lookup and a reservation over it."""
    keys = _keys(world, rng)
    tokens_max = rng.choice((None, None, keys.tokens - 1))
    made = world.requests.match(keys, rng.choice(OWNERS), tokens_max, 30.0)
    blocks = world.blocks_of(keys) + rng.choice((0, 0, 0, 0, 1, 2))
    text = world.request(made, blocks, rng.choice((0.0, 0.5, 3.0, 9.0, 60.0)))
    world.requests.matches.append(made)
    return text


def reserve(world: World, rng: Random) -> str | None:
    """A reservation over a match that somebody has, maybe a second one, maybe with too few blocks."""
    if not world.requests.matches:
        return None
    chosen = rng.choice(world.requests.matches)
    blocks = max(1, world.blocks_of(chosen.keys) + rng.choice((0, 0, 0, 1, -1)))
    return world.request(chosen, blocks, rng.choice((0.5, 9.0)))


def commit(world: World, rng: Random) -> str | None:
    """A lease computes some of its blocks, or all."""
    owing = [ticket for ticket, held in world.requests.leases.items() if held.owed]
    if not owing:
        return None
    ticket = rng.choice(owing)
    return f"lease {ticket}: {world.requests.commit(ticket, rng.choice((1, 2, 99, 99, 99)))}"


def release(world: World, rng: Random) -> str | None:
    if not world.requests.leases:
        return None
    ticket = rng.choice(list(world.requests.leases))
    world.requests.release(ticket)
    return f"lease {ticket}"


def serve(world: World, rng: Random) -> str:
    """A whole request in one go, if nothing is in its way."""
    text = request(world, rng)
    if world.deaf:
        return text
    world.listen()
    world.run()
    for ticket in list(world.requests.leases)[-1:]:
        world.requests.commit(ticket, 99)
        world.requests.release(ticket)
    return text


def cancel(world: World, rng: Random) -> str | None:
    waiting = [ticket for ticket, pending in world.requests.pending.items() if not pending.cancelled]
    waiting = [ticket for ticket in waiting if ticket not in world.jobs.kinds]
    return world.cancel(rng.choice(waiting)) if waiting else None


def misuse(world: World, rng: Random) -> str | None:
    """A lease that was given back is given back again, and committed under."""
    if not world.requests.stale:
        return None
    chosen = rng.choice(world.requests.stale)
    world.requests.misuse(chosen)
    return repr(chosen)


# ---------------------------------------------------------------- a foreign top tier


def store_job(world: World, rng: Random) -> str:
    return f"ticket {world.jobs.store(_keys(world, rng), rng.choice(OWNERS))}"


def load_job(world: World, rng: Random) -> str:
    made = world.requests.match(_keys(world, rng), rng.choice(OWNERS), None, 30.0)
    ticket = world.jobs.load(made, rng.choice((0.5, 9.0)))
    return f"ticket {ticket}: {made.tokens} tokens"


def end_job(world: World, rng: Random) -> str | None:
    """A job ends well, in part or not at all, and sometimes its answer comes twice."""
    if not world.jobs.running:
        return None
    job_id = rng.choice(list(world.jobs.running))
    failing = rng.choice((0.0, 0.0, 0.3, 1.0))
    kind = world.jobs.running[job_id].job.kind
    text = world.jobs.end(job_id, rng, failing)
    if failing == 1.0:
        world.coverage.cancelled(f"{kind} job")
    if rng.random() < 0.2:
        world.jobs.repeat()
    return text


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
    world.engine.core.prefetch(_keys(world, rng), world.clock.now())
    return f"{world.engine.core.counters.engine()['prefetched_blocks']} blocks so far"


def be_deaf(world: World, rng: Random) -> str | None:
    """Nobody fetches answers for a while."""
    if world.deaf:
        return None
    world.be_deaf(rng.randint(1, 6))
    return f"for {world.deaf} operations"


# ---------------------------------------------------------------- the whole cache


def flush(world: World, rng: Random) -> str:
    return world.flush()


def drop(world: World, rng: Random) -> str:
    """A namespace is dropped: this one, or another that there is."""
    known = [world.engine.namespaces.fingerprint_of(i) for i in range(len(world.engine.namespaces))]
    return world.drop(rng.choice((world.engine.fingerprint, rng.choice(known))))


def epoch(world: World, rng: Random) -> str:
    chosen = rng.choice(EPOCHS)
    world.set_epoch(chosen)
    return chosen


def resize(world: World, rng: Random) -> str | None:
    if world.setup.shape[0] != "gpu":
        return None
    return world.resize(rng.randint(2, world.setup.gpu_slots_max))


def abandon(world: World, rng: Random) -> str | None:
    """Nobody waits for a flush, drop or resize any more."""
    waiting = [t for t in (*world.flushes, *world.drops, *world.resizes) if t not in world.abandoned]
    return world.abandon(rng.choice(waiting)) if waiting else None


def crash(world: World, rng: Random) -> str:
    return world.crash(rng.randint(0, 4))


def restart(world: World, rng: Random) -> str:
    return world.close()


# ---------------------------------------------------------------- the disk


def fail(world: World, rng: Random) -> str | None:
    """The disk begins to fail, in some ways and not in others."""
    if world.engine.faulty is None:
        return None
    for name in Odds.names():
        setattr(world.odds, name, rng.choice((0.0, 0.0, 0.2, 1.0)))
    return repr(world.odds)


def mend(world: World, rng: Random) -> str | None:
    if world.engine.faulty is None:
        return None
    world.mend()
    return "no faults"


def squeeze(world: World, rng: Random) -> str | None:
    """Others take some of the disk, or leave it."""
    if not isinstance(world.medium, GlassDisk):
        return None
    pages = rng.choice((None, rng.randint(0, world.setup.extents * world.setup.extent_pages)))
    world.medium.squeeze(None if pages is None else pages * PAGE_BYTES)
    return "all of it" if pages is None else f"{pages} pages are left"


def damage(world: World, rng: Random) -> str | None:
    """A block on the disk rots."""
    if not isinstance(world.medium, GlassDisk):
        return None
    places = sorted(row.place for row in world.medium.rows())
    if not places:
        return None
    place = rng.choice(places)
    world.medium.damage(place)
    return f"place {place}"


def spoil(world: World, rng: Random) -> str | None:
    """A block that lies on the disk only rots, and somebody asks for it."""
    if not isinstance(world.medium, GlassDisk) or not world.recent:
        return None
    prompt = rng.choice(world.recent)
    keys = world.keys_of(*prompt)
    lowest = [key for row in keys.groups for key in row if world.lies_only_on_disk(key)]
    if not lowest:
        return None
    chosen = rng.choice(lowest)
    places = [
        row.place for row in world.medium.rows() if (row.fingerprint, row.key) == (world.engine.fingerprint, chosen)
    ]
    for place in places:
        world.medium.damage(place)
    made = world.requests.match(keys, rng.choice(OWNERS), None, 30.0)
    text = world.request(made, world.blocks_of(keys), 9.0)
    world.requests.matches.append(made)
    return f"places {places}, {text}"


WEIGHTS: dict[Operation, float] = {
    request: 9,
    serve: 12,
    match: 4,
    peek: 2,
    unmatch: 3,
    reserve: 3,
    commit: 12,
    release: 16,
    cancel: 5,
    misuse: 1,
    store_job: 2,
    load_job: 2,
    end_job: 8,
    plan: 18,
    tear: 4,
    carry: 8,
    end: 26,
    run: 4,
    wait: 5,
    repeat_ack: 2,
    prefetch: 5,
    be_deaf: 2,
    flush: 3,
    drop: 1.5,
    epoch: 1,
    resize: 3,
    abandon: 1,
    crash: 1.5,
    restart: 1.2,
    fail: 1,
    mend: 2,
    squeeze: 1,
    damage: 1,
    spoil: 2.5,
}
ROUGH = (fail, squeeze, damage, spoil)
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
