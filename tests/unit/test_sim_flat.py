"""One tier in the simulator: exact, in both orders, for every policy, and the same on many cores as on one."""

import json
import lzma
import os
import pathlib
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from math import log
from statistics import pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import KvtierError, UsageError
from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Hint
from kvtier.policies.belady import belady_by_access
from kvtier.policies.lru import LRU
from kvtier.sim.flat import BELADY, ORDERS, FlatJob, FlatResult, OneTier, simulate
from kvtier.sim.hints import Hints, turns_of
from kvtier.sim.jobs import run_all
from kvtier.sim.reading import read_trace
from kvtier.sim.reuse import reuse_distances
from kvtier.sim.trace import Numbers, Trace, TracedRequest
from tests.textbook import TextbookARC, TextbookFIFO, TextbookLFU, TextbookLRU, TextbookSIEVE, TextbookTwoQ

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = ROOT / "tests/data/mooncake_synthetic.txt.xz"
TRACES = ROOT.parent / "shared/traces"
TEXTBOOKS: dict[str, Callable[[int], Any]] = {
    "lru": TextbookLRU,
    "arc": TextbookARC,
    "fifo": TextbookFIFO,
    "lfu": TextbookLFU,
    "two_q": TextbookTwoQ,
    "sieve": TextbookSIEVE,
}
NAMES_THERE = {"two_q": "2Q", "s3_fifo": "S3FIFO", BELADY: "MIN", "LRU_pinned": "LRU_pinned"}

# Of the shipped trace, whole: as published with it, by a reference simulator that agrees with libCacheSim 0.3.5.
FIGURES = {
    ("lru", "flat", 439): FlatResult(4184, 2_141_604),
    ("arc", "request", 439): FlatResult(5145, 2_634_040),
    ("lru", "request", 8784): FlatResult(47_907, 24_498_362),
    ("sieve", "request", 439): FlatResult(2_290, 1_172_480),
    (BELADY, "request", 439): FlatResult(22_600, 11_559_635),
    (BELADY, "request", 8784): FlatResult(74_100, 37_884_978),
}


@pytest.fixture(scope="module")
def shipped() -> Trace:
    requests = []
    for line in lzma.decompress(SHIPPED.read_bytes()).decode().splitlines():
        tokens_in, *runs = line.split()
        pairs = [tuple(map(int, run.split("+"))) for run in runs]
        blocks = [block for first, count in pairs for block in range(first, first + count)]
        requests.append(TracedRequest(0.0, int(tokens_in), 0, blocks))
    trace = Trace("synthetic", 512, None, requests)
    assert (trace.accesses, trace.unique_blocks) == (121_877, 43_924)
    return trace


def cut(trace: Trace, requests: int) -> Trace:
    return Trace(trace.name, trace.block_tokens, None, trace.requests[:requests])


def textbook(trace: Trace, cache: Any, order: str) -> FlatResult:
    """The definition, one access at a time."""
    hits = tokens = 0
    for request in trace.requests:
        if order == "flat":
            found = [cache.access(block) for block in request.blocks]
        else:
            found = [block in cache for block in request.blocks]
            for block in reversed(request.blocks):
                cache.access(block)
        leading = sum(1 for _ in takewhile(bool, found))
        hits += sum(found)
        whole = leading == len(request.blocks)
        tokens += request.tokens_in if whole else leading * trace.block_tokens
    return FlatResult(hits, tokens)


@pytest.mark.parametrize(("policy", "order", "blocks"), FIGURES, ids=str)
def test_published_figures(shipped: Trace, policy: str, order: str, blocks: int) -> None:
    """What we print cannot be compared with what others print about the same trace."""
    assert simulate(shipped, policy, blocks, order) == FIGURES[policy, order, blocks]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", TEXTBOOKS)
@pytest.mark.parametrize("blocks", [60, 700])
def test_as_the_textbooks_say(shipped: Trace, policy: str, order: str, blocks: int) -> None:
    """Telling a policy of neighbours together changes who leaves; with 60 blocks most prompts are longer than that."""
    trace = cut(shipped, 500)
    assert simulate(trace, policy, blocks, order) == textbook(trace, TEXTBOOKS[policy](blocks), order)


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True), min_size=1, max_size=30),
    st.integers(1, 14),
    st.sampled_from(sorted(TEXTBOOKS)),
    st.sampled_from(ORDERS),
)
def test_small_caches_too(rows: Sequence[list[int]], blocks: int, policy: str, order: str) -> None:
    """A cache smaller than a request, or larger than the working set, goes wrong at its edge."""
    trace = Trace("t", 4, None, [TracedRequest(0.0, 4 * len(row) - 1, 0, row) for row in rows])
    assert simulate(trace, policy, blocks, order) == textbook(trace, TEXTBOOKS[policy](blocks), order)


