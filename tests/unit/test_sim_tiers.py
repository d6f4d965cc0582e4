"""Several tiers in the simulator: times that can be reckoned by hand, and figures that cannot be otherwise."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.cache.level import Level
from kvtier.errors import ConfigError
from kvtier.sim.hints import Hints
from kvtier.sim.lanes import Lanes
from kvtier.sim.replay import Replay
from kvtier.sim.report import TieredJob, growth, optimum, report_of
from kvtier.sim.setup import Setup
from kvtier.sim.tier_model import Speed
from kvtier.sim.trace import Trace, TracedHint, TracedRequest
from kvtier.types import EvictItem, Status, StoreKey, Transfer, TransferBatch

TOKENS, BLOCK_BYTES = 4, 2048  # 2 layers x K and V x 4 tokens x 2 heads x 16 x 4 bytes
MODEL = {"name": "tiny", "weights_epoch": "v1", "layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
PREFILL = 1000.0  # tokens per second
SLOW = Speed(1e6, 1e6, 0.001)
FAR = 500.0  # seconds until a request comes for which all is settled


def config_of(*tiers: dict[str, Any], **limits: Any) -> Any:
    """Tiers of so many pages; nothing is declined unless asked for."""
    limits = {"governor": False, "load_deadline": "1h"} | limits
    return kvtier.load_config({"model": MODEL | {"block_tokens": TOKENS}, "tiers": [*tiers], "limits": limits})


EAGER = {"low_watermark": 0.9, "high_watermark": 0.99}  # all is copied down as soon as nobody uses it


def gpu(pages: int, **changes: Any) -> dict[str, Any]:
    """One page is the null block's."""
    return {"type": "gpu", "capacity": f"{4 * pages}KiB"} | changes


def host(pages: int, **changes: Any) -> dict[str, Any]:
    return {"type": "host", "capacity": f"{4 * pages}KiB"} | changes


LMDB = {"type": "lmdb", "path": "/nowhere", "capacity": "1200KiB"}


def setup_of(config: Any, **changes: Any) -> Setup:
    settings = {"prefill_tokens_per_s": PREFILL, "speeds": dict.fromkeys(("gpu", "host", "lmdb"), SLOW)}
    return Setup(config, TOKENS, **(settings | changes))


def trace_of(*requests: tuple[float, Sequence[int]], tail: int = 1) -> Trace:
    """Requests of whole blocks and a tail of so many tokens."""
    rows = [TracedRequest(at_s, len(blocks) * TOKENS + tail, 0, blocks) for at_s, blocks in requests]
    return Trace("t", TOKENS, None, rows)


def replayed(trace: Trace, setup: Setup) -> Replay:
    replay = Replay(trace, setup)
    replay.run()
    assert replay.core.check() == []
    assert not replay.core.busy
    assert len(replay.observed.ttft_s) == len(trace.requests)
    return replay


# ---------------------------------------------------------------- time


def test_what_is_not_found_is_computed() -> None:
    """The time to the first token is not that of computing the prompt, or what is found counts as computed."""
    trace = trace_of((0, range(10)), (FAR, range(10)), (2 * FAR, range(5)))
    replay = replayed(trace, setup_of(config_of(gpu(64))))
    assert replay.observed.ttft_s == pytest.approx([41 / PREFILL, 1 / PREFILL, 1 / PREFILL])
    assert replay.observed.tokens == {"gpu": 60}
    assert (replay.observed.blocks, replay.observed.blocks_asked) == ({"gpu": 15}, 25)


def test_the_last_token_is_computed_and_partial_blocks_have_no_name() -> None:
    """A prompt that was seen as a whole costs nothing, which no engine can do; or half a block is found."""
    whole = trace_of((0, range(3)), (FAR, range(3)), tail=0)
    replay = replayed(whole, setup_of(config_of(gpu(64))))
    assert replay.observed.ttft_s == pytest.approx([12 / PREFILL, 4 / PREFILL])
    partial = Trace("t", TOKENS, None, [TracedRequest(at_s, 7, 0, [0, 1]) for at_s in (0, FAR)])
    assert replayed(partial, setup_of(config_of(gpu(64)))).observed.tokens == {"gpu": 4}


def test_one_prompt_is_computed_after_the_other() -> None:
    """An engine computes any number of prompts at once, and no load is ever too much."""
    trace = trace_of(*[(0.0, range(10 * n, 10 * n + 10)) for n in range(4)])
    replay = replayed(trace, setup_of(config_of(gpu(128))))
    assert replay.observed.ttft_s == pytest.approx([41 * n / PREFILL for n in (1, 2, 3, 4)])
    assert report_of(trace, replay).busy == pytest.approx(1.0, abs=0.01)


