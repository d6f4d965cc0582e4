"""`benchmarks/movement*.py` at tiny sizes: each part measures what it says, and refuses figures of something else."""

import asyncio
import dataclasses
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvtier
from kvtier.cli.bench import lag, world
from kvtier.cli.bench.report import Report
from kvtier.cli.demo import weights
from kvtier.engine.sync import open_sync
from kvtier.errors import KvtierError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Part = Callable[[str], Any]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """A module of the benchmark, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"movement_{name}")


def found_by(module: Any, folder: Path, **sizes: int) -> dict[str, list[float]]:
    """The values of each line of a part's report."""
    chosen = module.Sizes(**sizes)
    report = Report(module.NAME, dataclasses.asdict(chosen), folder)
    module.measure(report, chosen, folder)
    return {cost.what: cost.values for cost in report.costs}


def test_costs_are_by_verb_and_state_of_the_slots(part: Part, tmp_path: Path) -> None:
    """A verb would have no line of its own, or match + commit would be of other rounds than its parts."""
    costs = found_by(part("costs"), tmp_path, blocks=64, rounds=2)
    for face in ("core", "SyncCache"):
        for slots in ("free slots", "slots of clean blocks"):
            lines = {verb: costs.pop(f"{face}, {slots}: {verb}") for verb in ("match", "reserve", "commit", "release")}
            assert all(len(values) == 2 and min(values) > 0 for values in lines.values())
            both = [match + commit for match, commit in zip(lines["match"], lines["commit"], strict=True)]
            assert costs.pop(f"{face}, {slots}: match + commit") == both
    assert not costs


def test_costs_of_a_hit_are_refused(part: Part, tmp_path: Path) -> None:
    """The cost of a miss would be that of a prompt that is known already."""
    costs = part("costs")
    config = world.config(world.SMALL, world.SMALL_BYTES, 16, 16, tmp_path / "store", 64)
    keys = world.prompt(config, 0, 4)
    with costs.polled(config) as engine:
        verbs = costs.CoreVerbs(engine)
        assert set(costs._request(verbs, keys)) == set(costs.VERBS)
        with pytest.raises(KvtierError, match="miss"):
            costs._request(verbs, keys)


def test_readers_share_what_is_read(part: Part, tmp_path: Path) -> None:
    """Bytes would be counted that no reader caused, or the prefix would come from memory."""
    costs = found_by(part("readers"), tmp_path, readers=5, blocks=3, rounds=1)
    prefix_mb = 3 * world.LARGE_BYTES / 1e6
    assert costs["one reader, bytes read by the tier"] == [prefix_mb]
    assert costs["5 readers, bytes read by the tier"] == [prefix_mb]
    assert costs["5 readers / one, by the tier"] == [1.0]
    assert costs["one reader, bytes read by the kernel"][0] >= prefix_mb


