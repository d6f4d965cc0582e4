"""A simulation that is ended from outside: nothing of it goes on computing, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import stopping

CHILD = """
import sys
from kvtier.cli.main import main
from kvtier.cli.simulate import one_tier
from kvtier.sim import jobs
from tests.unit.test_cli_stopping import Busy

jobs.os.sched_getaffinity = lambda pid: {0, 1}
trace, pipe = sys.argv[1:]
one_tier.FlatJob = lambda *arguments: Busy(pipe)
sys.argv[1:] = ["simulate", trace, "--policy", "lru", "--capacity", "1,2"]
main()
"""


class Busy:
    """A job that never ends. Opening the pipe tells of its process, whose end closes it."""

    def __init__(self, pipe: str) -> None:
        self.pipe = pipe

    def run(self, trace: object, progress: object = None) -> None:
        file = os.open(self.pipe, os.O_WRONLY)
        os.write(file, b"%9d" % os.getpid())
        while True:
            os.getppid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_computing(tmp_path: Path, number: signal.Signals) -> None:
    """Whoever stops a simulation has a machine that computes on for an hour, for nobody."""
    pipe, trace = tmp_path / "pipe", tmp_path / "t.jsonl"
    os.mkfifo(pipe)
    trace.write_text(json.dumps({"t": 0, "in": 1024, "ids": [1, 2]}))
    listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(listening, True)
    program = [sys.executable, "-c", CHILD, str(trace), str(pipe)]
    holding = os.open(pipe, os.O_WRONLY)  # else the first read would find nobody there
    workers: list[int] = []
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as child:
        try:
            workers += [int(os.read(listening, 9)) for _ in range(2)]
            os.close(holding)
            child.send_signal(number)
            assert os.read(listening, 1) == b"", "both have ended"
            workers.clear()
            _, told = child.communicate()
        finally:
            child.kill()
            os.close(listening)
            for process in workers:
                os.kill(process, signal.SIGKILL)
    if number == signal.SIGKILL:
        assert child.returncode == -number
    else:
        assert child.returncode == stopping.BY_SIGNAL + number
        assert told == ""


def test_who_ignores_a_signal_is_heeded() -> None:
    """A simulation under nohup ends with the terminal all the same; or a second signal is not heard."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def simulating() -> None:
        with stopping.tidily():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    try:
        with pytest.raises(SystemExit) as stopped:
            simulating()
        assert stopped.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
