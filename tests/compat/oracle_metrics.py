"""Asks vLLM 0.32 what its metrics of the cache are, and writes its answers to `tests/data/vllm/metrics.json`.

    python -m tests.compat.oracle_metrics [FILE]       (in an environment that has vllm; nothing here imports kvtier)

Time is a number of ticks, each 1/512 of a second, so that seconds are exact as nanoseconds and as floats. A life is
[lifetime, idle, [gap...]] in ticks. Every block is sampled.

calls    [[ticks, NAME, blocks, lives]...] of vLLM's collector alone: `take` (which evicts, too), `touch`, `evict`,
         `reset`, and `fetch`, whose lives are those since the last one.
logs     {NAME: [[line, lives]...]} of vLLM's manager with a collector, driven as for the log of that name in the same
         folder; `line` counts from 0 (the log's first line), and before each line time goes on by `ticks_before`.
         Lines without lives are left out.
windows  {requests_max: [[[reset, requests, queries, hits], [requests, queries, hits, hit_rate]]...]}: an update and
         the window after it.
"""

import json
import os
import pathlib
import random
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.core import kv_cache_metrics
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats

from tests.compat import oracle_steps
from tests.compat.metric_ticks import TICK_NS, ticks_before

FILE = pathlib.Path(__file__).parents[1] / "data" / "vllm" / "metrics.json"
LOGS = [  # many hits; copies of blocks, twice; several sizes; several groups; no caching at all
    "rich_1_180_33_8",
    "mambahash_0_180_23_4",
    "mambahashswa_0_180_41_4",
    "sizes_0_180_33_4",
    "three_0_180_49_4",
    "nocacheswa_0_180_33_4",
]
WINDOWS = (1, 7, 50)


class Ticks:
    """The clock of vLLM's collector from here on."""

    def __init__(self):
        self.now = 0
        kv_cache_metrics.time = SimpleNamespace(monotonic_ns=lambda: self.now * TICK_NS)


def calls(draw, count=400, blocks_total=12):
    """Random calls of a collector, as a pool makes them."""
    ticks, collector = Ticks(), KVCacheMetricsCollector(1.0)
    names = draw.choices(["take", "touch", "evict", "fetch", "reset"], [30, 60, 8, 6, 1], k=count)
    for name in [*names, "fetch"]:
        ticks.now += draw.choice([0, 1, 1, 3, 40])
        blocks = draw.sample(range(1, blocks_total), draw.randrange(5)) if name in ("take", "touch", "evict") else []
        for block in [SimpleNamespace(block_id=block) for block in blocks]:
            if name in ("take", "evict"):
                collector.on_block_evicted(block)
            if name == "take":
                collector.on_block_allocated(block)
            elif name == "touch":
                collector.on_block_accessed(block)
        if name == "reset":
            collector.reset()
        yield [ticks.now, name, blocks, drained(collector) if name == "fetch" else []]


def log(name):
    """The lines at which blocks' lives ended, while vLLM's manager does what the log of that name says."""
    ticks, collector = Ticks(), KVCacheMetricsCollector(1.0)
    manager_of = oracle_steps.manager_of

    def watched(config):
        manager = manager_of(config)
        manager.block_pool.metrics_collector = collector
        return manager

    oracle_steps.manager_of = watched
    kind, *numbers = name.split("_")
    lines = oracle_steps.run(kind, *map(int, numbers))
    next(lines)
    oracle_steps.manager_of = manager_of
    number = 1
    while True:
        ticks.now += ticks_before(number)
        if next(lines, None) is None:
            return
        if lives := drained(collector):
            yield [number, lives]
        number += 1


def windows(draw, requests_max, count=80):
    """Random updates, large ones, idle ones and resets among them."""
    window = CachingMetrics(requests_max)
    for _ in range(count):
        requests = draw.choice([0, 1, 1, 2, 3, requests_max, requests_max + 2])
        queries = sum(draw.randrange(0, 200) for _ in range(requests))
        update = [draw.random() < 0.06, requests, queries, draw.randrange(queries + 1)]
        window.observe(PrefixCacheStats(*update, preempted_requests=3, preempted_queries=99, preempted_hits=9))
        sums = [window.aggregated_requests, window.aggregated_query_total, window.aggregated_query_hit]
        yield [update, [*sums, window.hit_rate]]


def drained(collector):
    return [
        [in_ticks(life.lifetime_seconds), in_ticks(life.idle_seconds), [*map(in_ticks, life.reuse_gaps_seconds)]]
        for life in collector.drain_events()
    ]


def in_ticks(seconds):
    ticks = seconds * 1e9 / TICK_NS
    assert ticks == int(ticks)
    return int(ticks)


def main(file=FILE):
    draw = random.Random(7)
    answers = {
        "calls": list(calls(draw)),
        "logs": {name: list(log(name)) for name in LOGS},
        "windows": {requests_max: list(windows(draw, requests_max)) for requests_max in WINDOWS},
    }
    pathlib.Path(file).write_text(json.dumps(answers, separators=(",", ":")).replace("]]],[", "]]],\n[") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