def test_one_reader_and_all_of_them_take_turns(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader would be compared with one."""
    readers = part("readers")
    asked = []

    async def read_by(config: object, count: int, blocks: int) -> Any:
        asked.append(count)
        return readers.Bytes(10 * count, 30 * count)

    monkeypatch.setattr(readers, "read_by", read_by)
    costs = found_by(readers, tmp_path, readers=5, blocks=1, rounds=2)
    assert asked == [1, 5, 1, 5]
    assert costs["5 readers / one, by the tier"] == costs["5 readers / one, by the kernel"] == [5, 5]


def test_a_reader_without_the_prefix_is_told(part: Part, tmp_path: Path) -> None:
    """Readers that got nothing would look cheap."""
    config = world.config(world.LARGE, world.LARGE_BYTES, 3, 3, tmp_path / "store", 3)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(part("readers").read_by(config, 1, 3))
    assert caught.group_contains(KvtierError, match="whole prefix")


def test_lag_is_of_rounds_that_moved_everything(part: Part, tmp_path: Path) -> None:
    """The loop would be watched while nothing, or less, moves."""
    costs = found_by(part("lag"), tmp_path, blocks=4, rounds=2)
    idle_ms, moving_ms = costs["p99 of the lag, idle"], costs["p99 of the lag, demoting"]
    above_ms = [moving - idle for idle, moving in zip(idle_ms, moving_ms, strict=True)]
    assert costs["p99 of the lag, demoting - idle"] == above_ms
    assert len(above_ms) == 2

    async def flush_nothing() -> None:
        config = world.config(world.SMALL, world.SMALL_BYTES, 4, 4, tmp_path / "empty", 4)
        async with kvtier.open(config) as cache:
            await lag.flush(cache, 4)

    with pytest.raises(KvtierError, match="4 blocks were to be"):
        asyncio.run(flush_nothing())


def test_lag_is_what_a_sleep_took_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is kept busy would seem to wake up in time."""
    now_s = 0.0
    monkeypatch.setattr(lag, "time", SimpleNamespace(perf_counter=lambda: now_s))

    async def keep_busy() -> None:
        nonlocal now_s
        now_s += 0.05

    async def lags() -> list[float]:
        return await lag.lags_ms(asyncio.create_task(keep_busy()))

    assert asyncio.run(lags()) == [pytest.approx(49)]


def test_percentiles_are_of_the_nearest_rank() -> None:
    """p99 would be another one."""
    percentile = lag.percentile
    assert percentile([float(n) for n in range(200, 0, -1)], 99) == 198
    assert percentile([3.0], 99) == 3
    assert percentile([1.0, 2.0], 50) == 1


def test_ram_is_told_by_quarters(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end would be missing, the most would not be the most, or a leak would not show as growth."""
    memory = part("memory")
    samples = [memory.Sample(blocks, (50 + blocks) * 10**6) for blocks in range(0, 101, 10)]
    monkeypatch.setattr(memory, "churn", lambda cache, config, blocks: samples)
    costs = found_by(memory, tmp_path, blocks=100)
    marks = [costs[f"RAM at the {name}"] for name in ("start", "1/4", "2/4", "3/4", "end")]
    assert marks == [[50], [70], [100], [120], [150]]
    budget_mb = (memory.GPU_SLOTS + memory.HOST_SLOTS) * 4096 / 1e6
    assert costs["most RAM - budget"] == [pytest.approx(150 - budget_mb)]
    assert costs["growth in the second half, by its line"] == [pytest.approx(50)]


def test_churn_moves_both_ways(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM would be flat because nothing is evicted or read back."""
    memory = part("memory")
    for name, size in (("GPU_SLOTS", 256), ("HOST_SLOTS", 512), ("STORE_BLOCKS", 2048), ("SAMPLES", 5)):
        monkeypatch.setattr(memory, name, size)
    config = memory.churning(tmp_path / "store")
    with open_sync(config) as cache:
        samples = memory.churn(cache, config, 4000)
        store = cache.stats()["tiers"]["lmdb"]
    assert samples[0].blocks == 0
    assert samples[-1].blocks >= 4000
    assert [s.blocks for s in samples] == sorted(s.blocks for s in samples)
    assert store["read_blocks"] > 400
    assert store["evicted"] > 0


def test_the_feeder_brings_down_what_it_commits(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would be measured beside a cache that moves nothing."""
    decode = part("decode")
    monkeypatch.setattr(decode, "LEAD_S", 0.0)
    with open_sync(decode._config(tmp_path / "store", decode.EAGER)) as cache, decode.Feeder(cache, 1e9) as feeder:
        with feeder.feeding():
            while not cache.stats()["committed_blocks"]:
                pass
        stats = cache.stats()
        assert stats["committed_blocks"] % decode.FED_BLOCKS == 0
        assert feeder.written_bytes() == stats["committed_blocks"] * world.LARGE_BYTES > 0


def test_ratios_are_of_the_same_round(part: Part) -> None:
    """A ratio would compare turns of different rounds, or be upside down."""
    decode = part("decode")
    steps = {decode.ALONE: [[10.0] * 3, [20.0] * 3], decode.FED: [[11.0] * 3, [22.0] * 3]}
    steps[decode.DEMOTING] = [[12.0] * 3, [24.0] * 3]
    report = Report("", {})
    decode._tell(report, steps)
    medians = [cost for cost in report.costs[:6] if cost.unit == "x"]
    assert [cost.values for cost in medians] == [
        [12 / 11, 24 / 22],
        [1.2, 1.2],
        [1.1, 1.1],
    ]
    assert [cost.target for cost in medians] == [decode.TARGET, decode.TARGET, None]


@pytest.mark.torch
@pytest.mark.xdist_group("the demo's model")
def test_steps_are_timed_one_by_one(part: Part) -> None:
    """A step would be the prompt, or several tokens."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    decode = part("decode")
    if not weights.is_converted(weights.model_folder(os.environ)):
        pytest.skip("the demo's model is not there yet")
    decoder = decode.Decoder(32)
    fed = []
    decoder._model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(args[0].shape[1]), with_kwargs=True
    )
    assert len(decoder.steps_ms(3)) == 3
    assert fed[1:] == [1, 1, 1]
    assert fed[0] > 32


def test_parts_run_as_programs_and_one_after_the_other(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody who runs them as they are documented would get no figures, or not be told of a part that failed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    movement = importlib.import_module("movement")
    assert {f"movement_{name}" for name in movement.PARTS} <= {file.stem for file in BENCHMARKS.iterdir()}
    small = ["--readers", "2", "--blocks", "2", "--rounds", "1", "--path", str(tmp_path), "--json"]
    assert part("program").program(part("readers"), small) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["settings"] == {"readers": 2, "blocks": 2, "rounds": 1}
    assert record["machine"]["cores"] > 0
    assert not list(tmp_path.iterdir())
    assert movement.main(["--only", "costs", "--path", str(tmp_path / "absent")]) == 1
    assert "no such folder" in capfd.readouterr().err
