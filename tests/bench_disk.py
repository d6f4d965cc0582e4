"""Folders on a disk, for tests of what measures one. Import the fixture that is needed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.bench import folder
from kvtier.errors import UsageError


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Skips where the folder for temporary files lies in memory, or refuses O_DIRECT."""
    try:
        with folder.scratch(tmp_path, 0):
            pass
    except UsageError as error:
        pytest.skip(str(error))
    return tmp_path


@pytest.fixture
def clean_disk(disk: Path) -> Iterator[Path]:
    """The same, which must be as empty afterwards as before."""
    yield disk
    assert not list(disk.iterdir())
