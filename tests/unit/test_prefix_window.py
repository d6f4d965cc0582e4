"""PrefixWindow: the hit rate of the latest requests, as vLLM 0.32 logs it."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.prefix_stats import PrefixStats
from kvtier.cache.prefix_window import PrefixWindow
from kvtier.errors import UsageError
from tests.manager_state import full, manager_of, serve

VLLM = json.loads((pathlib.Path(__file__).parents[1] / "data" / "vllm" / "metrics.json").read_text())["windows"]


def update(requests, queries=0, hits=0, **more):
    return PrefixStats(requests=requests, queries=queries, hits=hits, **more)


def sums(window):
    return [window.requests, window.queries, window.hits]


@pytest.mark.parametrize("requests_max", VLLM)
def test_the_window_is_vllms(requests_max):
    """A dashboard shows another hit rate than vLLM's for the same requests."""
    window = PrefixWindow(int(requests_max))
    left = 0
    for (reset, requests, queries, hits), answer in VLLM[requests_max]:
        before = window.requests
        window.observe(update(requests, queries, hits, reset=reset, preempted_requests=3, preempted_queries=99))
        assert [*sums(window), window.hit_rate] == answer
        left += not reset and window.requests < before + requests
    assert left > 9


@st.composite
def updates(draw):
    queries = draw(st.integers(0, 50))
    return draw(st.integers(0, 9)), queries, draw(st.integers(0, queries)), draw(st.integers(0, 9)) == 0


@given(st.integers(1, 12), st.lists(updates(), max_size=40))
def test_the_sums_are_those_of_the_latest_updates(requests_max, rows):
    """Sums drift away from the updates that the window covers."""
    window = PrefixWindow(requests_max)
    for number, (requests, queries, hits, reset) in enumerate(rows, start=1):
        window.observe(update(requests, queries, hits, reset=reset))
        since = max([i for i in range(number) if rows[i][3]], default=0)
        kept = [row for row in rows[since:number] if row[0]]
        # the longest run of updates up to the last one that fits, and the last one in any case
        first = next((i for i in range(len(kept)) if sum(row[0] for row in kept[i:]) <= requests_max), len(kept) - 1)
        covered = kept[max(first, 0) :]
        assert sums(window) == [sum(row[i] for row in covered) for i in range(3)]
        assert 0.0 <= window.hit_rate <= 1.0


def test_nothing_asked_for_is_no_hit_rate_but_zero():
    """A dashboard of an idle engine divides by zero."""
    window = PrefixWindow()
    assert window.hit_rate == 0.0
    window.observe(update(2))
    assert (window.requests, window.hit_rate) == (2, 0.0)


def test_idle_steps_push_nothing_out():
    """After a minute without requests the hit rate is that of nothing."""
    window = PrefixWindow(2)
    window.observe(update(2, 10, 5))
    for _ in range(5):
        window.observe(update(0))
    assert sums(window) == [2, 10, 5]


def test_a_large_update_stays_until_the_next():
    """A single update with more requests than the window holds leaves it empty, or stays for ever."""
    window = PrefixWindow(2)
    window.observe(update(1, 10, 0))
    window.observe(update(5, 40, 30))
    assert sums(window) == [5, 40, 30]
    window.observe(update(1, 10, 1))
    assert sums(window) == [1, 10, 1]


def test_a_reset_empties_the_window_before_its_update():
    """Hits on forgotten prefixes are still in the rate, or the first ones after the reset are not."""
    window = PrefixWindow()
    window.observe(update(3, 30, 20))
    window.observe(update(1, 10, 4, reset=True))
    assert sums(window) == [1, 10, 4]
    window.observe(update(0, reset=True))
    assert sums(window) == [0, 0, 0]


def test_it_takes_what_a_manager_gives():
    """A manager's counters do not fit the window."""
    manager, window = manager_of(full(), blocks_total=20), PrefixWindow()
    for name in ("first", "second"):
        request, hit, _ = serve(manager, name, list(range(10)))
        manager.record_lookup(request, hit)
        window.observe(manager.take_stats())
        manager.free(request)
    assert (sums(window), window.hit_rate) == ([2, 20, 8], 0.4)
    assert manager.reset()
    window.observe(manager.take_stats())
    assert sums(window) == [0, 0, 0]


@pytest.mark.parametrize("requests_max", [0, -1, True, 10.0, None])
def test_a_window_of_nothing_is_refused(requests_max):
    """A wrong number shows the latest update alone, as if it were the rate."""
    with pytest.raises(UsageError, match="from 1 on"):
        PrefixWindow(requests_max)
