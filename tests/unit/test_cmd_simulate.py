"""`kvtier simulate`: what it prints, what it draws, and how it refuses what cannot be simulated."""

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.cli.simulate import asked, plot, plot_flat, progress
from kvtier.errors import UsageError
from kvtier.sim import jobs
from kvtier.sim.flat import BELADY, FlatJob, simulate
from kvtier.sim.hints import Hints
from kvtier.sim.reading import read_trace
from kvtier.sim.report import ReplayReport, TierReport

KEYS = ["trace", "policy", "capacity_blocks", "accesses", "hits", "prefix_tokens", "input_tokens", "prefix_hit_rate"]
YAML = """
model: {name: m, weights: /nowhere, layers: 2, kv_heads: 2, head_dim: 16, dtype: float32, block_tokens: 16}
tiers:
  - {type: gpu, capacity: 24MiB}
  - {type: host, capacity: 32MiB, policy: arc}
  - {type: lmdb, path: /nowhere/store, capacity: 32MiB}
"""
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own are tested with `run_all`; here they would only take time."""
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: {0})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of 20 turns, in turn, each turn three blocks longer: 600 blocks."""
    lines = []
    for turn in range(20):
        for talk in range(10):
            ids = [1000 * talk + block for block in range(3 * turn + 3)]
            lines.append(json.dumps({"t": 10.0 * turn + talk, "in": 512 * len(ids) + 5, "out": 9, "ids": ids}))
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(YAML, encoding="utf-8")
    return path


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


def lines_of(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(*arguments: object) -> str:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    text: str = result.stderr
    return text


# ---------------------------------------------------------------- one tier


def test_json_of_one_tier(trace: Path) -> None:
    """A program that reads our lines misses a key, or the figures are another run's."""
    rows = lines_of(run(trace, "--policy", "lru,belady", "--capacity", "5%,100", "--json"))
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, blocks) for policy in ("lru", "belady") for blocks in (30, 100)
    ]
    read = read_trace(trace)
    for row in rows:
        assert list(row) == [*KEYS, "seconds"]
        found = simulate(read, row["policy"], row["capacity_blocks"], "request")
        assert (row["hits"], row["prefix_tokens"]) == (found.hits, found.prefix_tokens)
        assert (row["trace"], row["accesses"], row["input_tokens"]) == ("talks", 6300, read.input_tokens)
        assert row["prefix_hit_rate"] == found.prefix_tokens / read.input_tokens
        assert row["seconds"] >= 0
    assert rows[0]["hits"] > 0


def test_order_is_heeded(trace: Path) -> None:
    """Figures for comparison with the literature are those of the other order."""
    (row,) = lines_of(run(trace, "--policy", "lru", "--capacity", "300", "--order", "flat", "--json"))
    flat, request = (simulate(read_trace(trace), "lru", 300, order).hits for order in ("flat", "request"))
    assert row["hits"] == flat != request


def test_hints_are_heeded(trace: Path) -> None:
    """Options about hints change nothing."""

    def hits_of(*options: str) -> int:
        (row,) = lines_of(run(trace, "--policy", "lru", "--capacity", "300", "--json", *options))
        hits: int = row["hits"]
        return hits

    read = read_trace(trace)
    assert hits_of("--hints", "ends", "--hint-coverage", "0") == hits_of()
    wrong = hits_of("--hints", "ends", "--hint-wrong", "0.1")
    assert wrong == simulate(read, "lru", 300, "request", Hints("ends", wrong=0.1)).hits != hits_of()


NOISY = ["--hints", "returns", "--hint-noise", "2", "--hint-coverage", "0.5", "--hint-wrong", "0.125"]


def test_runs_with_hints_can_be_told_apart(trace: Path, tiers: Path) -> None:
    """Two results lie on a desk, and nobody knows any more which of them is the one with hints, or with which."""
    options = ["--policy", "lru", "--capacity", "300"]
    (row,) = lines_of(run(trace, *options, "--json", *NOISY))
    assert row["hinted"] == "returns, noise 2, coverage 50 %, wrong 12.5 %"
    rows = lines_of(run(trace, "--policy", "sieve,arc,belady", "--capacity", "300", "--json", *NOISY))
    assert [row["policy"] for row in rows if "hinted" in row] == ["arc"]  # the others had no use for them
    (row,) = lines_of(run(trace, *options, "--json", "--order", "flat", "--hints", "ends"))
    assert (row["hinted"], row["order"]) == ("ends", "flat")
    told = "with hints: returns, noise 2, coverage 50 %, wrong 12.5 %"
    assert f"\n{told}\n" in run(trace, *options, *NOISY).stdout
    assert f"\nin flat order, {told}\n" in run(trace, *options, "--order", "flat", *NOISY).stdout
    assert "hints" not in run(trace, *options).stdout
    assert f"\n{told}; said: " in run(trace, "--tiers", tiers, "--no-growth", *NOISY).stdout


