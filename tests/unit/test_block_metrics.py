"""BlockMetrics: lives of blocks as vLLM 0.32 measures them, some of them drawn by chance, in bounded memory."""

import json
import pathlib

import pytest

from kvtier.allocator.block_metrics import USES_KEPT, BlockLife, BlockMetrics
from kvtier.allocator.block_pool import BlockPool
from kvtier.cache.manager import KVCacheManager
from kvtier.clock import ManualClock
from kvtier.errors import InvariantError, UsageError
from kvtier.testing.replay import replay
from tests.compat.metric_ticks import TICKS_PER_S, ticks_before
from tests.manager_state import full, manager_of, serve

DATA = pathlib.Path(__file__).parents[1] / "data" / "vllm"
VLLM = json.loads((DATA / "metrics.json").read_text())


def watched_pool(blocks_total=6, **more):
    """A pool all of whose blocks are drawn, its metrics, and their clock."""
    clock = ManualClock()
    metrics = BlockMetrics(clock.now, 1.0, **more)
    return BlockPool(blocks_total, metrics=metrics), metrics, clock


def in_ticks(lives):
    """As vLLM's answers are kept."""
    return [
        [life.lifetime_s * TICKS_PER_S, life.idle_s * TICKS_PER_S, [gap * TICKS_PER_S for gap in life.reuse_gaps_s]]
        for life in lives
    ]


# ---------------------------------------------------------------- as vLLM


def test_lives_are_those_of_vllms_collector():
    """A lifetime, an idle time or a gap means something else than in vLLM's dashboards."""
    clock = ManualClock()
    metrics = BlockMetrics(clock.now, 1.0)
    verbs = {"take": metrics.taken, "touch": metrics.touched, "evict": metrics.evicted}
    gaps_max = 0
    for ticks, name, blocks, lives in VLLM["calls"]:
        clock.advance(ticks / TICKS_PER_S - clock.now())
        if name == "fetch":
            assert in_ticks(metrics.take()) == lives
            gaps_max = max([gaps_max, *(len(gaps) for *_, gaps in lives)])
        elif name == "reset":
            metrics.reset()
        else:
            verbs[name](blocks)
    assert gaps_max == USES_KEPT - 1


@pytest.mark.parametrize("name", VLLM["logs"])
def test_a_managers_lives_are_those_of_vllms_manager(name, monkeypatch):
    """The manager tells of a use or an eviction that vLLM's does not, or metrics change what it decides."""
    clock, lives, lines = ManualClock(), [], []
    metrics = BlockMetrics(clock.now, 1.0)

    class Watched(KVCacheManager):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, metrics=metrics, **more)

        def check(self):  # which a replay calls once, after each line
            lines.append(in_ticks(metrics.take()))
            clock.advance(ticks_before(len(lines)) / TICKS_PER_S)
            return super().check()

    monkeypatch.setattr("kvtier.testing.replay.KVCacheManager", Watched)
    assert replay(DATA / f"{name}.jsonl.xz") == []
    lives = [[line, ended] for line, ended in enumerate(lines) if ended]
    assert lives == VLLM["logs"][name]
    assert bool(lives) == (not name.startswith("nocache"))


# ---------------------------------------------------------------- by hand


def test_a_life_ends_when_the_block_is_taken_again():
    """What is told of a block that was reused is not its life: when it was taken, found, and reused."""
    pool, metrics, clock = watched_pool(blocks_total=2)
    (block,) = pool.take(1)
    for seconds in (2.0, 3.0, 0.5):
        clock.advance(seconds)
        pool.touch([block])
        pool.free([block])
    pool.free([block])
    clock.advance(8.0)
    assert metrics.take() == []
    pool.take(1)
    assert metrics.take() == [BlockLife(lifetime_s=13.5, idle_s=8.0, reuse_gaps_s=(3.0, 0.5))]
    assert metrics.take() == []


def test_a_life_ends_once_at_eviction():
    """A block that was evicted while in use is told of again when it is taken, with the idle time of nothing."""
    pool, metrics, clock = watched_pool(blocks_total=2)
    blocks = pool.take(1)
    clock.advance(1.0)
    pool.evict([*blocks, *blocks])
    clock.advance(1.0)
    pool.touch(blocks)
    pool.evict(blocks)
    pool.free([*blocks, *blocks])
    pool.take(1)
    assert metrics.take() == [BlockLife(1.0, 1.0, ())]


def test_copies_are_no_use():
    """A block that is only kept until its bytes are copied looks as if a request had found it."""
    pool, metrics, clock = watched_pool(blocks_total=2)
    blocks = pool.take(1)
    clock.advance(1.0)
    pool.hold(blocks[0])
    assert pool.refs[blocks[0]] == 2
    pool.free([*blocks, *blocks])
    with pytest.raises(InvariantError, match="free"):
        pool.hold(blocks[0])
    pool.take(1)
    assert metrics.take() == [BlockLife(1.0, 1.0, ())]


def test_a_reset_forgets_lives_and_records():
    """New weights look like the eviction of all blocks, or what is counted after it is of before."""
    pool, metrics, clock = watched_pool(blocks_total=3)
    first = pool.take(2)
    pool.evict(first[:1])
    clock.advance(1.0)
    assert not pool.reset()
    pool.free(first)
    assert pool.reset()
    assert metrics.take() == []
    pool.take(2)
    assert metrics.take() == []


