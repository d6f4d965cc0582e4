"""What callers say of their sessions: true, false, and about sessions that there never were.

Each operation returns what was said. Units: seconds of simulated time.
"""

from random import Random

from kvtier.engine.hints import Advice, rank_of
from kvtier.testing.exploring.world import World

SESSIONS = ("chat", "tool", "code")
STRANGER = "stranger"
KNOWN = 0.85  # odds
FALSE_ENDS = 9


def session_drawn(rng: Random) -> str | None:
    """Whose turn a request is; often nobody says."""
    return rng.choice((None, *SESSIONS, *SESSIONS))


def hint(world: World, rng: Random) -> str:
    """It returns, so soon or so late; or its blocks leave before others, after them, last, or as all do."""
    returns_in_s = rng.choice((None, 0.0, 2.0, 1000.0))
    rank = rank_of(rng.choice((None, None, -1, 0, 1, 1)), rng.choice((None, None, True, True, True, False)))
    ttl_s = None if rank is None else rng.choice((None, None, None, 0.0, 0.5, 5.0))
    return _say(world, _drawn(world, rng), Advice(False, returns_in_s, rank, ttl_s))


def ends(world: World, rng: Random) -> str:
    """It will not come back; which of them do, nobody can know."""
    return _say(world, _drawn(world, rng), Advice(ends=True))


def false_ends(world: World, rng: Random) -> str:
    """One that is said to be over comes again, time after time, until nobody believes it any more."""
    name, told = rng.choice(SESSIONS), ""
    for _ in range(FALSE_ENDS):
        made = world.requests.match(world.keys_of(0, 1, 0), "wolf", None, 0.0, name)
        world.engine.core.release_match(made)
        told = _say(world, name, Advice(ends=True))
    return told


def _drawn(world: World, rng: Random) -> str:
    """Mostly one that has blocks."""
    known = world.sessions.known()
    return rng.choice(known) if known and rng.random() < KNOWN else rng.choice((*SESSIONS, STRANGER))


def _say(world: World, name: str, advice: Advice) -> str:
    world.coverage.happened("hint: ends" if advice.ends else "hint: rank" if advice.rank else "hint: returns")
    return f"{name} {world.sessions.advise(name, advice, world.clock.now())}"