def test_a_load_takes_its_time() -> None:
    """Slow tiers cost nothing, or every block of a batch waits for the latency."""
    others = [(10 * n, range(100 * n, 100 * n + 6)) for n in range(1, 5)]
    trace = trace_of((0, range(6)), *others, (FAR, range(6)))
    replay = replayed(trace, setup_of(config_of(gpu(9, **EAGER), host(200))))
    assert replay.observed.tokens["host"] == 24
    load_s = 6 * BLOCK_BYTES / SLOW.write_bytes_per_s + SLOW.latency_s
    assert replay.observed.ttft_s[-1] == pytest.approx(load_s + 1 / PREFILL)


def test_a_disk_is_as_fast_as_said() -> None:
    """The speed of a tier is another's."""
    others = [(10 * n, range(100 * n, 100 * n + 6)) for n in range(1, 9)]
    trace = trace_of((0, range(6)), *others, (FAR, range(6)))
    config = config_of(gpu(9, **EAGER), host(12, **EAGER), LMDB)
    speeds = {"gpu": Speed(1e12, 1e12, 0.0), "lmdb": Speed(1e5, 1e9, 0.5)}
    replay = replayed(trace, setup_of(config, speeds=speeds))
    assert replay.observed.tokens["lmdb"] > 0
    load_s = replay.observed.tokens["lmdb"] / TOKENS * BLOCK_BYTES / 1e5 + 0.5
    assert replay.observed.ttft_s[-1] == pytest.approx(load_s + 1 / PREFILL, rel=1e-3)


def test_the_governor_is_the_products() -> None:
    """The simulator loads from a disk so slow that the product would compute instead."""
    others = [(10 * n, range(100 * n, 100 * n + 6)) for n in range(1, 9)]
    trace = trace_of((0, range(6)), *others, *[(FAR * n, range(6)) for n in range(1, 4)])
    speeds = {"gpu": SLOW, "host": Speed(1e9, 1e9, 0.0), "lmdb": Speed(1e3, 1e3, 0.0)}
    slow = setup_of(config_of(gpu(9, **EAGER), LMDB, governor=True), speeds=speeds)
    report = report_of(trace, replayed(trace, slow))
    assert report.declined_tokens > 0
    fast = setup_of(config_of(gpu(9, **EAGER), LMDB, governor=True), speeds=speeds | {"lmdb": Speed(1e9, 1e9, 0.0)})
    assert report_of(trace, replayed(trace, fast)).declined_tokens == 0


@pytest.mark.parametrize(("quota", "kept"), [(0.5, 8), (0.0, 0)])
def test_pins_are_bounded_as_configured(quota: float, kept: int) -> None:
    """Pins in the simulator's core end elsewhere than in a cache of the same YAML."""
    core = replayed(trace_of((0.0, range(10))), setup_of(config_of(gpu(17), pin_quota=quota))).core
    for handle in [*core.residency.directory.handles()]:
        core.residency.ranks.claim(core.residency.directory.key(handle), 1)
    assert core.residency.ranks.kept(0) == kept


def test_deadlines_are_heeded() -> None:
    """Time jumps from event to event, over the moment at which a request had enough of waiting for a load."""
    others = [(10 * n, range(100 * n, 100 * n + 6)) for n in range(1, 9)]
    trace = trace_of((0, range(6)), *others, (FAR, range(6)))
    speeds = {"gpu": SLOW, "lmdb": Speed(1e2, 1e9, 0.0)}
    config = config_of(gpu(24, **EAGER), LMDB, load_deadline="250ms")
    replay = replayed(trace, setup_of(config, speeds=speeds))
    assert replay.core.stats()["deadline_cuts"] == 1
    assert replay.observed.ttft_s[-1] == pytest.approx(0.25 + 25 / PREFILL)


def batch_of(source: int, target: int, blocks: int = 0, evict: Sequence[tuple[int, int]] = ()) -> TransferBatch:
    key = StoreKey(b"1234567890")
    transfers = tuple(Transfer(n, key, 0, 0, 0, BLOCK_BYTES) for n in range(blocks))
    return TransferBatch(1, source, target, transfers, tuple(EvictItem(key, *place) for place in evict))


