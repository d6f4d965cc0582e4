"""The command line: what it prints, where, and how it ends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier import __version__
from kvtier.cli import cmd_config
from kvtier.cli.main import app
from kvtier.config import load_config
from kvtier.errors import ConfigError, StoreError
from kvtier.tiers.lmdb.budget import split

TEXT = """\
model:
  name: tiny
  weights_epoch: v1
  dtype: float32
  groups:
    - {kind: full, layers: [0, 2], kv_heads: 2, head_dim: 64}
    - {kind: mla, layers: [1], head_dim: 128, block_tokens: 32}
tiers:
  - {type: gpu, capacity: 1MiB}
  - {type: host, capacity: 1.5GB, pin: off}
  - {type: lmdb, path: ./data, capacity: 4GiB, verify: false}
limits: {load_deadline: 250ms}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(TEXT)
    return path


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def test_what_is_shown_loads_to_the_same(file: Path, tmp_path: Path) -> None:
    """`config show` would print a file that means something else."""
    shown = run("config", "show", file)
    assert shown.exit_code == 0
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    assert load_config(again, environ={}) == load_config(file, environ={})


def test_origins_are_shown(file: Path) -> None:
    """Nobody could find out which of four places a value came from."""
    environ = {"KVTIER_LIMITS__QUEUE": "1GiB"}
    shown = run("config", "show", file, "--origin", "--set", "tiers[1].capacity=2GiB", env=environ)
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.stdout.splitlines()}
    assert told["tiers[1].capacity"].split(maxsplit=1) == ["2GiB", "command line tiers[1].capacity"]
    assert told["limits.queue"].split(maxsplit=1) == ["1GiB", "environment KVTIER_LIMITS__QUEUE"]
    assert told["limits.load_deadline"].split(maxsplit=1) == ["250ms", f"{file}:12"]
    assert told["prefetch.budget"].split(maxsplit=1) == ["0.25", "default"]
    assert told["model.groups[0].layers"].endswith(f"{file}:6")


def test_json_is_in_plain_units(file: Path) -> None:
    """A program would have to parse sizes."""
    shown = json.loads(run("config", "show", file, "--json", "--origin").stdout)
    assert shown["tiers"][1]["capacity_bytes"] == 1_500_000_000
    assert shown["limits"]["load_deadline_s"] == 0.25
    assert shown["model"]["groups"][1]["layers"] == [1]
    assert shown["origins"]["tiers[0].policy"] == "default"


def test_check_says_what_tiers_hold(file: Path) -> None:
    """Nobody would see before the start that a tier holds a tenth of a prompt."""
    token_bytes = 2 * 2 * 2 * 64 * 4 + 128 * 4
    checked = json.loads(run("config", "check", file, "--json").stdout)
    assert checked["ok"] is True
    assert checked["token_bytes"] == token_bytes
    # 32 tokens: two blocks of 32 KiB and one of 16 KiB; host and gpu have slots of 32 KiB, one of them the null block.
    assert checked["tiers"][0]["tokens"] == (32 - 1) // 3 * 32
    assert checked["tiers"][1]["tokens"] == 1_500_000_000 // 32_768 // 3 * 32
    budget = split(4 << 30, 32_768, "tiers[2]")
    assert checked["tiers"][2]["tokens"] == budget.extents_max * budget.extent_bytes // (5 << 14) * 32
    assert budget.extents_max * budget.extent_bytes < 4 << 30
    text = run("config", "check", file)
    assert text.exit_code == 0
    assert f"{file}: ok" in text.stdout
    assert checked["notes"] == []


def test_check_refuses_a_store_that_could_not_open(file: Path) -> None:
    """A configuration would be called fine, and the server not start with it."""
    refused = run("config", "check", file, "--set", "tiers[1].capacity=1MiB", "--set", "tiers[2].capacity=900KiB")
    assert refused.exit_code == 2
    assert "tiers[2].capacity: 900KiB, less 512KiB of index" in refused.stderr


def test_check_tells_what_works_less_well(file: Path) -> None:
    """`config check` would call a tier fine that holds less than the one above it."""
    text = run("config", "check", file, "--set", "tiers[1].capacity=512KiB")
    assert text.exit_code == 0
    assert "note: tiers[1].capacity: host holds 512KiB, less than the 1MiB of gpu above it" in text.stdout


def test_every_problem_is_one_line(file: Path) -> None:
    """A user's mistake would show a traceback, or end with success."""
    file.write_text(TEXT.replace("4GiB", "4G").replace("250ms", "250"))
    wrong = run("config", "check", file)
    assert wrong.exit_code == 2
    assert wrong.stdout == ""
    lines = wrong.stderr.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["error", " tiers[2].capacity"],
        ["error", " limits.load_deadline"],
    ]


@pytest.mark.parametrize("text", ["tiers[1].capacity", "=8GiB", ""])
def test_assignments_are_checked(file: Path, text: str) -> None:
    """A mistyped --set would silently do nothing."""
    assert run("config", "show", file, "--set", text).exit_code == 2
    with pytest.raises(ConfigError, match="PATH=VALUE"):
        cmd_config.parse_assignments([text])


def test_wrong_use_and_version() -> None:
    """Scripts could not tell wrong use from findings, nor versions apart."""
    assert run("config", "show").exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("--version").stdout == f"kvtier {__version__}\n"
    assert {"config", "demo", "inspect"} <= set(run("--help").stdout.split())


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (StoreError("/data", "is locked", "Stop the other process."), 2, "error: /data: is locked. Stop the"),
        (KeyboardInterrupt(), 130, ""),
        (1, 1, ""),
        (0, 0, ""),
    ],
)
def test_how_verbs_end(
    file: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException | int, code: int, says: str
) -> None:
    """Ctrl-C or a locked store would show a traceback; findings would pass for success."""

    def verb(*_: object) -> int:
        if isinstance(raised, BaseException):
            raise raised
        return raised

    monkeypatch.setattr(cmd_config, "check", verb)
    ended = run("config", "check", file)
    assert ended.exit_code == code
    assert says in ended.stderr
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "check", "absent.yaml"),
        ("config", "show", "absent.yaml"),
        ("demo", "--prefix-tokens", 10**9),
        ("inspect", "absent"),
    ],
)
def test_programs_are_told_of_errors_as_json(arguments: tuple[object, ...]) -> None:
    """A script that reads JSON gets nothing at all when something is wrong."""
    result = run(*arguments, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_an_error_of_the_system_is_one_line(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A full or vanished disk would show a traceback."""

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device", "results.json")

    monkeypatch.setattr(cmd_config, "check", full)
    result = run("config", "check", file)
    assert (result.exit_code, result.stderr) == (2, "error: [Errno 28] No space left on device: 'results.json'\n")


@pytest.mark.parametrize("verb", ["check", "show"])
def test_a_file_that_may_not_be_read_is_one_line(verb: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of options would refuse it with four lines of usage, and without JSON."""
    monkeypatch.setattr(os, "access", lambda *args, **options: False)

    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    result = run("config", verb, file, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["file"]) == (2, str(file))
    assert "cannot be read: Permission denied" in told["error"]
    assert result.stderr == f"error: {told['error']}\n"


def test_bytes_that_are_no_text_are_refused(file: Path) -> None:
    """An argument in another encoding would end in a traceback of the encoder."""
    result = run("config", "check", file, "--set", "model.name=\udcff")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr
