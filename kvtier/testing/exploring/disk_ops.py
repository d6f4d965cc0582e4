"""Operations on the disk: it fails, is filled by others, and rots.

Each returns what it did; None if there was nothing to do it to. Units: pages.
"""

from random import Random

from kvtier.testing.exploring.caller_ops import OWNERS
from kvtier.testing.exploring.store import GlassDisk
from kvtier.testing.exploring.world import World
from kvtier.testing.faulty import Odds
from kvtier.types import PAGE_BYTES


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
