"""The simulator and a real engine serve the same requests: where each prompt was found, what left, in which order.

The real one has memfd, host memory and a store on disk, threads and a clock; the simulated one has none of them. So
that no race decides, nothing moves any more when the next verb comes, batches run one at a time and in order, and
planning goes on until there is nothing to plan (how often the engine's thread wakes up would decide otherwise).
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.config import Config
from kvtier.engine.core import Core
from kvtier.engine.sync import SyncCache
from kvtier.sim.lanes import Lanes
from kvtier.sim.replay import Replay
from kvtier.sim.setup import Setup
from kvtier.sim.trace import Trace, TracedRequest
from kvtier.types import BatchDone, GroupSpec, TransferBatch
from tests.cache_bench import BLOCK_TOKENS, config_for

APART_S = 12.0  # what a request has begun has long ended when the next one comes
STEP_S = 2.0
BATCH_S = 1e-3
QUIET_LOOKS_MAX = 1_000_000


@dataclass
class Seen:
    """What a run can be compared by. Copies that leave are (tier, key)."""

    found: list[dict[str, int]] = field(default_factory=list)  # tokens by tier, of each request
    left: list[tuple[int, bytes]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)  # of the tiers, at the end


COUNTED = ("reclaimed", "dropped_dirty", "evicted", "promoted_blocks", "demoted_blocks", "hit_tokens")


def watch(core: Core, seen: Seen) -> None:
    """Note all that leaves, whoever chose it."""
    residency = core.residency
    reclaim, evict, key = residency.reclaim, residency.evict, residency.directory.key

    def noting_reclaim(handles: Any, tier: int, incoming: int | None = None) -> None:
        seen.left += [(tier, key(handle)) for handle in handles]
        reclaim(handles, tier, incoming)

    def noting_evict(handle: int, tier: int, incoming: int | None = None) -> Any:
        seen.left.append((tier, key(handle)))
        return evict(handle, tier, incoming)

    def planning(now_s: float) -> list[TransferBatch]:
        return [batch for batches in iter(lambda: plan(now_s), []) for batch in batches]

    plan = core.plan
    patched: Any = residency
    patched.reclaim, patched.evict = noting_reclaim, noting_evict
    patched = core
    patched.plan = planning


class OneAtATime(Lanes):
    """Simulated batches that run one after the other, whatever tiers they are for."""

    until_s = 0.0

    def ends_at_s(self, batch: TransferBatch, now_s: float) -> float:
        self.until_s = max(self.until_s, now_s) + BATCH_S
        return self.until_s


class Queue:
    """The same for a real engine: a batch starts when the one before was acknowledged and the engine has planned."""

    def __init__(self, engine: Any, core: Any) -> None:
        self.core = core
        self.waiting: deque[TransferBatch] = deque()
        self.running = False
        submit, answer, apply = engine._executor.submit, engine._answer, core.apply

        def enqueue(batch: TransferBatch) -> bool:
            self.waiting.append(batch)
            return True

        def applied(done: BatchDone, now_s: float) -> None:
            self.running = False
            apply(done, now_s)

        def after_planning() -> None:
            answer()
            if self.waiting and not self.running:
                self.running = True
                submit(self.waiting.popleft())

        engine._executor.submit, engine._answer, core.apply = enqueue, after_planning, applied

    def busy(self, now_s: float) -> bool:
        blocked = any(level.blocked_until_s > now_s for level in self.core.residency.levels)
        return self.core.busy or blocked


def requests_of(seed: int, count: int) -> list[TracedRequest]:
    """Conversations that grow, are left and come back; the shallow blocks of each family are shared."""
    rng = random.Random(seed)
    tips: list[list[int]] = [[family * 1000] for family in range(1, 5)]
    fresh = 10_000
    requests = []
    for index in range(count):
        prompt = list(rng.choice(tips[-40:]))[: rng.randint(1, 9)]
        for _ in range(rng.randint(0, 3)):
            fresh += 1
            prompt.append(fresh)
        tips.append(prompt)
        tokens_in = len(prompt) * BLOCK_TOKENS + rng.randint(0, BLOCK_TOKENS - 1)
        requests.append(TracedRequest(index * APART_S, tokens_in, 0, prompt))
    return requests


def config_of(folder: Path, policy: str, host: str | None, groups: Sequence[GroupSpec] = ()) -> Config:
    """groups: instead of the model's own, in memory with room for as many tokens."""
    slots = sum(BLOCK_TOKENS // group.block_tokens for group in groups) or 1
    sizes = {"gpu": f"{64 * slots}KiB", "host": host and f"{128 * slots}KiB"}
    config = config_for(folder, lmdb="1200KiB", **sizes, limits={"governor": False, "load_deadline": "1h"})
    tiers = tuple(tier.model_copy(update={"policy": policy}) for tier in config.tiers)
    model = replace(config.model, groups=tuple(groups)) if groups else config.model
    return Config(model, tiers, config.prefetch, config.limits)


def simulated(config: Config, requests: list[TracedRequest]) -> Seen:
    replay = Replay(Trace("test", BLOCK_TOKENS, None, requests), Setup(config, BLOCK_TOKENS, step_s=STEP_S))
    replay.lanes = OneAtATime(replay.lanes.tiers)
    seen = Seen()
    watch(replay.core, seen)
    match = replay.core.match

    def noting_match(*arguments: Any) -> Any:
        found = match(*arguments)
        seen.found.append(found.tiers)
        return found

    patched: Any = replay.core
    patched.match = noting_match
    replay.run()
    assert replay.core.check() == []
    return finished(replay.core.stats(), seen)


def real(config: Config, requests: list[TracedRequest]) -> Seen:
    seen = Seen()
    with kvtier.open_sync(config) as cache:

        def begin(core: Core, now_s: float) -> Queue:
            watch(core, seen)
            return Queue(cache._engine, core)

        queue = cache._engine.call(begin)
        for request in requests:
            serve(cache, queue, request, seen)
        return finished(cache.stats(), seen)


def serve(cache: SyncCache, queue: Queue, request: TracedRequest, seen: Seen) -> None:
    sizes = [group.block_tokens for group in queue.core.model.groups]
    rows = [names_of(request.blocks, BLOCK_TOKENS // size) for size in sizes]
    keys = Keys.opaque(rows, queue.core.model)
    match = cache.match(keys, owner="real", tokens_max=request.tokens_in - 1)
    seen.found.append(match.tiers)
    wait_for_quiet(cache, queue)
    lease = cache.reserve(match, -(-request.tokens_in // sizes[0]))
    assert isinstance(lease, Lease)
    wait_for_quiet(cache, queue)
    pairs = []
    for group, (row, size) in enumerate(zip(keys.groups, sizes, strict=True)):
        pairs += list(zip(lease.slots(group), row, strict=False))[lease.tokens_ready // size :]
    cache.commit(lease, pairs)
    wait_for_quiet(cache, queue)
    cache.release(lease)
    wait_for_quiet(cache, queue)


def names_of(blocks: Sequence[int], parts: int) -> list[bytes]:
    """What a group calls its blocks, of which one of the trace is so many."""
    return [(block * parts + part).to_bytes(8, "big") for block in blocks for part in range(parts)]


def finished(stats: dict[str, Any], seen: Seen) -> Seen:
    """What was seen until now, and not what closing flushes."""
    counts = [{name: tier[name] for name in COUNTED} for tier in stats["tiers"].values()]
    return Seen([*seen.found], [*seen.left], counts)


def wait_for_quiet(cache: SyncCache, queue: Queue) -> None:
    """Until the engine has planned from beginning to end and found nothing to do, now or in a moment."""
    idle_since: int | None = None
    for _ in range(QUIET_LOOKS_MAX):
        busy, turns = cache._engine.call(lambda core, now_s: queue.busy(now_s)), cache._engine.turns
        if busy:
            idle_since = None
        elif idle_since is None:
            idle_since = turns
        elif turns >= idle_since + 2:
            return
    raise AssertionError("the engine is never quiet")


def compare(
    tmp_path: Path, policy: str, host: str | None, seed: int, count: int, groups: Sequence[GroupSpec] = ()
) -> None:
    requests = requests_of(seed, count)
    config = config_of(tmp_path / "store", policy, host, groups)
    expected, found = real(config, requests), simulated(config, requests)
    for index, (wanted, got) in enumerate(zip(expected.found, found.found, strict=True)):
        assert got == wanted, f"request {index}"
    for index, (left, gone) in enumerate(zip(expected.left, found.left, strict=False)):
        assert gone == left, f"copy {index} of {len(expected.left)}"
    assert found == expected
    for tier, counts in enumerate(expected.counts):
        assert counts["hit_tokens"], f"tier {tier} was of no use: nothing was compared there"
    assert expected.counts[-1]["evicted"]
    assert {tier for tier, _ in expected.left} == set(range(len(expected.counts)))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_simulated_engine_does_what_a_real_one_does(tmp_path: Path, policy: str) -> None:
    """A simulation's figures are of a product that does not exist."""
    compare(tmp_path, policy, "128KiB", seed=1, count=200)


@pytest.mark.parametrize("lengths", [(2, 4), (4, 1)])
def test_so_does_one_with_blocks_of_several_lengths(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """A hybrid model's simulation is of one whose groups all have the longest blocks."""
    groups = [GroupSpec("full", (0,), 2, 8, "float32", length) for length in lengths]
    compare(tmp_path, "lru", "128KiB", seed=1, count=120, groups=groups)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["lru", "arc", "hit_density"])
def test_it_does_so_for_thousands_of_requests(tmp_path: Path, policy: str) -> None:
    """As above, for whatever takes longer to show."""
    compare(tmp_path, policy, "128KiB", seed=2, count=2000)
