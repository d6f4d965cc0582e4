"""A simulation that is ended from outside: nothing of it goes on computing, and nothing is left behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from kvtier.cli import stopping
from tests.busy import stopped

CHILD = """
import sys
from kvtier.cli.main import main
from kvtier.cli.simulate import one_tier
from kvtier.sim import jobs
from tests.busy import Busy

jobs.os.sched_getaffinity = lambda pid: {0, 1}
trace, pipe = sys.argv[1:]
one_tier.FlatJob = lambda *arguments: Busy(pipe)
sys.argv[1:] = ["simulate", trace, "--policy", "lru", "--capacity", "1,2"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_computing(tmp_path: Path, number: signal.Signals) -> None:
    """Whoever stops a simulation has a machine that computes on for an hour, for nobody."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"t": 0, "in": 1024, "ids": [1, 2]}))
    code, told = stopped(tmp_path / "pipe", number, CHILD, str(trace))
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == stopping.BY_SIGNAL + number
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
        with pytest.raises(SystemExit) as ended:
            simulating()
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