def test_batches_of_one_direction_queue() -> None:
    """A tier is the faster the more is asked of it; or loads wait behind stores."""
    tiers = [model for model, _ in setup_of(config_of(gpu(64), LMDB)).tiers()]
    lanes = Lanes(tiers)
    batch_s = 10 * BLOCK_BYTES / SLOW.read_bytes_per_s
    ends = [lanes.ends_at_s(batch_of(*lane, blocks=10), 1.0) - 1.0 for lane in ((1, 0), (1, 0), (0, 1))]
    assert ends == pytest.approx([batch_s + 0.001, 2 * batch_s + 0.001, batch_s + 0.001])
    assert lanes.ends_at_s(batch_of(1, 0, blocks=10), 9.0) == pytest.approx(9.0 + batch_s + 0.001)


# ---------------------------------------------------------------- room


def test_a_modelled_store_keeps_its_promises() -> None:
    """A full store takes more, in places that its own batch has freed; or an old eviction erases a new block."""
    ((store, level),) = setup_of(config_of(gpu(64), LMDB)).tiers()[1:]
    assert level.room is not None
    most = level.room.blocks(BLOCK_BYTES)
    written = store.write(batch_of(0, 1, blocks=most + 1)).outcomes
    assert [outcome.done for outcome in written] == [True] * most + [False]
    assert len({outcome.place for outcome in written[:-1]}) == most
    assert level.room.used_bytes() == most * 4096
    place, generation = written[0].place, written[0].generation
    stored, evicted = store.write(batch_of(0, 1, blocks=1, evict=[(place, generation)])).outcomes
    assert (stored.status, evicted.status) == (Status.NO_ROOM, Status.DONE)
    (again,) = store.write(batch_of(0, 1, blocks=1)).outcomes
    assert again.place == place
    assert again.generation > generation
    (stale,) = store.write(batch_of(1, 1, evict=[(place, generation)])).outcomes
    assert stale.status is Status.MISSING
    assert level.room.blocks(BLOCK_BYTES) == 0


def test_requests_wait_for_slots() -> None:
    """Two requests share slots that only one of them can have."""
    trace = trace_of((0, range(10)), (0, range(20, 30)), (0.001, range(40, 50)))
    replay = replayed(trace, setup_of(config_of(gpu(16))))
    assert replay.core.stats()["no_room"] > 0
    assert replay.observed.ttft_s == pytest.approx(
        [41 * n / PREFILL - late for n, late in ((1, 0), (2, 0), (3, 0.001))]
    )
    assert replay.observed.uncached == 0


def test_those_that_wait_keep_their_order() -> None:
    """Requests that were refused slots overtake each other, or one of them is forgotten."""
    trace = trace_of(*[(0.001 * n, range(20 * n, 20 * n + 11)) for n in range(40)])
    replay = replayed(trace, setup_of(config_of(gpu(28), host(16), LMDB)))
    assert replay.core.stats()["no_room"] >= 2
    assert replay.observed.uncached == 0
    done_s = [45 * (n + 1) / PREFILL for n in range(40)]
    assert replay.observed.ttft_s == pytest.approx([at_s - 0.001 * n for n, at_s in enumerate(done_s)])


def test_a_prompt_larger_than_the_tier_does_without() -> None:
    """It waits for ever for slots that do not exist, and everybody behind it as well."""
    trace = trace_of((0, range(100)), (0, range(200, 205)), (FAR, range(200, 205)))
    replay = replayed(trace, setup_of(config_of(gpu(16))))
    assert replay.observed.uncached == 1
    assert replay.observed.tokens == {"gpu": 20}
    assert report_of(trace, replay).uncached == 1


def test_only_so_many_are_admitted_at_once() -> None:
    """A queue of requests holds all slots, and nothing is left for those that are served."""
    trace = trace_of(*[(0.0, range(10 * n, 10 * n + 10)) for n in range(6)])
    replay = Replay(trace, setup_of(config_of(gpu(256)), admitted_max=2))
    most = 0
    reserve = replay.core.submit_reserve

    def noting(*arguments: Any) -> int:
        nonlocal most
        ticket = reserve(*arguments)
        most = max(most, replay.core.stats()["leases"])
        return ticket

    core: Any = replay.core
    core.submit_reserve = noting
    replay.run()
    assert most == 2
    assert len(replay.observed.ttft_s) == 6


def test_tiers_without_room_are_refused() -> None:
    """A block of the trace is larger than a tier, and the simulation fails somewhere inside."""
    with pytest.raises(ConfigError, match="gpu"):
        Replay(trace_of((0, [0])), Setup(config_of(gpu(16)), 4000))
    with pytest.raises(ConfigError, match="lmdb"):
        Replay(trace_of((0, [0])), Setup(config_of({"type": "gpu", "capacity": "1GiB"}, LMDB), 4000))


