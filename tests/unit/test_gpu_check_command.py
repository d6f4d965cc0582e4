"""The check for cards as a command: its report, its targets, its exit codes."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvtier.kernels.launch_device import Images
from kvtier.testing.gpu_check import command, part_decode
from kvtier.testing.gpu_check.parts import PARTS, run_here
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.targets import TARGETS, verdicts
from tests.fakecuda.fake import FakeCuda, fake_cuda
from tests.gpu_check_bugs import kernels_do_nothing
from tests.gpu_check_card import ELSEWHERE, TINY, card, device, emulator, images, plain

__all__ = ["card", "device", "emulator", "fake_cuda", "images", "plain"]
pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def run(plain: FakeCuda, images: Images, tmp_path: pathlib.Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The command with its parts in this process; its exit code and its JSON."""

    def run_part(part: str, device: int, scale: str, patience_s: float) -> Record:
        return run_here(part, device, TINY, images)

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out.json"
        code = command.main(["--json", str(out), *options], run_part)
        return code, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_the_report_is_complete(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure reaches nobody, or nobody knows which card, driver or version it belongs to."""
    code, told = run()
    assert code == 0
    assert [part["part"] for part in told["parts"]] == list(PARTS)
    assert told["ok"] is True
    assert {part["part"] for part in told["parts"] if part["skipped"]} == set(ELSEWHERE)
    assert told["card"]["name"] == "fakecuda"
    assert told["card"]["architecture"] == "sm_90"
    assert told["card"]["driver_version"] > 12000
    assert told["versions"]["numpy"] == np.__version__
    assert {"cpu", "cores", "kernel", "python"} == set(told["machine"])
    assert told["date"].endswith("+00:00")
    assert told["command"].startswith("python -m kvtier.testing.gpu_check --json")
    text = capsys.readouterr().out
    for part in told["parts"]:
        assert part["part"] in text
        for figure in part["figures"]:
            assert figure["name"].split()[0] in text
    assert "fakecuda" in text


def test_targets_are_met_missed_or_not_measured(run: Any) -> None:
    """A target that nobody measured looks like one that was met."""
    _, told = run("--only", "decode,resize")
    by_name = {target["name"]: target for target in told["targets"]}
    assert list(by_name) == [target.name for target in TARGETS]
    assert by_name["copies_large"]["met"] is None
    assert by_name["copies_large"]["reason"] == "part copies was not asked for"
    assert by_name["resize_8GiB"]["met"] is None
    assert by_name["resize_8GiB"]["reason"] == f"part resize: resized by {TINY.resize_bytes} bytes, not by 8 GiB"
    assert isinstance(by_name["decode_slower"]["met"], bool)
    assert by_name["decode_slower"]["measured"] is not None


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("copies_large", 0.95, True),
        ("copies_large", 0.9499, False),
        ("copies_64KiB", 0.8, True),
        ("submit_1024", 49.9, True),
        ("submit_1024", 50.0, False),
        ("decode_slower", 2.99, True),
        ("decode_slower", 3.0, False),
        ("decode_slower", -1.0, True),
        ("resize_8GiB", 0.99, True),
        ("resize_8GiB", 1.0, False),
    ],
)
def test_a_target_is_what_it_says(name: str, value: float, met: bool) -> None:
    """A missed target is called met."""
    (target,) = [target for target in TARGETS if target.name == name]
    record = Record(target.part, aims={name: value})
    (verdict,) = [verdict for verdict in verdicts({target.part: record}) if verdict["name"] == name]
    assert (verdict["met"], verdict["measured"], verdict["reason"]) == (met, value, None)


def test_a_finding_is_exit_code_1_and_the_others_go_on(run: Any, capsys: Any, monkeypatch: Any) -> None:
    """A broken card passes in CI, or one broken part hides all the others."""
    kernels_do_nothing(monkeypatch)
    code, told = run("--only", "aliases,copies,roundtrip")
    assert code == 1
    assert [(part["part"], part["ok"]) for part in told["parts"]] == [
        ("copies", False),
        ("roundtrip", True),
        ("aliases", False),
    ]
    assert told["ok"] is False
    assert "FINDING  copies: kernel, blocks of 4096 bytes" in capsys.readouterr().out


def test_a_missed_target_is_no_finding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow hardware is called broken."""
    slow = lambda card, record: record.aims.update(decode_slower=99.0)  # noqa: E731
    monkeypatch.setattr(part_decode, "measure", slow)
    code, told = run("--only", "decode")
    assert code == 0
    assert [target["met"] for target in told["targets"] if target["name"] == "decode_slower"] == [False]


def test_what_is_not_begun_in_time_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs past its four minutes, or ends early and calls what it left out good."""
    monkeypatch.setattr(command, "BUDGET_S", 0.0)
    code, told = run("--only", "vmm,copies")
    assert code == 0
    assert [part["skipped"] for part in told["parts"]] == ["no time was left of 0 s"] * 2
    assert {target["met"] for target in told["targets"]} == {None}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--only", "vnm"], "no part 'vnm'. Did you mean 'vmm'?"),
        (["--only", ","], "no part is named"),
        (["--device", "x"], "invalid int value"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_options_are_exit_code_2(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error runs something else for minutes."""
    with pytest.raises(SystemExit) as ended:
        command.main(options)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--device", "-1"], "--device -1: use 0 or more"),
        (["--device", "7"], "there is no device to check: device 7: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json: name a file in a folder that exists"),
    ],
)
def test_what_cannot_work_is_told_at_once(
    options: list[str], told: str, plain: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes pass before the report cannot be written, or a missing device ends in a traceback."""
    assert command.main(options, partial(pytest.fail, "a part was run")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gpu_check: {told}")
    assert captured.err.count("\n") == 1


def test_without_a_driver_it_says_so_in_one_sentence() -> None:
    """On a machine without a GPU the check ends in a traceback, or passes."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    call = [sys.executable, "-m", "kvtier.testing.gpu_check", "--quick"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, env=clean)
    if done.returncode == 0 and "GPU" in done.stdout:
        pytest.skip("there is a device here")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: there is no device to check: ")
    assert done.stderr.count("\n") == 1
