"""The demo's steps: a process that was to be killed and one that crashed are told apart."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli.demo import child, steps, text
from kvtier.cli.demo.steps import StepFailed, Steps
from kvtier.errors import UsageError
from tests.demo_findings import ASKS, FILLED, RESTORED

KILLED = {"killed_after_s": 0.25}


@pytest.fixture(autouse=True)
def no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "as_yaml", lambda config: "")


def ends(monkeypatch: pytest.MonkeyPatch, status: int, *events: child.Event) -> None:
    """Every child process tells these events, leaves findings and ends."""

    def run(module: str, arguments: list[str], log: Path, told: Callable[[child.Event], None]) -> int:
        log.write_text("Traceback\nMemoryError: no\n")
        FILLED.write(log.with_name("fill.json"))
        RESTORED.write(log.with_name("restore.json"))
        for event in ({"step": "one"}, *events):
            told(event)
        return status

    monkeypatch.setattr(child, "run", run)


def fill(folder: Path) -> object:
    return Steps(folder, folder).fill(ASKS, None, 1)  # type: ignore[arg-type]  # the configuration is not looked at


def test_the_first_process_is_killed_and_its_findings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that went well would be reported as a crash."""
    ends(monkeypatch, -signal.SIGKILL, KILLED)
    assert fill(tmp_path) == (FILLED, 0.25)


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 1])
def test_a_crash_is_not_taken_for_the_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """The kernel kills for want of memory with the same signal: that proves nothing."""
    ends(monkeypatch, status)
    with pytest.raises(StepFailed, match=rf"first process failed \({status}\): MemoryError: no"):
        fill(tmp_path)


def test_a_crash_on_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's log is empty then, and the user would read that it said nothing."""
    ends(monkeypatch, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(UsageError, match=r"no space is left on the disk of .* --out"):
        fill(tmp_path)


def test_a_first_process_that_was_not_killed_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart proof would be of a store that was closed."""
    ends(monkeypatch, 0)
    with pytest.raises(StepFailed, match="before it could be killed"):
        fill(tmp_path)


def test_what_only_the_user_can_mend_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk would look like a bug of ours."""
    ends(monkeypatch, 2, {"error": "[Errno 28] No space left on device"})
    with pytest.raises(UsageError, match="No space left"):
        fill(tmp_path)


def test_the_second_process_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its findings would be lost, or a killed one believed."""
    ends(monkeypatch, 0)
    assert Steps(tmp_path, tmp_path).restore(ASKS, 1) == RESTORED
    ends(monkeypatch, -signal.SIGKILL)
    with pytest.raises(StepFailed, match="second process failed"):
        Steps(tmp_path, tmp_path).restore(ASKS, 1)


def test_the_first_process_is_not_asked_twice_for_the_longest_prefix() -> None:
    """The demo would take half a minute more."""
    assert [prompt.prefix_tokens for prompt in ASKS.sweep_shorter] == [2, 2]
    assert len(ASKS.sweep) == 2 * len(ASKS.sweep_shorter) == 2 * len(ASKS.prompts[: -text.NEWCOMERS])