@pytest.mark.parametrize("order", ORDERS)
def test_no_policy_beats_the_bound(shipped: Trace, order: str) -> None:
    """A policy seems better than possible: blocks are found that were never put in, or beyond the capacity."""
    trace = cut(shipped, 1200)
    bound = simulate(trace, BELADY, 300, order)
    found = {policy: simulate(trace, policy, 300, order) for policy in POLICIES}
    assert all(result.hits <= bound.hits for result in found.values())
    assert bound.hits > max(result.hits for result in found.values()) > 0


@pytest.mark.parametrize("policy", [*POLICIES])
def test_a_tier_holds_what_it_has_room_for(shipped: Trace, policy: str) -> None:
    """A cache of so many blocks secretly holds more, or the policy thinks of others than we do."""
    trace = cut(shipped, 300)
    tier = OneTier(policy, 100, trace.unique_blocks)
    for request in trace.requests:
        tier.request(request.blocks)
        assert len(tier._policy) == sum(tier._here) <= 100
    assert tier._policy.check() == []


def test_larger_than_all(shipped: Trace) -> None:
    """An endless capacity costs endless memory, or finds less than there is to find."""
    trace = cut(shipped, 300)
    reuses = trace.accesses - trace.unique_blocks
    for policy in (*POLICIES, BELADY):
        assert simulate(trace, policy, 10**15, "request").hits == reuses, policy


def test_an_unknown_policy_is_named(shipped: Trace) -> None:
    """A slip of the pen runs something else."""
    with pytest.raises(UsageError, match="Did you mean 'lru'"):
        simulate(shipped, "lruu", 5, "request")


# ---------------------------------------------------------------- many runs


@pytest.mark.parametrize("processes", [1, 2])
def test_all_jobs_in_order(shipped: Trace, processes: int) -> None:
    """Results are mixed up between jobs when several processes work, or differ from those of one."""
    trace = cut(shipped, 200)
    jobs = [FlatJob(policy, blocks, "request") for policy in ("lru", BELADY) for blocks in (50, 500)]
    served: list[int] = []
    runs = list(run_all(trace, jobs, served.append, processes))
    assert [run.job for run in runs] == jobs
    assert [run.found for run in runs] == [simulate(trace, j.policy, j.blocks, j.order) for j in jobs]
    assert 0 < sum(served) <= len(trace.requests) * len(jobs)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_jobs_error_comes_through(shipped: Trace, processes: int) -> None:
    """What goes wrong in a process of its own is lost, and we wait for ever."""
    jobs = [FlatJob("lru", 5, "flat"), FlatJob("none", 5, "flat")]
    with pytest.raises(UsageError, match="unknown policy"):
        list(run_all(cut(shipped, 20), jobs, lambda served: None, processes))


