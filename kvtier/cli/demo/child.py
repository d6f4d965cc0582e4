"""A child process that tells how far it is: one JSON object a line on its standard output.

Always: the child ends before `run` returns, interrupted or not; what it writes to standard error goes to a log. A child
that asks for it is killed with SIGKILL, which it cannot notice: nothing of it is closed, written or flushed any more.
Units: seconds of the system's monotonic clock, which parent and child share.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that wait must sleep: spinning would count as CPU seconds, and where another process has a core, each
    # of a forward's hundreds of barriers would spin away a time slice.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def emit(event: Event) -> None:
    """In the child: tell the parent."""
    print(json.dumps(event), flush=True)


def await_kill(since: float) -> None:
    """In the child: have the parent kill this process; `since` is when what must survive was done.

    Returns only if the parent itself has gone.
    """
    emit({"kill": since})
    sys.stdin.read()


def run(module: str, arguments: Sequence[str], log: Path, told: Callable[[Event], None]) -> int:
    """Run `python -m module` to its end and pass on its events; returns its exit status, -9 if it was killed.

    The event `killed_after_s` tells that the child asked to be killed, was, and how long after its `since`.
    """
    command = [sys.executable, "-m", module, *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(  # noqa: S603 -- our own module, no shell
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ENVIRONMENT,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):  # libraries may print a line of their own
                    event = json.loads(line)
                    if "kill" in event:
                        child.kill()
                        event = {"killed_after_s": time.monotonic() - event["kill"]}
                    told(event)
            return child.wait()
        except BaseException:
            child.kill()
            raise


def last_words(log: Path) -> str:
    """The last line that a child wrote to its log: of a traceback, the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