def groups_of(*lengths: int, heads: int = 2) -> dict[str, Any]:
    """A model with a group for each length of a block."""
    shared = {name: MODEL[name] for name in ("head_dim", "dtype")} | {"kind": "full", "kv_heads": heads}
    groups = [shared | {"layers": 2 if index else 1, "block_tokens": tokens} for index, tokens in enumerate(lengths)]
    return {"name": "hybrid", "weights_epoch": "v1", "groups": groups}


SHAPES = [MODEL | {"block_tokens": TOKENS, "kv_heads": heads} for heads in (2, 3, 40)]
SHAPES += [groups_of(1, TOKENS, heads=16), groups_of(TOKENS, 2, heads=4), groups_of(TOKENS, TOKENS)]


@pytest.mark.parametrize("model", SHAPES)
def test_tiers_are_as_large_as_real_ones(tmp_path: Path, model: dict[str, Any]) -> None:
    """Blocks fit into the simulation that would not fit into the product, or the other way round."""
    store = LMDB | {"path": str(tmp_path / "store"), "capacity": "3MiB", "policy": "arc"}
    plain = {"pin": "off", "hugepages": "off"}
    tiers = [gpu(1001, low_watermark=0.2, high_watermark=0.5), host(777, **plain), store]
    config = kvtier.load_config({"model": model, "tiers": tiers})
    with kvtier.open_sync(config) as cache:
        real = cache._engine.call(lambda core, now_s: [shape_of(level) for level in core.residency.levels])
    assert [shape_of(level) for _, level in Setup(config, TOKENS).tiers()] == real


def shape_of(level: Level) -> dict[str, Any]:
    """All that decides about room and movement."""
    names = ("name", "policy_name", "policy_blocks", "batch_bytes", "capacity_bytes", "stride_bytes")
    shape = {name: getattr(level, name) for name in (*names, "low_watermark", "high_watermark", "host_addressable")}
    if level.pool:
        return shape | {"free": level.pool.slots_free, "usable": level.slots_usable}
    assert level.room is not None
    return shape | {"room": level.room.blocks(1280), "used": level.room.used_bytes()}


def test_blocks_are_as_long_as_the_traces() -> None:
    """Capacities are counted in blocks of the configuration, which are thirty times smaller."""
    setup = Setup(config_of(gpu(16)), 16)
    assert setup.block_bytes == 4 * BLOCK_BYTES
    (_, level) = setup.tiers()[0]
    assert level.policy_blocks == 16 * 4096 // (4 * BLOCK_BYTES) - 1


@pytest.mark.parametrize(
    ("lengths", "trace_tokens", "parts"),
    [((4, 16), 16, (4, 1)), ((4, 16), 512, (4, 1)), ((8, 12), 48, (3, 2)), ((4, 4), 16, (1, 1)), ((4, 16), 10, (1, 1))],
)
def test_groups_keep_their_proportions(lengths: tuple[int, ...], trace_tokens: int, parts: tuple[int, ...]) -> None:
    """A hybrid model's short blocks get the slots of long ones for nothing, or a block of the trace is no whole one."""
    setup = Setup(kvtier.load_config({"model": groups_of(*lengths), "tiers": [gpu(64)]}), trace_tokens)
    assert setup.parts == parts
    assert [size * part for size, part in zip((g.block_tokens for g in setup.model.groups), parts, strict=True)] == [
        trace_tokens,
        trace_tokens,
    ]
    assert setup.block_bytes == trace_tokens * (1 + 2) * 2 * 2 * 16 * 4


def test_a_store_holds_so_many_blocks_of_groups_together() -> None:
    """The policy of a hybrid model's disk is made for as many blocks as if there were as many long ones as short."""
    model = groups_of(1, 4, heads=64)  # blocks of 8 and 64 KiB, of which a prompt has four for each
    store = LMDB | {"capacity": "64MiB"}
    (_, level) = Setup(kvtier.load_config({"model": model, "tiers": [gpu(999), store]}), 4).tiers()[1]
    assert level.policy_blocks == level.capacity_bytes // ((4 * 8 + 64) * 1024 // 5)


