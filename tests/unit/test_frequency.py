"""What policies know of a block beyond its copies: the frequency that travels with it, and ghosts."""

from kvtier.policies.base import Access
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import fill, make_engine, prompt, serve

ARC = ("arc", "arc", "arc")


def leaving(engine, tier):
    """Numbers of the prompts whose blocks would leave a tier, first to leave first, each once."""
    key, policy = engine.core.residency.directory.key, engine.core.residency.levels[tier].policy
    owner = {k: number for number in range(60) for k in prompt(number, 2).groups[0]}
    return list(dict.fromkeys(owner[key(h)[4:]] for h in policy.candidates(len(policy))))


def test_frequency_travels_down_with_a_block():
    """ARC in a lower tier is an LRU, since every block that comes down is new there."""
    engine = make_engine(gpu=4, host=12, disk=DictTier(), policies=("lru", "arc", "arc"))
    serve(engine, prompt(1, 2))
    serve(engine, prompt(1, 2))  # used again while it is only in the gpu tier
    for number in (2, 3, 4):
        serve(engine, prompt(number, 2))
        engine.run()
    engine.core.submit_flush()
    engine.run()
    for tier in (1, 2):
        order = leaving(engine, tier)
        assert order.index(1) == len(order) - 1, order  # came first, and would leave last


def test_frequency_travels_up_with_a_block():
    """A block that is read from disk is new to the tiers above it."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=8, disk=disk, policies=ARC)
    for number in (1, 2):
        serve(engine, prompt(number, 2))
    engine.core.submit_flush()
    engine.run()
    again = make_engine(gpu=8, host=8, disk=disk, policies=ARC)
    serve(again, prompt(1, 2))
    for number in (5, 6):
        serve(again, prompt(number, 2))
    assert leaving(again, 0) == [5, 6, 1]


def test_frequency_comes_with_what_is_computed_anew():
    """A block that is computed because its load was not worth it is new to the tier, however often it was used."""
    engine = make_engine(gpu=6, host=12)
    for number in (1, 1, 2, 3, 4, 5):  # the last ones push the first ones down
        serve(engine, prompt(number, 2))
        engine.run()
    policy, heard = engine.core.residency.levels[0].policy, []
    touch = policy.touch
    policy.touch = lambda handles, access, *more: heard.append(access) or touch(handles, access, *more)
    for number, access in ((1, Access.MOVED), (2, Access.FILL)):
        heard.clear()
        keys = prompt(number, 2)
        assert engine.core.peek(keys).tiers == {"gpu": 0, "host": 8}
        lease = engine.reserve(engine.match(keys, tokens_max=0), 2)
        fill(engine, lease, keys)
        assert heard == [access]
        engine.release(lease)
    engine.check()


def test_a_ghost_comes_back_as_frequent():
    """ARC forgets what it evicted: its handle is given away, so that it learns nothing."""
    engine = make_engine(gpu=4, host=None, policies=("arc",))
    policy = engine.core.residency.levels[0].policy
    serve(engine, prompt(1, 2))
    serve(engine, prompt(1, 2))
    for number in range(2, 6):
        serve(engine, prompt(number, 2))
    stats = engine.core.stats()
    assert stats["ghosts"] == len(policy.ghosts()) > 0
    assert stats["blocks"] + stats["ghosts"] == len(engine.core.residency.directory)
    assert engine.core.peek(prompt(4, 2)).tokens == 0
    recent = policy.p
    serve(engine, prompt(4, 2))
    assert policy.p > recent  # its return says that T1 was too small
    engine.check()


def test_ghosts_are_bounded_and_their_names_are_given_up():
    """The directory grows with every block that ever was."""
    engine = make_engine(gpu=4, host=4, disk=DictTier(blocks_max=8), policies=ARC)
    for number in range(300):
        serve(engine, prompt(number % 50, 1 + number % 4))
        engine.run()
        engine.check()
    assert len(engine.core.residency.directory) <= 2 * (4 + 4 + 8)


def test_a_reset_forgets_ghosts_too():
    """A dropped block comes back as frequent, under the name of somebody else's."""
    engine = make_engine(gpu=4, host=4, disk=DictTier(blocks_max=8), policies=ARC)
    for number in range(20):
        serve(engine, prompt(number, 2))
        engine.run()
    assert engine.core.stats()["ghosts"] > 0
    engine.core.submit_drop()
    engine.run()
    assert len(engine.core.residency.directory) == 0
    assert not any(level.policy.ghosts() for level in engine.core.residency.levels)
    engine.check()