def test_chains_that_contradict_each_other_are_told(tmp_path: Path, trace: Path) -> None:
    """Hashes of the blocks alone are taken for hashes of prefixes, and what is found could never be used."""
    lines = [{"t": n, "in": 1024, "ids": ids} for n, ids in enumerate([[1, 2], [1, 3], [2, 1], [1, 2], [3]])]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    result = run(path, "--policy", "lru", "--capacity", "2", "--json")
    assert "2 of 5 requests (the first is number 3)" in result.stderr
    assert [row["accesses"] for row in lines_of(result)] == [9]
    assert run(trace, "--policy", "lru", "--capacity", "2", "--json").stderr == ""


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        ("5%", 30),
        ("0.5 %", 3),
        ("100%", 600),
        ("7", 7),
        ("64GiB", 1024),
        ("1 GB", 14),
        ("128MiB", 2),
        ("1EiB", 1 << 34),
    ],
)
def test_sizes(trace: Path, size: str, blocks: int) -> None:
    """A capacity is taken for another: bytes for blocks, or a share for a number."""
    (row,) = lines_of(run(trace, "--policy", "lru", "--capacity", size, "--json"))
    assert row["capacity_blocks"] == blocks


def test_bytes_of_a_block(trace: Path, tmp_path: Path) -> None:
    """Sizes in bytes are reckoned with blocks of a model that nobody has."""
    (row,) = lines_of(run(trace, "--policy", "lru", "--capacity", "1MiB", "--block-bytes", "64KiB", "--json"))
    assert row["capacity_blocks"] == 16
    header = json.dumps({"kvtier_trace": 1, "block_tokens": 512, "block_bytes": 1 << 19})
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text(header + "\n" + trace.read_text(encoding="utf-8"), encoding="utf-8")
    (row,) = lines_of(run(recorded, "--policy", "lru", "--capacity", "1MiB", "--json"))
    assert row["capacity_blocks"] == 2


def test_a_table_for_people(trace: Path) -> None:
    """What is printed cannot be read: policies, sizes or the trace's own figures are not there."""
    text = run(trace).stdout
    for word in ("talks: 200 requests in 0:03:19", "600 of them different", "lru", "arc", "hit_density", "belady"):
        assert word in text
    for blocks in (6, 12, 30, 60, 120):
        assert str(blocks) in text


# ---------------------------------------------------------------- several tiers


def fields_of(record: type) -> set[str]:
    names: dict[str, Any] = record.__dict__["__dataclass_fields__"]
    return {*names}


def test_json_of_several_tiers(trace: Path, tiers: Path) -> None:
    """A program that reads our lines misses a key; or weights that nobody has are needed."""
    rows = lines_of(run(trace, "--tiers", tiers, "--policy", "lru,belady", "--json"))
    (row,) = rows
    assert row.keys() == fields_of(ReplayReport) | {"growth"}
    assert [tier["name"] for tier in row["tiers"]] == ["gpu", "host", "lmdb"]
    assert all(tier.keys() == fields_of(TierReport) for tier in row["tiers"])
    assert [growth["tier"] for growth in row["growth"]] == ["gpu", "host", "lmdb"]
    assert row["policy"] == "lru"
    assert 0 < row["prefix_hit_rate"] <= row["optimum_hit_rate"]
    assert row["growth"][0]["prefix_hit_rate"] > row["prefix_hit_rate"]


def test_the_files_own_policies(trace: Path, tiers: Path) -> None:
    """Without --policy something else is simulated than the file says, or with it the same."""
    (row,) = lines_of(run(trace, "--tiers", tiers, "--no-growth", "--json"))
    assert (row["policy"], row["growth"], row["optimum_hit_rate"]) == ("lru,arc", [], None)
    rows = lines_of(run(trace, "--tiers", tiers, "--no-growth", "--json", "--policy", "arc,hit_density"))
    assert [row["policy"] for row in rows] == ["arc", "hit_density"]


@pytest.fixture
def short(trace: Path) -> Path:
    """The first four turns of each."""
    lines = trace.read_text(encoding="utf-8").splitlines()[:40]
    trace.write_text("\n".join(lines), encoding="utf-8")
    return trace