class Suicide:
    """A job whose process ends as one does that the kernel kills."""

    def run(self, trace: Trace, progress: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_told(shipped: Trace) -> None:
    """The machine runs out of memory, and we wait for a process that is gone."""
    with pytest.raises(KvtierError, match="was killed"):
        list(run_all(cut(shipped, 20), [Suicide(), Suicide()], lambda served: None, 2))


# ---------------------------------------------------------------- hints


def talks(*prompts: Sequence[int]) -> Trace:
    """Prompts of whole blocks."""
    return Trace("t", 4, None, [TracedRequest(0.0, 4 * len(prompt), 0, prompt) for prompt in prompts])


def test_sessions_are_told_apart() -> None:
    """A hint is about blocks that others need, or about another conversation than its own."""
    trace = talks([0, 1, 2], [0, 5, 6], [0, 1, 2, 3], [0, 9], [0, 5, 6, 7], [0, 9, 10])
    assert list(turns_of(trace)) == [
        (0, [2, 1, 0], [], 3),  # comes back after the three of the second prompt
        (1, [6, 5], [], 6),
        (0, [3, 2, 1], [], None),
        (3, [9], [], 4),
        (1, [7, 6, 5], [], None),
        (3, [10, 9], [0], None),  # nobody else is left of those that named it
    ]


def test_a_session_returns_with_its_next_request() -> None:
    """A hint tells of the last turn of a conversation, long after the next one."""
    assert [turn.returns_in for turn in turns_of(talks([0], [0, 1], [9], [0, 1, 2]))] == [0, 1, None, None]


def test_hints_say_what_was_asked_for() -> None:
    """A hint of one kind says another thing, or is not as unreliable as it should be."""
    trace = talks([0, 1, 2], [0, 1, 2, 3], [7, 8])
    assert list(Hints("ends").of(trace)) == [[], [([3, 2, 1, 0], Hint(ends=True))], [([8, 7], Hint(ends=True))]]
    assert next(iter(Hints("returns").of(trace))) == [([2, 1, 0], Hint(returns_in=0))]
    assert list(Hints("ends", wrong=1.0).of(trace)) == [[([2, 1, 0], Hint(ends=True))], [], []]
    assert list(Hints("ends", false_ends=1.0).of(trace)) == [
        [([2, 1, 0], Hint(ends=True))],
        [([3, 2, 1, 0], Hint(ends=True))],
        [([8, 7], Hint(ends=True))],
    ]
    assert list(Hints("returns", coverage=0.0).of(trace)) == [[]] * 3
    cries = talks(*[list(range(n + 1)) for n in range(40)])
    believed = [bool(said) for said in Hints("ends", wrong=1.0).of(cries)]
    assert believed[0]
    assert not any(believed[15:])  # of a session that always comes back
    both = talks([0, 1], [0, 2])
    assert list(Hints("ends").of(both))[1] == [([2], Hint(ends=True)), ([0], Hint(ends=True, shared=True))]
    many = talks(*[[n, n + 1000] for n in range(400)], *[[n, n + 1000, n + 2000] for n in range(400)])
    pairs = talks(*[[n, 1000 + n, 2000 + n][:turn] for n in range(400) for turn in (2, 3)])
    said_ends = [bool(said) for said in Hints("ends", false_ends=0.1).of(pairs)]
    assert 20 < sum(said_ends[::2]) < 60
    assert all(said_ends[1::2])
    told = [said for said in Hints("returns", coverage=0.25).of(many) if said]
    assert 150 < len(told) < 250
    noisy = [said[0][1].returns_in for said in Hints("returns", noise=2.0).of(many) if said and not said[0][1].ends]
    exact = [said[0][1].returns_in for said in Hints("returns").of(many) if said and not said[0][1].ends]
    logs = [log(one / other) for one, other in zip(noisy, exact, strict=True) if one and other]
    assert 1.7 < pstdev(logs) < 2.3


@pytest.mark.parametrize("policy", ["lru", "hit_density"])
def test_hints_help(policy: str) -> None:
    """Hints are made, and never reach the policy."""
    rng = random.Random(4)
    prompts: list[list[int]] = []
    for number in range(600):
        talk = [10_000 * number + block for block in range(20)]
        prompts.append(talk)  # most talks end with their first prompt
        if rng.random() < 0.3:
            prompts.append([*talk, 10_000 * number + 20])
    rng.shuffle(prompts)
    prompts.sort(key=lambda prompt: prompt[0] // 10_000 + (20 if len(prompt) > 20 else 0))
    names = Numbers()
    trace = talks(*[[names[block] for block in prompt] for prompt in prompts])
    plain = simulate(trace, policy, 250, "request").prefix_tokens
    hinted = simulate(trace, policy, 250, "request", Hints("ends")).prefix_tokens
    assert hinted > plain


# ---------------------------------------------------------------- reuse distances


def test_reuse_distances_are_counted() -> None:
    """The histogram shows other distances than there are."""
    rng = random.Random(1)
    rows = [rng.sample(range(30), rng.randint(1, 8)) for _ in range(60)]
    latest: dict[int, int] = {}
    wanted: Counter[int] = Counter()
    for number, row in enumerate(rows):
        for block in row:
            if block in latest:
                wanted[len({other for between in rows[latest[block] + 1 : number] for other in between})] += 1
        latest.update(dict.fromkeys(row, number))
    trace = Trace("t", 4, None, [TracedRequest(0.0, 4 * len(row), 0, row) for row in rows])
    assert reuse_distances(trace) == wanted
    assert sum(wanted.values()) == trace.accesses - trace.unique_blocks


# ---------------------------------------------------------------- the whole traces

NO_TRACES = pytest.mark.skipif(not TRACES.is_dir(), reason="the whole traces are not at ../shared/traces")
NAMES = ("conv_h1", "synthetic", "weka_dev")
ORDERS_THERE = {"request": "rev", "flat": "flat"}
# W-TinyLFU's paper leaves the estimate to a sketch, and no two implementations have the same one.
# What libCacheSim found on these traces stands beside it; `tests/model/test_policy_queues.py` asks libCacheSim itself.
NOT_OURS = {"WTLFU1%"}
OF_OTHERS = {"lcs_hits"}


def reference(name: str) -> dict[str, Any]:
    """Of a trace: file, sizes, and for each size what a reference simulator found under each policy."""
    traces = json.loads((TRACES / "reference_dev.json").read_text(encoding="utf-8"))["traces"]
    return dict(traces[name])


def cells(trace: Trace, policy: str, blocks: int, orders: Iterable[str] = ORDERS) -> dict[str, int]:
    """What we find, by the names that the reference has for it."""
    found = {ORDERS_THERE[order]: simulate(trace, policy, blocks, order) for order in orders}
    hits = {f"{order}_hits": result.hits for order, result in found.items()}
    return hits | {f"{order}_prefix_tokens": result.prefix_tokens for order, result in found.items()}


def belady_cells(trace: Trace, blocks: int) -> dict[str, int]:
    """The reference has no prefix tokens of the bound by access, and one more bound, where blocks may pass by."""
    ours = cells(trace, BELADY, blocks)
    del ours["flat_prefix_tokens"]
    passing = belady_by_access([request.blocks for request in trace.requests], blocks, bypass=True)
    return ours | {"flat_bypass_hits": sum(found.blocks for found in passing)}


def pinned_cells(trace: Trace, blocks: int) -> dict[str, int]:
    """LRU as an engine runs it: a request's blocks enter together, and then others leave until all fit."""
    policy, here = LRU(blocks), set[int]()
    hits = tokens = 0
    for request in trace.requests:
        found = [block in here for block in request.blocks]
        hits += sum(found)
        tokens += trace.prefix_tokens(request, sum(1 for _ in takewhile(bool, found)))
        policy.touch(request.blocks[::-1], Access.FILL)
        here.update(request.blocks)
        if len(here) > blocks:
            leaving = policy.candidates(len(here) - blocks)
            policy.evict(leaving)
            here.difference_update(leaving)
    return {"hits": hits, "prefix_tokens": tokens}


def compared(cell: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in cell.items() if name not in OF_OTHERS}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@NO_TRACES
@pytest.mark.parametrize("policy", [*TEXTBOOKS, "s3_fifo", BELADY, "LRU_pinned"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_traces_are_exact(name: str, policy: str) -> None:
    """As above, on conversations and on agents, at all sizes: each cell that the reference has of the policy."""
    there = reference(name)
    trace = read_trace(TRACES / there["file"])
    assert trace.input_tokens == there["input_tokens"]
    find = {BELADY: belady_cells, "LRU_pinned": pinned_cells}.get(policy, lambda t, n: cells(t, policy, n))
    for size in there["sizes"].values():
        wanted = compared(size[NAMES_THERE.get(policy, policy.upper())])
        assert find(trace, size["capacity_blocks"]) == wanted, size["capacity_blocks"]


@pytest.mark.soak
@NO_TRACES
@pytest.mark.parametrize("name", NAMES)
def test_no_cell_of_the_reference_is_left_out(name: str) -> None:
    """A policy, or a figure of one, is in the reference, and nobody compares it."""
    both = {f"{order}_{what}" for order in ORDERS_THERE.values() for what in ("hits", "prefix_tokens")}
    wanted = {NAMES_THERE.get(policy, policy.upper()): both for policy in (*TEXTBOOKS, "s3_fifo")}
    wanted["MIN"] = both - {"flat_prefix_tokens"} | {"flat_bypass_hits"}
    wanted["LRU_pinned"] = {"hits", "prefix_tokens"}
    for size in reference(name)["sizes"].values():
        there = {policy: {*compared(cell)} for policy, cell in size.items() if isinstance(cell, dict)}
        assert {policy: cell for policy, cell in there.items() if policy not in NOT_OURS} == wanted
