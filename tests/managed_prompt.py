"""A prompt below a block manager's pages, and a manager with no tiers, for tests of what comes back."""

from kvtier.cache.manager import KVCacheManager
from tests.managed_world import FULL, World, group_for

SIZES = [("full", 4), ("full", 8)]
PROMPT = list(range(100, 125))  # 6 blocks of 4, and a token


def world_with_prompt_below(groups=(FULL,), tokens=PROMPT, **more):
    """A world whose tiers have a prompt, and whose pages forgot it."""
    world = World(groups, **more)
    world.serve(tokens)
    world.flush()
    forget_pages(world)
    return world


def forget_pages(world):
    """Nobody finds anything in the pages any more."""
    assert world.manager.reset()
    world.manager.take_stats()


def manager_without_tiers(blocks=12, **more):
    return KVCacheManager([group_for(*FULL)], blocks + 1, tokens_max=64, **more)
