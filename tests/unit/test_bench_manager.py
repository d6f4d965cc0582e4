"""`benchmarks/manager.py` at tiny sizes: it measures all that it lists, on equal work, and shows what was kept."""

import importlib
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import InvariantError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIDES = ["kvtier"] if find_spec("vllm") is None else ["kvtier", "vLLM"]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """A run in a process of its own, as people start it."""
    sizes = ["--blocks", "12", "--repeats", "1", "--pools", "500", "600", "--memory-pools", "3000"]
    command = [sys.executable, str(BENCHMARKS / "manager.py"), *sizes, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def part(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_every_operation_is_measured(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table would be missing, or have no figure."""
    names = [row["name"] for row in record["operations"]]
    assert [name for name in names if not name.startswith("hash, ")] == [
        *part("manager_rounds", monkeypatch).STEPS_MEASURED
    ]
    assert sum(name.startswith("hash, ") for name in names) == 6
    assert record["sides"] == SIDES
    for row in record["operations"]:
        assert (row["ratio"] is None) == (len(SIDES) == 1)
        for side in SIDES:
            assert 0 < row[side]["q1_us"] <= row[side]["median_us"] <= row[side]["q3_us"]


def test_pools_and_memory_are_measured(record: dict[str, Any]) -> None:
    """The plot would have no points, or a block's record would seem to weigh nothing."""
    for row in record["pools"]:
        assert list(row["us"]) == ["500", "600"]
        assert all(us > 0 for us in row["us"].values())
    assert len(record["pools"]) == 4 * len(SIDES)
    for row in record["memory"]:
        assert row["blocks"] == 3000
        assert 32 + 33 < row["bytes_traced"] < 2000  # a hash object alone takes that


def main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["manager.py", *map(str, arguments)])
    code: int = part("manager", monkeypatch).main()
    return code


def test_a_kept_run_is_shown_and_drawn(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of two sides, measured where there is no matplotlib, could not be drawn anywhere."""
    both = two_sided(record)
    kept, picture = tmp_path / "run.json", tmp_path / "picture.png"
    kept.write_text(json.dumps(both))
    monkeypatch.setattr(part("manager_plot", monkeypatch), "DOTS_PER_INCH", 20)  # nobody looks at it
    assert main(monkeypatch, "--from", kept, "--plot", picture) == 0
    said = capsys.readouterr().out
    for wanted in ("vLLM", "0.25", "<= 0.6", "<= 220", "Python", both["command"]):
        assert wanted in said
    if find_spec("matplotlib") is not None:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert list(tmp_path.glob(".*")) == []


def two_sided(record: dict[str, Any]) -> dict[str, Any]:
    """The same run, had vLLM taken four times as long."""
    both = json.loads(json.dumps(record)) | {"sides": ["kvtier", "vLLM"], "vllm": "0.0"}
    for row in both["operations"]:
        row |= {"vLLM": {name: 4 * us for name, us in row["kvtier"].items()}, "ratio": 0.25}
    for rows in (both["pools"], both["memory"]):
        rows += [row | {"side": "vLLM"} for row in rows if row["side"] == "kvtier"]
    return both


def test_sides_that_come_apart_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio would be printed of two managers that did different work."""
    turns = part("manager_turns", monkeypatch)

    def scenario(*proofs: object) -> Any:
        return (turns.Step("step", 1.0, proof) for proof in proofs)

    same = turns.take_turns({"a": scenario([1], [2]), "b": scenario([1], [2])}, random.Random(0))
    assert sorted(same) == [("a", "step", 1.0)] * 2 + [("b", "step", 1.0)] * 2
    for other in (scenario([1], [3]), scenario([1])):
        with pytest.raises(InvariantError, match="different states"):
            list(turns.take_turns({"a": scenario([1], [2]), "b": other}, random.Random(0)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pools", "10"), "a number from 500"),
        (("--blocks", "many"), "a number from 10"),
        (("--from", "no-such-file.json"), "no-such-file.json"),
    ],
)
def test_bad_options_end_in_one_sentence(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the pen would end in a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
