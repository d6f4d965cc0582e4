"""Operations on the disk: it fails, hangs, is filled by others, and rots.

Each returns what it did; None if there was nothing to do it to. Units: pages, seconds of simulated time.
"""

from collections.abc import Iterator
from random import Random

from kvtier.blocks.hashing import Keys
from kvtier.testing.exploring.caller_ops import OWNERS
from kvtier.testing.exploring.sleep_ops import is_asleep, unless_asleep
from kvtier.testing.exploring.store import GlassDisk
from kvtier.testing.exploring.world import World
from kvtier.testing.faulty import Odds
from kvtier.types import PAGE_BYTES, BlockKey

HANGS_S = 7.0  # longer than a read may take
DAY_S = 86_400.0
ROTS = 0.6  # odds


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
    text = unless_asleep(world, lambda: world.request(made, world.blocks_of(keys), 9.0))
    world.requests.matches.append(made)
    return f"places {places}, {text}"


def day(world: World, rng: Random) -> str | None:
    """A day passes: the disk is looked through again, and what rots meanwhile is found. Its budget is saved up."""
    if world.engine.disk is None:
        return None
    told = (damage(world, rng) if rng.random() < ROTS else None) or "nothing rots"
    world.clock.advance(DAY_S)
    return f"{told}, {world.run()} batches ended"


def hang(world: World, rng: Random) -> str | None:
    """The disk hangs in the middle of a load. It is left alone, and, if it has answered until then, tried again."""
    wanted = asked_of_disk(world, rng)
    if wanted is None:
        return None
    world.plan()
    loads = [f for f in world.engine.underway.flying if f.batch.source == world.engine.disk and f.done is None]
    for flying in loads:
        flying.due_s = world.clock.now() + HANGS_S
    if not world.deaf:
        world.listen()
    world.clock.advance(HANGS_S - 1.0)
    world.plan()
    if rng.random() < 0.7:
        world.clock.advance(2.0)
        world.run()
    return f"{len(loads)} loads, {wanted}"


def cancel_on_the_way(world: World, rng: Random) -> str | None:
    """Nobody wants any more what is on its way up from the disk, at one of its hops."""
    wanted = asked_of_disk(world, rng)
    if wanted is None:
        return None
    ticket = next(reversed(world.requests.pending))
    for _ in range(rng.randint(1, 4)):
        world.plan()
        if (endable := world.engine.underway.endable(world.clock.now())) and rng.random() < 0.5:
            world.end(rng.choice(endable))
    return f"{wanted}; {world.cancel(ticket)}"


def asked_of_disk(world: World, rng: Random) -> str | None:
    """Somebody asks for a prompt, some of which lies on the disk only; None if there is no such."""
    prompts = [prompt for prompt in world.recent if any(map(world.lies_only_on_disk, _blocks(world.keys_of(*prompt))))]
    if not prompts or is_asleep(world):
        return None
    keys = world.keys_of(*rng.choice(prompts))
    made = world.requests.match(keys, rng.choice(OWNERS), None, 30.0)
    text = world.request(made, world.blocks_of(keys), 9.0)
    world.requests.matches.append(made)
    return text


def _blocks(keys: Keys) -> Iterator[BlockKey]:
    return (key for row in keys.groups for key in row)
