"""Processes of a pool end with whoever began them, and no later than they are wanted."""

import os
import signal
from pathlib import Path

import pytest

from kvtier.processes import pool
from tests.busy import Busy, stopped

EXPLORING = """
import sys
from kvtier.testing import explore
from tests.busy import Busy

explore.explore = Busy(sys.argv[1])
sys.exit(explore.main(["--seeds", "0:100", "--jobs", "2"]))
"""


def test_the_explorer_leaves_no_process(tmp_path: Path) -> None:
    """A run that is given up leaves processes that explore for an hour, for nobody."""
    code, _ = stopped(tmp_path / "pipe", signal.SIGKILL, EXPLORING)
    assert code == -signal.SIGKILL


def test_an_error_ends_what_is_under_way(tmp_path: Path) -> None:
    """The first seed that fails is told minutes later, when the other processes have finished theirs."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(listening, True)
    holding = os.open(pipe, os.O_WRONLY)

    def leaving() -> None:
        with pool(1) as workers:
            workers.submit(Busy(str(pipe)), 0)
            os.read(listening, 9)
            os.close(holding)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        leaving()
    assert os.read(listening, 1) == b""
    os.close(listening)


def test_each_process_begins_as_told() -> None:
    """A worker has no trace to work on."""
    with pool(1, _begin, "told", 3) as workers:
        assert workers.submit(_heard).result() == ["told", 3]


_begun: list[object] = []


def _begin(*told: object) -> None:
    _begun.extend(told)


def _heard() -> list[object]:
    return _begun
