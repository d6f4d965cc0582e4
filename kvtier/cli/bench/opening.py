"""What it costs to open a store again, in all and by part.

The store is made once; its blocks have one page each, for opening reads the index and no payload. The memory tiers
are as small as can be. Units: blocks, milliseconds.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.blocks.namespace import NamespaceTable
from kvtier.blocks.spec import block_specs
from kvtier.cli.bench import world
from kvtier.cli.bench.progress import Begin
from kvtier.cli.bench.report import Cost, counted
from kvtier.cli.bench.timing import Contestant, interleave, turns
from kvtier.config import Config
from kvtier.engine.build import level_of, open_tier
from kvtier.engine.core import Core
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.tiers.base import SupportsScan
from kvtier.types import StoredBlock

PROMPT_BLOCKS = 1000
OPEN_TARGET_MS = 200.0  # of up to 100,000 blocks
OPEN_TARGET_BLOCK_MS = 0.002  # of each, if there are more


def disk_bytes(store_blocks: int) -> int:
    """What `costs` writes."""
    return world.small_disk_bytes(store_blocks)


def costs(folder: Path, store_blocks: int, rounds: int, begin: Begin) -> list[Cost]:
    """Opening a whole cache over a store of `store_blocks`, and its parts: the tier, the directory.

    The store stays in `folder`, as `store`."""
    store = folder / "store"
    build(store, store_blocks, begin)
    config = _config(store, store_blocks)
    named = f"a store of {counted(store_blocks)}"
    contestants = {
        f"open {named}": opening(config),
        "  of it: the tier": opening_tier(config),
        "  of it: the directory": adopting(config),
        f"close {named}": closing(config),
    }
    target_ms = max(OPEN_TARGET_MS, OPEN_TARGET_BLOCK_MS * store_blocks)
    step = begin(f"opening {named}", turns(contestants, rounds))
    timed = interleave(contestants, rounds, step)
    return [Cost.of(name, rounds_, target_ms if name.startswith("open") else None) for name, rounds_ in timed.items()]


def build(store: Path, store_blocks: int, begin: Begin) -> None:
    """A store with so many blocks, written by a cache."""
    step = min(PROMPT_BLOCKS, store_blocks)
    config = world.config(world.SMALL, world.SMALL_BYTES, 2 * step, 2 * step, store, store_blocks)
    prompts = [
        world.prompt(config, number, min(step, store_blocks - first))
        for number, first in enumerate(range(0, store_blocks, step))
    ]
    with open_sync(config) as cache:
        world.keep(cache, prompts, begin(f"writing a store of {counted(store_blocks)}", len(prompts)))


def _config(store: Path, store_blocks: int) -> Config:
    return world.config(world.SMALL, world.SMALL_BYTES, 16, 16, store, store_blocks)


def opening(config: Config) -> Contestant:
    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        opened: list[SyncCache] = []
        yield lambda: opened.append(open_sync(config))
        opened[0].close()

    return contestant


def closing(config: Config) -> Contestant:
    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        yield open_sync(config).close

    return contestant


def opening_tier(config: Config) -> Contestant:
    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        namespaces = NamespaceTable()
        namespaces.id_of_model(config.model)
        opened = []
        yield lambda: opened.append(open_tier(config.tiers[-1], namespaces, world.SMALL_BYTES))
        opened[0].close()

    return contestant


def adopting(config: Config) -> Contestant:
    """From what the tier has found to a directory that answers."""

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        with core_over(config) as (core, stored):
            yield lambda: core.adopt(len(config.tiers) - 1, stored)

    return contestant


@contextmanager
def core_over(config: Config) -> Iterator[tuple[Core, Iterable[StoredBlock]]]:
    """A core that knows nothing yet, over open tiers, and what the store has."""
    namespaces = NamespaceTable()
    namespaces.id_of_model(config.model)
    tiers = [open_tier(tier, namespaces, world.SMALL_BYTES) for tier in config.tiers]
    try:
        store = tiers[-1]
        assert isinstance(store, SupportsScan)
        specs = block_specs(config.model)
        levels = [level_of(*pair, specs) for pair in zip(config.tiers, tiers, strict=True)]
        yield Core(config.model, levels, namespaces), store.scan()
    finally:
        for tier in reversed(tiers):
            tier.close()
