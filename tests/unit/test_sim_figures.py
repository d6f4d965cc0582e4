"""The figures of a simulation with several tiers, counted once more by somebody who sees only what happens.

He hears of each batch that ends, each commit, and each copy that leaves, and keeps books of where blocks lie; he shares
no counter with the product or the report. Requests come far apart, so that nothing moves when the next one looks.
"""

import random
from collections import Counter
from itertools import takewhile
from math import ceil
from typing import Any

import pytest

from kvtier.sim.lanes import Lanes
from kvtier.sim.replay import Replay
from kvtier.sim.report import DAY_S, ReplayReport, TieredJob, report_of
from kvtier.sim.trace import Trace, TracedRequest
from kvtier.types import BatchDone, TransferBatch
from tests.unit.test_sim_tiers import LMDB, TOKENS, config_of, gpu, host, setup_of

NAMES = ("gpu", "host", "lmdb")
APART_S = 50.0


class Books:
    """Where each block lies, and what has moved."""

    def __init__(self, trace: Trace, replay: Replay) -> None:
        self.trace, self.replay, self.began_s = trace, replay, 0.0
        self.here: list[set[int]] = [set() for _ in NAMES]
        self.restored, self.asked = Counter[str](), 0
        self.block_hits, self.evicted, self.dropped = Counter[str](), Counter[str](), Counter[str]()
        self.read_bytes, self.written_bytes = Counter[str](), Counter[str]()
        self.ttft_s: list[float] = []
        self.requests = iter(trace.requests)
        replay.lanes = Watched(replay.lanes, self)
        core: Any = replay.core
        residency: Any = core.residency
        match, commit, reclaim, evict = core.match, core.commit, residency.reclaim, residency.evict

        def looking(*arguments: Any) -> Any:
            self.looked(request := next(self.requests))
            self.began_s = request.at_s
            return match(*arguments)

        def committing(lease: Any, pairs: Any) -> None:
            self.ttft_s.append(replay.clock.now() - self.began_s)
            self.here[0].update(int.from_bytes(key[:-4], "big") for _, key in pairs)
            commit(lease, pairs)

        def reclaiming(handles: Any, tier: int, incoming: int | None = None) -> None:
            for handle in handles:
                self.left(handle, tier)
            reclaim(handles, tier, incoming)

        def evicting(handle: int, tier: int, incoming: int | None = None) -> Any:
            self.left(handle, tier)
            return evict(handle, tier, incoming)

        core.match, core.commit = looking, committing
        residency.reclaim, residency.evict = reclaiming, evicting

    def looked(self, request: TracedRequest) -> None:
        whole = request.blocks[: request.tokens_in // TOKENS]
        fastest = [next((name for name, here in zip(NAMES, self.here, strict=True) if b in here), None) for b in whole]
        self.asked += len(whole)
        self.block_hits.update(name for name in fastest if name)
        leading = [*takewhile(bool, fastest)][: (request.tokens_in - 1) // TOKENS]
        for name in leading:
            self.restored[name or ""] += TOKENS

    def left(self, handle: int, tier: int) -> None:
        block = int.from_bytes(self.replay.core.residency.directory.key(handle)[4:-4], "big")
        self.here[tier].remove(block)
        self.evicted[NAMES[tier]] += 1
        if tier < len(NAMES) - 1 and not any(block in here for here in self.here):
            self.dropped[NAMES[tier]] += 1

    def ended(self, batch: TransferBatch, done: BatchDone) -> None:
        for transfer, outcome in zip(batch.transfers, done.outcomes, strict=False):
            assert outcome.done
            self.here[batch.target].add(int.from_bytes(transfer.key[4:-4], "big"))
            self.read_bytes[NAMES[batch.source]] += transfer.length_bytes
            self.written_bytes[NAMES[batch.target]] += transfer.length_bytes

    def quantile_s(self, share: float) -> float:
        """The smallest time within which so many had their first token."""
        most = ceil(share * len(self.ttft_s))
        return min(at_s for at_s in self.ttft_s if sum(other <= at_s for other in self.ttft_s) >= most)


class Watched(Lanes):
    """Tells the books of each batch."""

    def __init__(self, lanes: Lanes, books: Books) -> None:
        super().__init__(lanes.tiers)
        self.books = books

    def carry_out(self, batch: TransferBatch) -> BatchDone:
        done = super().carry_out(batch)
        self.books.ended(batch, done)
        return done


def talks(seed: int, count: int, apart_s: float = APART_S) -> Trace:
    """Conversations that grow, are left and come back; some prompts end with a whole block."""
    rng = random.Random(seed)
    tips: list[list[int]] = [[n] for n in range(4)]
    requests, fresh = [], 4
    for index in range(count):
        prompt = list(rng.choice(tips[-60:]))[: rng.randint(1, 9)]
        more = rng.randint(0, 4)
        prompt += range(fresh, fresh + more)
        fresh += more
        tips.append(prompt)
        requests.append(TracedRequest(apart_s * index, len(prompt) * TOKENS + rng.randint(0, 3), 0, prompt))
    return Trace("t", TOKENS, None, requests)


def counted(policy: str, disk: dict[str, Any]) -> tuple[ReplayReport, Books]:
    trace = talks(8, 150)
    replay = Replay(trace, setup_of(config_of(gpu(16), host(32), disk), policy=policy))
    books = Books(trace, replay)
    replay.run()
    return report_of(trace, replay), books


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_each_figure_is_what_was_seen(policy: str) -> None:
    """Somebody buys memory or a drive for figures that are of something else than their name says."""
    report, books = counted(policy, LMDB)
    trace, end_s = books.trace, books.replay.clock.now()
    for tier in report.tiers:
        name = tier.name
        assert tier.prefix_tokens == books.restored[name] > 0
        assert tier.prefix_hit_rate == pytest.approx(books.restored[name] / sum(r.tokens_in for r in trace.requests))
        assert tier.block_hits == books.block_hits[name]
        assert tier.block_hit_rate == pytest.approx(books.block_hits[name] / books.asked)
        assert (tier.read_bytes, tier.written_bytes) == (books.read_bytes[name], books.written_bytes[name])
        assert tier.evicted == books.evicted[name] > 0
        assert tier.dropped == books.dropped[name]
    assert report.moved_bytes == sum(books.written_bytes.values())
    assert report.ttft_p50_s == pytest.approx(books.quantile_s(0.5))
    assert report.ttft_p99_s == pytest.approx(books.quantile_s(0.99))
    disk = report.tiers[-1]
    per_day = books.written_bytes["lmdb"] / (end_s / DAY_S)
    assert disk.written_bytes_per_day == pytest.approx(per_day)
    assert disk.capacities_per_day == pytest.approx(per_day / disk.capacity_bytes)


def test_copies_without_a_copy_below_are_counted_as_dropped() -> None:
    """Blocks are lost for want of admission, and the figures say that they lie below."""
    report, books = counted("lru", LMDB | {"admission": "second_access"})
    assert [tier.dropped for tier in report.tiers] == [books.dropped[name] for name in NAMES]
    assert sum(books.dropped.values()) > 0


def test_the_bound_is_for_all_tiers_together() -> None:
    """A product seems better, or worse, against the bound than it is: that is of another size."""
    trace = talks(8, 60)
    job = TieredJob(setup_of(config_of(gpu(8), host(12))), bound=True)
    report = job.run(trace)
    blocks = sum(tier.capacity_blocks for tier in report.tiers)
    assert blocks == 7 + 12
    assert report.optimum_hit_rate == pytest.approx(best_by_trying(trace, blocks) / trace.input_tokens)
    assert report.prefix_hit_rate < report.optimum_hit_rate


def best_by_trying(trace: Trace, blocks: int) -> int:
    """Tokens of prefixes under the rule of the optimum, told anew: keep whom a request looks for soonest, shallow
    first, but nobody until a request that brings him without looking for him."""
    whole = [[*request.blocks[: request.tokens_in // TOKENS]] for request in trace.requests]
    sought = [(request.tokens_in - 1) // TOKENS for request in trace.requests]
    never, kept, tokens = (len(whole), 0), set[int](), 0
    for number, prompt in enumerate(whole):
        tokens += TOKENS * sum(1 for _ in takewhile(kept.__contains__, prompt[: sought[number]]))
        next_use = {}
        for later in range(len(whole) - 1, number, -1):
            uses = {
                block: (later, depth) if depth < sought[later] else never for depth, block in enumerate(whole[later])
            }
            next_use.update(uses)
        wanted = sorted(kept | {*prompt}, key=lambda block: next_use.get(block, never))
        kept = {*wanted[:blocks]}
    return tokens
