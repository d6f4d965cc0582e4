"""What a miss costs the deciding core, verb by verb: blocks that nobody has met are sought, placed, named, released.

    python benchmarks/movement_costs.py [--blocks 256] [--rounds 31] [--path DIR] [--json]

`core` lines call the core itself, without a thread; `SyncCache` lines go through the engine's inbox and back. First
the slots are free, then each is taken from a block that lies on the disk as well. No byte of a block is moved while a
verb is timed. Figures are microseconds of wall time per block.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import movement_program

from kvtier.blocks.hashing import Keys
from kvtier.blocks.namespace import NamespaceTable
from kvtier.blocks.spec import block_specs
from kvtier.cache.leases import Lease, Match, NoRoom
from kvtier.cli.bench import world
from kvtier.cli.bench.report import Cost, Report
from kvtier.config import Config
from kvtier.engine.build import level_of, open_tier
from kvtier.engine.sync import SyncCache, open_sync
from kvtier.errors import KvtierError
from kvtier.testing.polled import PolledEngine

NAME = "movement: costs of a miss"
VERBS = ("match", "reserve", "commit", "release")
TARGET_US = 5.0  # match + commit
UNIT = "us/block"


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int = field(default=256, metadata={"help": "of a prompt"})
    rounds: int = field(default=31, metadata={"help": "timed, after one that is not"})


class CoreVerbs:
    """The core's verbs as `SyncCache` has them, without a thread."""

    def __init__(self, engine: PolledEngine) -> None:
        self._engine = engine

    def match(self, keys: Keys, owner: str) -> Match:
        return self._engine.core.match(keys, owner, None, 30.0)

    def reserve(self, match: Match, blocks_total: int) -> Lease | NoRoom:
        core = self._engine.core
        core.submit_reserve(match, blocks_total, 1.0, 0.0)
        ((_, answer),) = core.poll()
        assert isinstance(answer, Lease | NoRoom)
        return answer

    def commit(self, lease: Lease, pairs: list[Any]) -> None:
        self._engine.core.commit(lease, pairs)

    def release(self, lease: Lease) -> None:
        self._engine.core.release_lease(lease)

    def flush(self) -> None:
        self._engine.core.submit_flush()
        self._engine.run()

    def stats(self) -> dict[str, Any]:
        return self._engine.core.stats()


def disk_bytes(sizes: Sizes) -> int:
    return 2 * world.SMALL_BYTES * _store_blocks(sizes) * 2 + (256 << 20)


def measure(report: Report, sizes: Sizes, folder: Path) -> None:
    config = _config(sizes, folder / "core")
    with polled(config) as engine:
        _measure_face(report, "core", CoreVerbs(engine), config, sizes)
    config = _config(sizes, folder / "sync")
    with open_sync(config) as cache:
        _measure_face(report, "SyncCache", cache, config, sizes)
    report.notes.append(f"prompts of {sizes.blocks} blocks, {sizes.rounds} rounds, each verb timed by itself")


@contextmanager
def polled(config: Config) -> Iterator[PolledEngine]:
    """The core over the configured tiers, with nobody who would run a transfer unasked."""
    namespaces = NamespaceTable()
    specs = block_specs(config.model)
    tiers = [open_tier(tier, namespaces, specs[0].block_bytes) for tier in config.tiers]
    levels = [level_of(*pair, specs) for pair in zip(config.tiers, tiers, strict=True)]
    engine = PolledEngine(config.model, tiers, levels, namespaces)
    try:
        yield engine
    finally:
        engine.close()


def _config(sizes: Sizes, store: Path) -> Config:
    slots = sizes.blocks * (sizes.rounds + 1)
    return world.config(world.SMALL, world.SMALL_BYTES, slots, slots, store, _store_blocks(sizes))


def _store_blocks(sizes: Sizes) -> int:
    return 2 * sizes.blocks * (sizes.rounds + 1)


def _measure_face(report: Report, name: str, verbs: CoreVerbs | SyncCache, config: Config, sizes: Sizes) -> None:
    numbers = count()
    for slots in ("free slots", "slots of clean blocks"):
        rounds = [_request(verbs, world.prompt(config, next(numbers), sizes.blocks)) for _ in range(sizes.rounds + 1)]
        verbs.flush()
        by_verb = {verb: [took[verb] / sizes.blocks * 1e6 for took in rounds[1:]] for verb in VERBS}
        for verb, values in by_verb.items():
            report.costs.append(Cost(f"{name}, {slots}: {verb}", UNIT, values))
        both = [match + commit for match, commit in zip(by_verb["match"], by_verb["commit"], strict=True)]
        report.costs.append(Cost(f"{name}, {slots}: match + commit", UNIT, both, TARGET_US))
        report.notes.append(_profile(f"{name}, {slots}", {cost.what: cost.median for cost in report.costs[-5:-1]}))
    gpu = verbs.stats()["tiers"]["gpu"]
    if gpu["dropped_dirty"] or not gpu["reclaimed"]:
        raise KvtierError("slots were to be taken from clean blocks only")


def _request(verbs: CoreVerbs | SyncCache, keys: Keys) -> dict[str, float]:
    """Seconds that each verb of one request took."""
    begun_s = time.perf_counter()
    match = verbs.match(keys, "bench")
    matched_s = time.perf_counter()
    lease = verbs.reserve(match, len(keys.groups[0]))
    reserved_s = time.perf_counter()
    if not isinstance(lease, Lease) or lease.tokens_ready:
        raise KvtierError(f"this was to be a miss with room: {lease!r}")
    pairs = list(zip(lease.slots(), keys.groups[0], strict=True))
    filled_s = time.perf_counter()
    verbs.commit(lease, pairs)
    committed_s = time.perf_counter()
    verbs.release(lease)
    ended_s = time.perf_counter()
    took = matched_s - begun_s, reserved_s - matched_s, committed_s - filled_s, ended_s - committed_s
    return dict(zip(VERBS, took, strict=True))


def _profile(name: str, medians: dict[str, float]) -> str:
    """Which verb takes what part of a request."""
    whole = sum(medians.values())
    parts = ", ".join(f"{what.rpartition(' ')[2]} {us / whole:.0%}" for what, us in medians.items())
    return f"{name}: {whole:.1f} us per block, of it {parts}"


if __name__ == "__main__":
    movement_program.main(__name__)