def test_growth_is_what_a_larger_file_finds(short: Path, tiers: Path) -> None:
    """What one more GB brings is told of another tier, of less than was added, or per byte."""
    text = YAML.replace("24MiB", "20MiB").replace("32MiB", "24MiB", 1)
    early = "low_watermark: 0.005, high_watermark: 0.01}"  # else more room above needs more below
    tiers.write_text(text.replace("20MiB}", f"20MiB, {early}").replace("arc}", f"arc, {early}"), encoding="utf-8")
    (row,) = lines_of(run(short, "--tiers", tiers, "--policy", "lru", "--json"))
    for tier, growth, small in zip(("gpu", "host", "lmdb"), row["growth"], ("20MiB", "24MiB", "32MiB"), strict=True):
        assert (growth["tier"], growth["more_bytes"]) == (tier, 10**9)
        bytes_ = (int(small.removesuffix("MiB")) << 20) + 10**9
        larger = [
            line.replace(small, f"{bytes_}B") if f"type: {tier}" in line else line
            for line in tiers.read_text().splitlines()
        ]
        file = tiers.with_name(f"{tier}.yaml")
        file.write_text("\n".join(larger), encoding="utf-8")
        (after,) = lines_of(run(short, "--tiers", file, "--policy", "lru", "--json", "--no-growth"))
        assert growth["prefix_hit_rate"] == after["prefix_hit_rate"]
        assert growth["ttft_p50_s"] == after["ttft_p50_s"]
        assert growth["gain_per_gb"] == pytest.approx(after["prefix_hit_rate"] - row["prefix_hit_rate"])
    assert row["growth"][0]["gain_per_gb"] > 0


def test_hints_with_tiers_are_heeded(short: Path, tiers: Path) -> None:
    """Options about hints change nothing with several tiers, or some of them do not, or more room has no hints."""

    def row_of(*options: str) -> dict[str, Any]:
        (row,) = lines_of(run(short, "--tiers", tiers, "--no-growth", "--json", "--policy", "lru", *options))
        return row

    plain, ends = row_of(), row_of("--hints", "ends")
    assert (plain["hints"], ends["hints"], ends["ends_wrong"]) == (0, 10, 0)
    assert 0 < row_of("--hints", "returns", "--hint-coverage", "0.5", "--hint-noise", "2")["hints"] < 35
    wrong = row_of("--hints", "ends", "--hint-wrong", "0.2")
    assert wrong["ends_wrong"] > 0
    text = run(short, "--tiers", tiers, "--no-growth", "--hints", "ends", "--hint-wrong", "0.2").stdout
    assert (
        f"with hints: ends, wrong 20 %; said: {wrong['hints']}; ends of sessions that came back: {wrong['ends_wrong']}"
        in text
    )


def test_recorded_hints_are_heeded(short: Path, tiers: Path) -> None:
    """What a recording tells of hints is left out, or cannot be."""
    header = json.dumps({"kvtier_trace": 1, "block_tokens": 512})
    lines = [json.loads(line) | {"session": "s"} for line in short.read_text(encoding="utf-8").splitlines()]
    lines.insert(3, {"t": 2.5, "session": "s", "hint": {"ends": True}})
    short.write_text("\n".join([header, *map(json.dumps, lines)]) + "\n", encoding="utf-8")
    for options, hints, name in (
        ((), 1, "recorded"),
        (("--hints", "none"), 0, None),
        (("--hints", "returns"), 40, "returns"),
    ):
        (row,) = lines_of(run(short, "--tiers", tiers, "--no-growth", "--json", *options))
        assert (row["hints"], row["hinted"]) == (hints, name), options
    (row,) = lines_of(run(short, "--policy", "lru", "--capacity", "300", "--json"))
    assert row["accesses"] == 300


def test_speeds_are_heeded(trace: Path, tiers: Path) -> None:
    """What was said of the machine changes nothing."""

    def ttft_of(*options: str) -> float:
        (row,) = lines_of(run(trace, "--tiers", tiers, "--no-growth", "--json", *options))
        seconds: float = row["ttft_p50_s"]
        return seconds

    assert ttft_of("--prefill", "1e6") < ttft_of() < ttft_of("--prefill", "1e4")
    assert ttft_of("--speed", "gpu=1MB", "--speed", "lmdb=1MB") > ttft_of()


def test_a_report_for_people(trace: Path, tiers: Path) -> None:
    """The figures that decide what to buy are not printed."""
    text = run(trace, "--tiers", tiers, "--policy", "lru,belady").stdout
    for word in ("gpu", "host", "lmdb", "wear/day", "+1 GB", "time to first token", "possible"):
        assert word in text


