"""How long it takes to ask a cache for a prompt's keys: found on disk, or not at all.

Through the blocking interface, that is, through the engine's inbox and back. Units: blocks, milliseconds.
"""

from pathlib import Path

from kvtier.cli.bench import world
from kvtier.cli.bench.report import Cost, counted
from kvtier.cli.bench.timing import interleave
from kvtier.cli.bench.verbs import matching
from kvtier.engine.sync import open_sync

PER_KEYS = 1000


def measure(folder: Path, blocks: int, rounds: int, target_ms: float) -> tuple[list[Cost], dict[str, float]]:
    """Match `blocks` keys that the store has, and as many that nobody knows."""
    config = world.config(world.SMALL, world.SMALL_BYTES, blocks, 2 * blocks, folder / "store", 2 * blocks)
    kept, absent = (world.prompt(config, number, blocks) for number in range(2))
    with open_sync(config) as cache:
        world.keep(cache, [kept])
    with open_sync(config) as cache:
        timed = interleave({"hit": matching(cache, kept), "miss": matching(cache, absent)}, rounds)
    costs = [Cost.of(f"match, {counted(blocks)}, {name}", found, target_ms) for name, found in timed.items()]
    return costs, {"lookup_ms_per_1000": max(cost.median for cost in costs) * PER_KEYS / blocks}
