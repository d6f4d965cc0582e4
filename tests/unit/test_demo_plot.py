"""The demo's plot: a whole picture or a sentence, never a failed demo."""

import importlib.metadata
from pathlib import Path

import pytest

from kvtier.cli.demo import plot
from tests.demo_findings import summary_of

matplotlib = pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_picture_is_drawn_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo would fail on every server, or leave a file that no viewer opens."""
    monkeypatch.delenv("DISPLAY", raising=False)
    (tmp_path / "demo.png").write_bytes(b"an older one")
    assert plot.draw(summary_of(), tmp_path / "demo.png") == f"plot: {tmp_path / 'demo.png'}"
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


def test_the_picture_has_the_measured_figures() -> None:
    """A reader would see lines and bars of something else than the table."""
    left, right = plot.figure_of(summary_of()).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in left.get_lines()}
    assert lines["cold: everything computed"] == [6.0, 20.0]
    assert lines["restored from lmdb, new process"] == [1.0, 3.0]
    assert lines["floor: KV never left RAM"] == [0.5, 1.5]
    said = [text.get_text() for text in left.texts]
    assert {"6x faster", "7x faster"} <= set(said)
    assert said[-1] == "send, flush, kill -9, start again, send again:\n3 of 4 tokens from lmdb, the same answer"
    bars = {bar.get_label(): [patch.get_width() for patch in bar] for bar in right.containers}
    assert bars == {"gpu": [0, 0, 0], "lmdb": [3, 3, 3], "computed": [1, 1, 1]}


def test_without_matplotlib_the_demo_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra would cost a measured demo its result."""
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    said = plot.draw(summary_of(), tmp_path / "demo.png")
    assert said == "no plot: matplotlib is not installed. " + plot.INSTALL_EXTRA
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    """A full disk or a lost folder would end the demo with a traceback after all its work."""
    said = plot.draw(summary_of(), tmp_path / "absent" / "demo.png")
    assert said == f"no plot: {tmp_path / 'absent' / 'demo.png'}: No such file or directory"


def test_the_extra_brings_matplotlib() -> None:
    """The command that the demo names would not help."""
    requirements = importlib.metadata.requires("kvtier") or []
    assert any(line.startswith("matplotlib") and "demo" in line for line in requirements)