@pytest.mark.parametrize(("pages", "uncached"), [(13, 0), (12, 2)])
def test_a_prompt_waits_for_slots_of_all_its_groups(pages: int, uncached: int) -> None:
    """A hybrid model's prompt that would fit is taken for too large, and served without the cache."""
    config = kvtier.load_config({"model": groups_of(1, 4), "tiers": [gpu(pages)], "limits": {"load_deadline": "1h"}})
    replay = Replay(trace_of((0, [0, 1]), (0, [2, 3])), Setup(config, TOKENS))  # 9 tokens: 9 blocks and 3
    assert replay.run().uncached == uncached


@pytest.mark.parametrize(("lengths", "slots"), [((4, 4), 2), ((2, 4), 3), ((4, 1), 5)])
def test_the_bound_counts_all_groups(lengths: tuple[int, ...], slots: int) -> None:
    """Nobody sees that more room is of no use: the bound for a hybrid model is that of tiers twice as large."""
    requests = [(FAR * turn, [turn % 3 * 10 + depth for depth in range(2)]) for turn in range(12)]
    model = groups_of(*lengths)
    config = kvtier.load_config({"model": model, "tiers": [gpu(4 * slots + 1)], "limits": {"governor": False}})
    trace = trace_of(*requests)
    report = TieredJob(Setup(config, TOKENS), bound=True).run(trace)
    assert report.tiers[0].capacity_blocks == 4 * slots
    assert report.optimum_hit_rate == optimum(trace, 4) < optimum(trace, 6)
    assert report.prefix_hit_rate <= report.optimum_hit_rate


# ---------------------------------------------------------------- figures


def conversations(seed: int, count: int, every_s: float, tails: Sequence[int] = (2,)) -> Trace:
    rng = random.Random(seed)
    tips: list[list[int]] = [[n] for n in range(4)]
    fresh = 4
    requests = []
    for index in range(count):
        prompt = list(rng.choice(tips[-30:]))[: rng.randint(1, 8)]
        more = rng.randint(0, 4)
        prompt += range(fresh, fresh + more)
        fresh += more
        tips.append(prompt)
        requests.append(TracedRequest(index * every_s, len(prompt) * TOKENS + rng.choice(tails), 0, prompt))
    return Trace("t", TOKENS, None, requests)


def test_the_reports_figures_fit_together() -> None:
    """Shares do not add up, or a figure is of something else than its name says."""
    trace = conversations(3, 300, 0.2)
    setup = setup_of(config_of(gpu(16), host(32), LMDB))
    replay = replayed(trace, setup)
    report = report_of(trace, replay)
    stats = replay.core.stats()
    assert report.prefix_tokens == stats["restored_tokens"] == sum(tier.prefix_tokens for tier in report.tiers)
    assert report.prefix_hit_rate == pytest.approx(report.prefix_tokens / trace.input_tokens)
    assert all(tier.prefix_tokens > 0 for tier in report.tiers)
    assert 0 < report.prefix_hit_rate < report.block_hit_rate < 1
    assert 0 < report.ttft_p50_s < report.ttft_p99_s <= max(replay.observed.ttft_s)
    disk = report.tiers[-1]
    assert disk.written_bytes_per_day is not None
    assert disk.capacities_per_day == pytest.approx(disk.written_bytes_per_day / disk.capacity_bytes)
    assert disk.written_bytes_per_day == pytest.approx(disk.written_bytes / replay.observed.end_s * 86_400)
    assert [tier.written_bytes_per_day for tier in report.tiers[:2]] == [None, None]
    assert report.moved_bytes == sum(tier.written_bytes for tier in report.tiers)
    assert disk.evicted > 0
    assert (report.policy, report.optimum_hit_rate) == ("lru", None)


@pytest.mark.parametrize("began_s", [76_000.0, float(1 << 31)])
def test_figures_do_not_depend_on_what_times_count_from(began_s: float) -> None:
    """A recording that counts from a boot, or a log that counts from 1970, has a disk that nearly nothing is written
    to, a wear budget that was saved for years, and an engine that idles."""
    trace = conversations(3, 100, 0.25)
    hint = TracedHint(0.0, "s", None, priority=1)
    trace = replace(trace, hints=[hint], requests=[request._replace(session="s") for request in trace.requests])
    later = replace(
        trace,
        hints=[hint._replace(at_s=began_s - 0.5)],
        requests=[request._replace(at_s=request.at_s + began_s) for request in trace.requests],
    )
    wear = {"per_day": WEAR_BYTES_PER_S * 86_400, "burst": "1h"}
    for changes in ({}, {"hints": Hints("returns")}):
        setup = setup_of(config_of(gpu(16), host(32), LMDB | {"wear": wear}), **changes)
        assert TieredJob(setup).run(later) == TieredJob(setup).run(trace)