# ---------------------------------------------------------------- plots


@pytest.mark.parametrize("kind", ["one tier", "tiers"])
def test_plots(trace: Path, tiers: Path, tmp_path: Path, kind: str) -> None:
    """No picture appears, or half of one, or something is left beside it."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "plot.png"
    file.parent.mkdir()
    options = ["--tiers", tiers, "--no-growth", "--hints", "ends"] if kind == "tiers" else ["--capacity", "1%,10%"]
    run(trace, *options, "--policy", "lru,arc,belady", "--plot", file)
    assert file.read_bytes().startswith(PNG)
    assert list(file.parent.iterdir()) == [file]


def test_what_is_drawn(trace: Path) -> None:
    """A panel shows other figures than the table."""
    pytest.importorskip("matplotlib")
    read = read_trace(trace)
    figure = plot.figure_of(read, lambda axes: axes.plot([1], [2]), [30])
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[1, 2]]
    assert sum(bar.get_height() for bar in right.patches) == read.accesses - read.unique_blocks
    assert right.lines[0].get_xdata() == [30, 30]


def test_a_plot_says_which_hints(trace: Path) -> None:
    """Two pictures lie on a desk, and one of them is with hints."""
    pytest.importorskip("matplotlib")
    read = read_trace(trace)
    for hints, order, title in (
        (None, "request", "One tier"),
        (Hints("ends", wrong=0.1), "flat", "One tier\nin flat order, with hints: ends, wrong 10 %"),
    ):
        runs = [FlatJob("lru", 300, order, hints).run(read)]
        figure = plot.figure_of(read, lambda axes, runs=runs: plot_flat.draw(axes, read, runs), [300])
        assert figure.axes[0].get_title(loc="left") == title


def test_many_policies_are_drawn_within_the_picture(trace: Path) -> None:
    """A legend that is wider than its panel pushes the other one, and the title of that, out of the picture."""
    pytest.importorskip("matplotlib")
    read = read_trace(trace)
    policies = ("lru", "arc", "s3_fifo", "sieve", "hit_density", BELADY)
    runs = [FlatJob(policy, blocks, "request", None).run(read) for policy in policies for blocks in (100, 300)]
    figure = plot.figure_of(read, lambda axes: plot_flat.draw(axes, read, runs), [100, 300])
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_tightbbox().x0 >= 0
        assert axes.get_tightbbox().x1 <= figure.bbox.width


def test_no_plot_without_matplotlib(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour is computed before somebody hears what to install."""
    monkeypatch.setattr(asked, "find_spec", lambda name: None)
    assert "needs matplotlib" in refusal(trace, "--plot", tmp_path / "a.png")


# ---------------------------------------------------------------- what is refused

