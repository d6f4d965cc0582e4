"""The demo's child processes: what they tell arrives, and none outlives the call."""

import signal
import sys
from io import StringIO
from pathlib import Path

import pytest

from kvtier.cli.demo import child

TALKS = """
from kvtier.cli.demo.child import emit
import sys
emit({"step": "one"})
print("a library prints")
emit({"step": "two"})
print("Traceback", "ValueError: no", "", sep="\\n", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAITS = """
from kvtier.cli.demo.child import emit
import os, signal
emit({"pid": os.getpid()})
signal.pause()
"""
ASKS_TO_BE_KILLED = """
from kvtier.cli.demo.child import await_kill, emit
import atexit, pathlib, sys, time
atexit.register(pathlib.Path(sys.argv[1]).touch)
try:
    await_kill(time.monotonic())
finally:
    pathlib.Path(sys.argv[1]).touch()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "scripted.py"


def test_events_arrive_in_order_and_chatter_does_not(module: Path, tmp_path: Path) -> None:
    """A line that a library prints would break the demo."""
    module.write_text(TALKS)
    told: list[child.Event] = []
    status = child.run("scripted", ["3"], tmp_path / "log", told.append)
    assert told == [{"step": "one"}, {"step": "two"}]
    assert status == 3
    assert child.last_words(tmp_path / "log") == "ValueError: no"


def test_a_silent_child_has_last_words_too(tmp_path: Path) -> None:
    """An empty log would crash the message about the crash."""
    (tmp_path / "log").write_text("\n")
    assert child.last_words(tmp_path / "log") == "it said nothing"


def test_an_interrupted_call_leaves_no_child(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C would leave a process with a model and the store's lock behind."""
    module.write_text(WAITS)
    pids: list[int] = []

    def told(event: child.Event) -> None:
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run("scripted", [], tmp_path / "log", told)
    assert not Path("/proc", str(pids[0])).exists()


def test_a_child_that_asks_for_it_is_killed_and_cannot_clean_up(module: Path, tmp_path: Path) -> None:
    """The restart proof would be of a process that closed its store."""
    module.write_text(ASKS_TO_BE_KILLED)
    told: list[child.Event] = []
    assert child.run("scripted", [str(tmp_path / "cleaned-up")], tmp_path / "log", told.append) == -signal.SIGKILL
    assert [list(event) for event in told] == [["killed_after_s"]]
    assert told[0]["killed_after_s"] > 0
    assert not (tmp_path / "cleaned-up").exists()


def test_a_child_whose_parent_has_gone_does_not_wait_to_be_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killing the demo itself would leave a process with a model and the store's lock behind."""
    monkeypatch.setattr(sys, "stdin", StringIO())
    child.await_kill(1.5)
    assert capsys.readouterr().out == '{"kill": 1.5}\n'
