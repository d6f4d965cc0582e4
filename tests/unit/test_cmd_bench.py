"""`kvtier bench` at tiny sizes: it measures what it says, refuses what it cannot, and leaves nothing behind."""

import errno
import json
import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli import cmd_bench
from kvtier.cli.bench import folder
from kvtier.cli.bench import host as host_bench
from kvtier.cli.bench.nvme import puts
from kvtier.cli.main import app
from kvtier.errors import KvtierError, UsageError
from tests.bench_disk import clean_disk, disk

__all__ = ["clean_disk", "disk"]

MACHINE = {"cpu", "cores", "kernel", "python", "numpy", "lmdb", "torch"}
RACE = {"what", "blocks", "block_bytes", "gbs", "cpu_s_per_gb", "ratios", "best_rival", "ratio", "target"}
COST = {"what", "unit", "median", "q1", "q3", "target"}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def check_shape(report: dict[str, Any]) -> None:
    """The keys that the documentation promises, and figures that are some."""
    assert report.keys() == {"bench", "command", "machine", "settings", "races", "costs", "notes"}
    assert report["machine"].keys() >= MACHINE
    for race in report["races"]:
        assert race.keys() == RACE
        assert race["ratios"].keys() == race["gbs"].keys() - {"kvtier"}
        assert race["ratio"] == min(race["ratios"].values()) > 0
        for speed in race["gbs"].values():
            assert 0 < speed["q1"] <= speed["median"] <= speed["q3"]
    for cost in report["costs"]:
        assert cost.keys() == COST
        assert cost["q1"] <= cost["median"] <= cost["q3"]


def test_host_races_both_directions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, which is an extra, there would be nothing to compare with, or a false name for it."""
    monkeypatch.setattr(host_bench, "find_spec", lambda name: None)
    assert cmd_bench.host(5000, 2, 2, json_output=True) == 0
    report = printed(capsys)
    check_shape(report)
    whats = [f"{direction}, {kind}" for kind in ("scattered", "runs") for direction in ("gpu -> host", "host -> gpu")]
    assert [race["what"] for race in report["races"]] == whats
    assert {race["best_rival"] for race in report["races"]} == {"memmove"}
    assert "torch is not installed" in report["notes"][0]


@pytest.mark.torch
def test_host_compares_with_torch_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The target is about torch's copy_: memmove in its place would be another target."""
    pytest.importorskip("torch")
    cmd_bench.host(4096, 2, 1, json_output=True)
    report = printed(capsys)
    assert {race["best_rival"] for race in report["races"]} == {"torch copy_"}
    assert report["notes"] == []


def test_engine_measures_every_part(clean_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One part of the cache would be left out, or a cost would lose its target."""
    assert cmd_bench.engine(clean_disk, 8, 20, 10_000, 2, 1, json_output=True) == 0
    report = printed(capsys)
    check_shape(report)
    assert [race["what"] for race in report["races"]] == ["flush", "promote"]
    targets = {cost["what"].partition(",")[0]: cost["target"] for cost in report["costs"]}
    assert targets == {
        "match": 1.0,
        "peek": None,
        "reserve + release": None,
        "commit": None,
        "hash_blocks": None,
        "core: match": 1.0,
        "open a store of 20 blocks": 200.0,
        "  of it: the tier": None,
        "  of it: the directory": None,
        "close a store of 20 blocks": None,
        "RAM per known key": 220.0,
        "RAM of an idle cache": 100.0,
    }
    keys = [cost for cost in report["costs"] if cost["what"].startswith("RAM per known key")]
    assert [cost["what"] for cost in keys] == ["RAM per known key, 10,000 keys"], (
        "the same number would be measured twice"
    )
    assert keys[0]["median"] > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, KvtierError])
def test_nothing_stays_after_an_interruption(
    clean_disk: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C would leave gigabytes behind, or a store that is still open."""

    def interrupted(contestants: object, rounds: int) -> None:
        raise error("in the middle")

    monkeypatch.setattr(puts, "interleave", interrupted)
    with pytest.raises(error):
        cmd_bench.nvme(clean_disk, 1, None, "batch", json_output=True, quick=True, in_place=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nvme", "--path", "/nowhere/at/all"], "there is no such folder"),
        (["nvme", "--dir", "/nowhere/at/all"], "there is no such folder"),
        (["nvme", "--rounds", "41"], "--rounds 41: use 1 to 40"),
        (["nvme", "--records", "100000001"], "--records 100000001: use 1 to 100000000"),
        (["nvme", "--durability", "sure"], "--durability sure: use one of none, batch, strict"),
        (["host", "--block-bytes", "9999999999"], "--block-bytes 9999999999: use 1 to"),
        (["engine", "--rounds", "99999", "--path", "."], "bytes are needed and"),
        (["host", "--blocks", "999999"], "two tiers of 12 such batches take"),
        (["engine", "--keys", "9999"], "--keys 9999: use 10000 to 100000000"),
        (["engine", "--keys", "0"], "--keys 0: use 10000 to 100000000"),
        (["engine", "--store-blocks", "1000001"], "--store-blocks 1000001: use 1 to 1000000"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], said: str) -> None:
    """A user's mistake would show a traceback, or fill the disk before it is noticed."""
    done = CliRunner().invoke(app, ["bench", *arguments, "--json"])
    assert done.exit_code == 2
    problem = json.loads(done.stdout)["error"]
    assert said in problem
    assert done.stderr == f"error: {problem}\n"


@pytest.mark.parametrize("option", ["--blocks", "--rounds", "--block-bytes"])
def test_zero_is_refused(option: str) -> None:
    """No round has no median."""
    assert CliRunner().invoke(app, ["bench", "host", option, "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "nvme", "--rounds", "0"]).exit_code == 2


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in RAM would be praised for the speed of RAM."""
    monkeypatch.setattr(folder, "filesystem_of", lambda path: "tmpfs on tmpfs")
    with pytest.raises(UsageError, match="lies in memory and has no O_DIRECT"):
        cmd_bench.nvme(tmp_path, 1, None, "batch", json_output=True)


def test_a_disk_without_direct_io_is_refused(clean_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache would be measured, on both sides."""

    def refuses(path: Path, flags: int, mode: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(folder, "os", SimpleNamespace(**vars(os) | {"open": refuses}))
    with pytest.raises(UsageError, match="refuses O_DIRECT"):
        cmd_bench.engine(clean_disk, 1, 1, 10_000, 1, 1, json_output=True)


def test_the_sweep_takes_every_length_from_as_few_runs_as_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of cold prefill would be spent twice, or a target would stand beside another length's figures."""
    runs = []

    def ran(command: list[str], **options: Any) -> SimpleNamespace:
        runs.append(length := int(command[command.index("--prefix-tokens") + 1]))
        times = {"ttft_cold_s": 3.0, "ttft_restored_s": 0.2, "ttft_floor_s": 0.1, "load_s": 0.05, "speedup": 15.0}
        point = times | {"restored_over_floor": 2.0, "count": 3, "tokens_identical": True}
        lengths = [point | {"prefix_tokens": tokens} for tokens in (length // 2, length)]
        return SimpleNamespace(stdout=json.dumps({"machine": {"cpu": "a cpu"}, "lengths": lengths}))

    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr("sys.argv", ["demo_sweep.py", "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "demo_sweep.py"), run_name="__main__")
    assert ended.value.code == 0
    assert runs == [4096, 1024]
    report = json.loads(capsys.readouterr().out)
    assert [(row["prefix_tokens"], row["speedup_target"]) for row in report["lengths"]] == [
        (1024, 12.0),
        (2048, 18.0),
        (4096, 20.0),
    ]
