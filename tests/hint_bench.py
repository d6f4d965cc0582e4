"""What the tests of hints begin with: a session's turns, what is said of it, and what is found then."""

from kvtier.engine import arguments
from tests.engine_bench import make_engine


def turn(engine, session, keys, before_release=None):
    """One request of a session, from lookup to release."""
    now_s = engine.clock.now()
    match = engine.core.match(keys, "test", None, now_s + 30, session)
    lease = engine.reserve(match, len(keys.groups[0]))
    ready = lease.tokens_ready // keys.block_tokens[0]
    engine.core.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[ready:])
    if before_release:
        before_release()
    engine.release(lease)
    return lease.tokens_ready


def say(engine, session, ends=False, returns_in_s=None, priority=None, pin=None, ttl_s=None):
    advice = arguments.advice(ends, returns_in_s, priority, pin, ttl_s)
    engine.core.hints.advise(session, advice, engine.clock.now())
    engine.check()


def found(engine, keys):
    """Blocks of a prefix that lie somewhere."""
    return engine.core.peek(keys).tokens // keys.block_tokens[0]


def counted(engine, name, tier=None):
    stats = engine.core.stats()
    return stats[name] if tier is None else stats["tiers"][tier][name]


def alone(gpu=8, policy="lru", **more):
    return make_engine(gpu=gpu, host=None, policies=(policy,), **more)