WEAR_BYTES_PER_S = 4000


def test_admission_and_wear_are_those_of_the_file() -> None:
    """A budget is tried out, and the figures are those of a disk without one."""
    trace = conversations(3, 300, 0.2)
    wear, found = {"per_day": WEAR_BYTES_PER_S * 86_400, "burst": "10s"}, {}
    for name, disk in [("none", {}), ("rule", {"admission": "second_access"}), ("wear", {"wear": wear})]:
        replay = replayed(trace, setup_of(config_of(gpu(16), host(32), LMDB | disk)))
        found[name] = report_of(trace, replay).tiers[-1]
        assert replay.core.check() == []
    assert found["none"].not_admitted == 0
    for name in ("rule", "wear"):
        assert found[name].not_admitted > 0
        assert 0 < found[name].written_bytes < found["none"].written_bytes
    assert found["wear"].written_bytes <= WEAR_BYTES_PER_S * (10 + replay.clock.now()) + BLOCK_BYTES


def test_quantiles_are_values_that_occurred() -> None:
    """The median of a hundred requests is the first or the last one."""
    trace = trace_of(*[(FAR * n, range(100 * n, 100 * n + n)) for n in range(1, 101)], tail=1)
    report = report_of(trace, replayed(trace, setup_of(config_of(gpu(128)))))
    assert report.ttft_p50_s == pytest.approx(201 / PREFILL)
    assert report.ttft_p99_s == pytest.approx(397 / PREFILL)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.floats(0.0, 0.3), st.booleans(), st.sampled_from(["lru", "arc", "hit_density"]))
def test_nothing_is_found_that_nobody_could(seed: int, every_s: float, governed: bool, policy: str) -> None:
    """Under load, with requests waiting for slots and each other, blocks are found that were not there."""
    trace = conversations(seed, 40, every_s, tails=(0, 0, 1))
    config = config_of(gpu(16), host(24), LMDB, governor=governed)
    setup = setup_of(config, policy=policy)
    report = TieredJob(setup, bound=True).run(trace)
    replayed(trace, setup)
    assert report.optimum_hit_rate is not None
    assert report.prefix_hit_rate <= report.optimum_hit_rate
    assert report == TieredJob(setup, bound=True).run(trace), "the same run ends in another way"


def test_the_optimum_counts_as_the_product_does() -> None:
    """The bound counts last tokens and partial blocks, and seems out of reach."""
    assert optimum(trace_of((0, range(3)), (1, range(3)), tail=0), 100) == pytest.approx(8 / 24)
    assert optimum(trace_of((0, range(3)), (1, range(3)), tail=1), 100) == pytest.approx(12 / 26)


def test_a_block_that_ends_with_its_prompt_is_found_by_the_next() -> None:
    """The product finds more than "possible": it stores the last block of a prompt, though this one cannot use it."""
    rows = [TracedRequest(FAR * n, 2 * TOKENS + n % 2, 0, [n // 2 * 2, n // 2 * 2 + 1]) for n in range(60)]
    trace = Trace("t", TOKENS, None, rows)
    report = TieredJob(setup_of(config_of(gpu(16), host(24))), bound=True).run(trace)
    assert report.prefix_tokens == 30 * 2 * TOKENS
    assert report.optimum_hit_rate == report.prefix_hit_rate


def test_what_more_room_brings() -> None:
    """A larger tier is simulated as large as before, or another one is enlarged."""
    trace = conversations(5, 300, 1.0)
    setup = setup_of(config_of(gpu(16), host(8)))
    before = TieredJob(setup).run(trace)
    after = TieredJob(setup.with_more("host", 64 * 4096)).run(trace)
    assert [tier.capacity_blocks for tier in after.tiers] == [before.tiers[0].capacity_blocks, 72]
    found = growth(before, after, "host", 64 * 4096)
    assert found.gain_per_gb == pytest.approx((after.prefix_hit_rate - before.prefix_hit_rate) / (64 * 4096 / 1e9))
    assert found.gain_per_gb > 0


def test_times_that_go_back_are_taken_as_now() -> None:
    """A log that is slightly out of order stops the simulation."""
    trace = trace_of((5.0, range(3)), (4.0, range(3)), (6.0, range(3)))
    assert replayed(trace, setup_of(config_of(gpu(16)))).observed.tokens == {"gpu": 12}  # the first two came at once