REFUSED: list[tuple[list[str], str]] = [
    (["--policy", "hit_densty"], "Did you mean 'hit_density'?"),
    (["--policy", "beladi"], "Did you mean 'belady'?"),
    (["--policy", "nothing.here:Policy"], "cannot be imported"),
    (["--policy", ","], "names no policy"),
    (["--capacity", "0"], "Give room for one block"),
    (["--capacity", "0%"], "Give room for one block"),
    (["--capacity", "0.01%"], "of 600 blocks are none"),
    (["--capacity", "1MiB"], "holds no block of 67108864 bytes"),
    (["--capacity", ""], "names no size"),
    (["--capacity", "101%"], "0% to 100%"),
    (["--capacity", "nan%"], "0% to 100%"),
    (["--capacity", "x%"], "0% to 100%"),
    (["--capacity", "5furlongs"], "furlongs"),
    (["--capacity", "5EiB"], "more than any device holds"),
    (["--capacity", "-5"], "negative"),
    (["--capacity", "0.5"], "written 5%"),
    (["--capacity", "²"], "is not a size"),
    (["--capacity", ",".join(map(str, range(1, 4000)))], "too many"),
    (["--order", "deep"], "request, flat"),
    (["--block-tokens", "0"], "--block-tokens 0"),
    (["--block-bytes", "0"], "--block-bytes 0"),
    (["--block-bytes", "many"], "--block-bytes many"),
    (["--speed", "gpu=1GB"], "--tiers"),
    (["--prefill", "100"], "--tiers"),
    (["--plot", "a.jpg"], ".png"),
    (["--plot", "/nowhere/a.png"], "may write to"),
    (["--plot", "/proc/a.png"], "may write to"),
    (["--tiers", "none.yaml"], "none.yaml"),
    (["--hints", "maybe"], "ends, returns"),
    (["--hint-noise", "1"], "--hints ends or returns"),
    (["--hints", "none", "--hint-coverage", "1"], "--hints ends or returns"),
    (["--hints", "ends", "--hint-noise", "-1"], "--hint-noise"),
    (["--hints", "ends", "--hint-coverage", "1.5"], "--hint-coverage"),
    (["--hints", "ends", "--hint-wrong", "nan"], "--hint-wrong"),
]
OF_TIERS: list[tuple[list[str], str]] = [
    (["--capacity", "5%"], "one tier"),
    (["--order", "flat"], "one tier"),
    (["--hints", "sometimes"], "ends, returns, none"),
    (["--hints", "none", "--hint-wrong", "0.1"], "--hints ends or returns"),
    (["--block-bytes", "1MiB"], "one tier"),
    (["--speed", "ram=1GB"], "no tier 'ram'"),
    (["--speed", "gpu"], "--speed"),
    (["--speed", "gpu=0"], "moves nothing"),
    (["--speed", "gpu=fast"], "--speed"),
    (["--speed", "gpu=1GB,1GB,1parsec"], "parsec"),
    (["--speed", "gpu=1GB,1GB,1s,1"], "TIER=READ"),
    (["--prefill", "0"], "--prefill"),
    (["--prefill", "nan"], "--prefill"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_mistakes_are_told(trace: Path, options: list[str], said: str) -> None:
    """A slip of the pen ends in a traceback, or is simulated as something else."""
    assert said in refusal(trace, *options)


@pytest.mark.parametrize(("options", "said"), OF_TIERS, ids=lambda value: str(value)[:40])
def test_mistakes_with_tiers_are_told(trace: Path, tiers: Path, options: list[str], said: str) -> None:
    """As above; and an option that means nothing there seems to be heeded."""
    assert said in refusal(trace, "--tiers", tiers, *options)


def test_broken_files_are_told(tmp_path: Path, trace: Path) -> None:
    """A broken file ends in a traceback, or a program hears nothing of it."""
    assert "No such file" in refusal(tmp_path / "none.jsonl")
    with trace.open("a", encoding="utf-8") as file:
        file.write("\n{")
    assert f"{trace}, line 201" in refusal(trace)
    assert json.loads(run(trace, "--json", code=2).stdout)["trace"] == str(trace)


def test_a_tier_too_small_for_the_traces_blocks(trace: Path, tiers: Path) -> None:
    """A configuration that is wrong, or right for its own blocks only, fails somewhere inside."""
    tiers.write_text(YAML.replace("24MiB", "20 stones"), encoding="utf-8")
    assert "tiers[0].capacity" in refusal(trace, "--tiers", tiers)
    tiers.write_text(YAML.replace("24MiB", "300KiB"), encoding="utf-8")
    assert "gpu" in refusal(trace, "--tiers", tiers)


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_to_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run seems to hang; or a log, and what a program reads, is full of bars."""
    monkeypatch.setenv("TERM", "xterm")
    for stream, requests, shown in ((Terminal(), 5000, True), (Terminal(), 5, False), (io.StringIO(), 5000, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.shown(requests) as served:
            served(requests)
        assert ("simulating" in stream.getvalue()) is shown
        assert shown or not stream.getvalue()


def test_a_plot_that_cannot_be_written_at_the_end(trace: Path, tmp_path: Path) -> None:
    """The disk fills up while all is computed, and the end is a traceback, or half a picture."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "gone"
    with pytest.raises(UsageError, match="can be written"):
        plot.draw(folder / "a.png", read_trace(trace), lambda axes: None, ())


def test_what_false_ends_cost_can_be_measured(
    short: Path, tiers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures in docs/policies.md can be made by nobody else."""
    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "hints.py"))
    options = ["--false-ends", "--tiers", str(tiers), "--speed", "lmdb=14GB,7GB"]
    monkeypatch.setattr(sys, "argv", ["hints.py", str(short), *options])
    program["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["no hints", "ends", "false ends, too"]
    assert all("lmdb" in line and "time to first token" in line for line in lines)


def test_the_benchmark_runs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What simulating costs can be measured by nobody any more."""
    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "simulate.py"))
    assert program["main"]([str(trace), "--requests", "40", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 40
    assert {"lru", "arc", "belady", "three tiers, lru"} <= {*report["figures"]}
    assert all(figure > 0 for figure in report["figures"].values())
    assert program["main"](["--requests", "20"]) == 0
    assert "made up" in capsys.readouterr().out
