"""What the verbs of a running cache cost, next to no bytes being moved: blocks of one page, tiers with room for all.

The three tiers hold one prompt each that is found there. `core` lines ask the deciding code on its own thread, the
others go through the blocking API, that is, through the engine's inbox and back.
Units: blocks, milliseconds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.cache.leases import Lease, Match
from kvtier.cli.bench import world
from kvtier.cli.bench.progress import Begin
from kvtier.cli.bench.report import Cost, counted
from kvtier.cli.bench.timing import Contestant, interleave, plain, turns
from kvtier.config import Config
from kvtier.engine.build import start
from kvtier.engine.core import Core
from kvtier.engine.sync import SyncCache, open_sync

COMMIT_BLOCKS = 64
HASHED_TOKENS = 16_000
MATCH_TARGET_MS = 1.0  # for up to 1000 blocks
STAGING_S_MAX = 60.0


def disk_bytes(blocks: int, rounds: int) -> int:
    """What `costs` writes."""
    return world.small_disk_bytes(3 * blocks + _committed(rounds))


def _committed(rounds: int) -> int:
    return COMMIT_BLOCKS * (rounds + 2)


def costs(folder: Path, blocks: int, rounds: int, begin: Begin) -> list[Cost]:
    """match, peek, reserve and release of `blocks` blocks, commit of 64, hashing of 16,000 tokens."""
    fresh = _committed(rounds)
    config = world.config(
        world.SMALL, world.SMALL_BYTES, blocks + fresh, 2 * blocks + fresh, folder / "verbs", 4 * blocks + fresh
    )
    on_disk, on_host, on_gpu, absent = (world.prompt(config, number, blocks) for number in range(4))
    with open_sync(config) as cache:
        world.keep(cache, [on_disk, on_host, on_gpu], begin("serving prompts", 3))
    target_ms = MATCH_TARGET_MS * max(1, blocks / 1000)
    with open_sync(config) as cache:
        cache.release(world.reserved(cache, on_gpu, blocks))
        stage(cache, on_host)
        contestants = {
            f"match, {counted(blocks)} in gpu": matching(cache, on_gpu),
            f"match, {counted(blocks)} in host": matching(cache, on_host),
            f"match, {counted(blocks)} in lmdb": matching(cache, on_disk),
            f"match, {counted(blocks, 'unknown block')}": matching(cache, absent),
            f"peek, {counted(blocks)} in gpu": plain(lambda: cache.peek(on_gpu)),
            f"reserve + release, {counted(blocks)} in gpu": reserving(cache, on_gpu),
            f"commit, {COMMIT_BLOCKS} blocks": committing(cache, config),
            f"hash_blocks, {HASHED_TOKENS} tokens": hashing(config),
        }
        step = begin("asking for them", turns(contestants, rounds))
        timed = interleave(contestants, rounds, step)
    targets = dict.fromkeys([name for name in contestants if name.startswith("match")], target_ms)
    found = [Cost.of(name, rounds_, targets.get(name)) for name, rounds_ in timed.items()]
    return [*found, *core_costs(config, on_disk, blocks, rounds)]


def stage(cache: SyncCache, keys: Keys) -> None:
    """Bring a prompt from disk to the host tier, and wait for it."""
    cache.prefetch(keys)
    until_s = time.monotonic() + STAGING_S_MAX
    while cache.peek(keys).tiers["lmdb"]:
        if time.monotonic() > until_s:
            raise TimeoutError("a prompt did not come from disk to host memory")
        time.sleep(0.001)


def matching(cache: SyncCache, keys: Keys) -> Contestant:
    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        held: list[Match] = []
        yield lambda: held.append(cache.match(keys, owner="bench"))
        cache.release(held[0])

    return contestant


def reserving(cache: SyncCache, keys: Keys) -> Contestant:
    """The match is there already; all its blocks are in the top tier."""

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        match = cache.match(keys, owner="bench")

        def move() -> None:
            lease = cache.reserve(match, len(keys.groups[0]))
            assert isinstance(lease, Lease)
            cache.release(lease)

        yield move

    return contestant


def committing(cache: SyncCache, config: Config) -> Contestant:
    """Blocks that nobody has met; afterwards they are brought to disk, so that nothing moves while others run."""
    numbers = count(1000)

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        keys = world.prompt(config, next(numbers), COMMIT_BLOCKS)
        lease = world.reserved(cache, keys, COMMIT_BLOCKS)
        yield lambda: world.commit_all(cache, lease, keys)
        cache.release(lease)
        world.flush(cache)

    return contestant


def hashing(config: Config) -> Contestant:
    tokens = list(range(HASHED_TOKENS))
    return plain(lambda: hash_blocks(tokens, config.model))


def core_costs(config: Config, keys: Keys, blocks: int, rounds: int) -> list[Cost]:
    """The same match without the way to the engine's thread and back."""
    wall_ms = []
    with ExitStack() as undo:
        engine, _ = start(config)
        undo.callback(engine.close)
        for round_ in range(-1, rounds):

            def ask(core: Core, now_s: float) -> float:
                begun_s = time.perf_counter()
                match = core.match(keys, "bench", None, now_s + 30)
                took_s = time.perf_counter() - begun_s
                core.release_match(match)
                return took_s

            took_s = engine.call(ask)
            if round_ >= 0:
                wall_ms.append(took_s * 1e3)
    return [Cost(f"core: match, {counted(blocks)} in lmdb", "ms", wall_ms, MATCH_TARGET_MS * max(1, blocks / 1000))]