def test_a_refused_reset_forgets_nothing():
    """A reset that did not happen loses what was measured."""
    pool, metrics, clock = watched_pool(blocks_total=3)
    blocks = pool.take(2)
    clock.advance(1.0)
    assert not pool.reset()
    pool.evict(blocks)
    assert metrics.take() == [BlockLife(1.0, 1.0, ())] * 2


def test_the_latest_records_stay():
    """Metrics that nobody fetches grow without end, or are lost without a count."""
    pool, metrics, clock = watched_pool(records_max=3)
    for _ in range(5):
        blocks = pool.take(1)
        clock.advance(1.0 + clock.now())
        pool.evict(blocks)
        pool.free(blocks)
    assert [life.lifetime_s for life in metrics.take()] == [4.0, 8.0, 16.0]
    assert metrics.dropped == 2
    assert metrics.take() == []
    assert metrics.dropped == 2


# ---------------------------------------------------------------- draws


def drawn(sample_rate, batches, seed=0):
    """The taken blocks, counted on through all batches, that got a life."""
    metrics = BlockMetrics(lambda: 0.0, sample_rate, seed=seed)
    positions, first = [], 0
    for size in batches:
        blocks = list(range(first, first + size))
        metrics.taken(blocks)
        positions += [block for block in blocks if _has_life(metrics, block)]
        first += size
    return positions


def _has_life(metrics, block):
    metrics.evicted([block])
    return bool(metrics.take())


@pytest.mark.parametrize("sample_rate", [0.01, 0.3, 0.9])
def test_the_rate_is_that_asked_for(sample_rate):
    """More or fewer blocks are measured than asked for."""
    total = 40_000
    share = len(drawn(sample_rate, [40] * (total // 40))) / total
    assert share == pytest.approx(sample_rate, abs=5 * (sample_rate * (1 - sample_rate) / total) ** 0.5)


def test_draws_do_not_depend_on_how_many_blocks_are_taken_at_once():
    """Blocks of long prompts are measured more often, or less."""
    one_by_one = drawn(0.2, [1] * 300)
    assert drawn(0.2, [300]) == drawn(0.2, [7, 0, 93, 1, 199]) == one_by_one
    assert drawn(0.2, [300], seed=1) != one_by_one


@pytest.mark.parametrize("sample_rate", [0, 0.0, 5e-324, 1e-300])
def test_a_rate_of_nothing_measures_nothing(sample_rate):
    """A rate that switches it off is an error, or measures all the same."""
    assert drawn(sample_rate, [1000]) == []


def test_a_rate_of_one_measures_all():
    """Equality with vLLM holds for a share of the blocks only."""
    assert drawn(1, [3, 0, 2]) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- the manager


def test_a_manager_tells_of_what_requests_found():
    """An engine that asks for metrics gets none, or not those of its hits."""
    clock = ManualClock()
    metrics = BlockMetrics(clock.now, 1.0)
    manager = manager_of(full(), blocks_total=4, metrics=metrics)
    prompt = list(range(9))
    for name in ("first", "second", "third"):
        request, _, _ = serve(manager, name, prompt)
        clock.advance(2.0)
        manager.free(request)
    assert metrics.take() == [BlockLife(2.0, 2.0, ())] * 2  # the last block, which is not full, is taken anew
    request, _, _ = serve(manager, "other", list(range(50, 62)))
    assert metrics.take() == [
        BlockLife(2.0, 2.0, ()),
        BlockLife(6.0, 2.0, (2.0,)),
        BlockLife(6.0, 2.0, (2.0,)),
    ]


@pytest.mark.parametrize("caching", [True, False])
def test_a_manager_without_metrics_decides_the_same(caching):
    """Measuring changes a block table."""
    tables = []
    for metrics in (None, BlockMetrics(lambda: 0.0, 0.5)):
        manager = manager_of(full(), blocks_total=9, caching=caching, metrics=metrics)
        served = [serve(manager, name, list(range(12))) for name in ("a", "b")]
        tables.append([(hit.groups, new) for _, hit, new in served])
    assert tables[0] == tables[1]
    assert caching or metrics.take() == []


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ((ManualClock(),), {}),
        ((None,), {}),
        ((lambda: 0.0, -0.01), {}),
        ((lambda: 0.0, 1.01), {}),
        ((lambda: 0.0, float("nan")), {}),
        ((lambda: 0.0, True), {}),
        ((lambda: 0.0, "0.1"), {}),
        ((lambda: 0.0,), {"seed": None}),
        ((lambda: 0.0,), {"records_max": 0}),
        ((lambda: 0.0,), {"records_max": 2.0}),
    ],
)
def test_bad_settings_are_refused(arguments, more):
    """Metrics that cannot work are only noticed when blocks are taken, inside a step of the engine."""
    with pytest.raises(UsageError, match="give"):
        BlockMetrics(*arguments, **more)


@pytest.mark.parametrize("metrics", [True, 0.01, BlockMetrics])
def test_a_manager_refuses_what_are_no_metrics(metrics):
    """A rate in place of metrics fails inside a step of the engine."""
    with pytest.raises(UsageError, match="BlockMetrics"):
        manager_of(full(), metrics=metrics)
