"""Operations of those who ask: requests over leases, and a foreign top tier over jobs.

Owns how prompts are drawn: often one that was asked for just now. Each operation returns what it did; None if there
was nothing to do it to. Units: tokens, blocks, seconds of simulated time.
"""

from itertools import product
from random import Random

from kvtier.blocks.hashing import Keys
from kvtier.testing.exploring.hint_ops import session_drawn
from kvtier.testing.exploring.sleep_ops import is_asleep, unless_asleep
from kvtier.testing.exploring.world import World

OWNERS = ("ann", "bob", "cid")
FAMILIES, DEPTH_MAX, BRANCHES = 3, 4, 2
PROMPTS = [*product(range(FAMILIES), range(1, DEPTH_MAX + 1), range(BRANCHES))]
AGAIN, STREAMED, RECALLED_STREAMED = 0.4, 0.5, 0.8


def keys_drawn(world: World, rng: Random) -> Keys:
    """A prompt, often one that was asked for just now."""
    if world.recent and rng.random() < AGAIN:
        return world.keys_of(*rng.choice(world.recent))
    prompt = rng.randrange(FAMILIES), rng.randint(1, DEPTH_MAX), rng.randrange(BRANCHES)
    world.recent = [*world.recent[-1:], prompt]
    return world.keys_of(*prompt)


# ---------------------------------------------------------------- requests


def match(world: World, rng: Random) -> str:
    """A lookup that is kept for a while."""
    keys = keys_drawn(world, rng)
    tokens_max = rng.choice((None, None, None, keys.tokens - 1, 0))
    ttl_s = rng.choice((0.0, 0.5, 3.0, 30.0))
    made = world.requests.match(keys, rng.choice(OWNERS), tokens_max, ttl_s, session_drawn(rng))
    world.requests.matches.append(made)
    return repr(made)


def peek(world: World, rng: Random) -> str:
    keys = keys_drawn(world, rng)
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
    keys = keys_drawn(world, rng)
    tokens_max = rng.choice((None, None, keys.tokens - 1))
    made = world.requests.match(keys, rng.choice(OWNERS), tokens_max, 30.0, session_drawn(rng))
    blocks = world.blocks_of(keys) + rng.choice((0, 0, 0, 0, 1, 2))
    deadline_s = rng.choice((0.0, 0.5, 3.0, 9.0, 60.0))
    streamed = rng.random() < STREAMED
    text = unless_asleep(world, lambda: world.request(made, blocks, deadline_s, streamed=streamed))
    world.requests.matches.append(made)
    return text


def reserve(world: World, rng: Random) -> str | None:
    """A reservation over a match that somebody has, maybe a second one, maybe with too few blocks."""
    if not world.requests.matches:
        return None
    chosen = rng.choice(world.requests.matches)
    blocks = max(1, world.blocks_of(chosen.keys) + rng.choice((0, 0, 0, 1, -1)))
    deadline_s = rng.choice((0.5, 9.0))
    streamed = rng.random() < STREAMED
    return unless_asleep(world, lambda: world.request(chosen, blocks, deadline_s, streamed=streamed))


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


def recall(world: World, rng: Random) -> str | None:
    """Somebody asks for what lies in host memory, and mostly does not wait until all of it has come up."""
    if "gpu" not in world.setup.shape or "host" not in world.setup.shape or is_asleep(world):
        return None
    prompts = [prompt for prompt in PROMPTS if any(world.lies_in(1, key) for key in world.keys_of(*prompt).groups[0])]
    if not prompts:
        return None
    keys = world.keys_of(*rng.choice(prompts))
    made = world.requests.match(keys, rng.choice(OWNERS), None, 30.0, session_drawn(rng))
    text = world.request(made, world.blocks_of(keys), 9.0, streamed=rng.random() < RECALLED_STREAMED)
    world.requests.matches.append(made)
    world.plan()
    for flying in world.engine.underway.takeable():
        world.engine.enqueue(flying)
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


def owner_died(world: World, rng: Random) -> str:
    """An engine is dead: all that is held in its name comes back, its jobs' late answers change nothing."""
    owner = rng.choice(OWNERS)
    return f"{owner}: {world.release_owner(owner)} held"


def prefilled(world: World, rng: Random) -> str:
    """The engine tells how fast it computes: from far faster than any load to far slower."""
    start, tokens, seconds = rng.choice((0, 8)), rng.choice((4, 16, 64)), rng.choice((0.0001, 0.05, 0.5, 5.0))
    world.engine.core.prefilled(start, tokens, seconds)
    return f"{tokens} tokens behind {start} in {seconds} s"


# ---------------------------------------------------------------- a foreign top tier


def store_job(world: World, rng: Random) -> str:
    keys, owner = keys_drawn(world, rng), rng.choice(OWNERS)
    return unless_asleep(world, lambda: f"ticket {world.jobs.store(keys, owner)}")


def load_job(world: World, rng: Random) -> str:
    made = world.requests.match(keys_drawn(world, rng), rng.choice(OWNERS), None, 30.0)
    deadline_s = rng.choice((0.5, 9.0))
    if world.setup.in_place:
        return world.jobs.expect_no_load(made)
    return unless_asleep(world, lambda: f"ticket {world.jobs.load(made, deadline_s)}: {made.tokens} tokens")


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
