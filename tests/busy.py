"""Work that never ends, for tests of what ends it: whoever does it is seen through a pipe.

Owns the pipe. Always: a process that works holds it open, and closes it by ending, whatever it dies of.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


class Busy:
    """A job that never ends. Opening the pipe tells of its process, whose end closes it."""

    def __init__(self, pipe: str) -> None:
        self.pipe = pipe

    def run(self, trace: object, progress: object = None) -> None:
        file = os.open(self.pipe, os.O_WRONLY)
        os.write(file, b"%9d" % os.getpid())
        while True:
            os.getppid()

    def __call__(self, seed: int, **options: object) -> None:
        self.run(seed)


def stopped(pipe: Path, number: signal.Signals, code: str, *arguments: str) -> tuple[int, str]:
    """Run a program that works in two processes, of which it is told by the pipe's path, its last argument.

    It is sent the signal once both work. Returns its exit code and what it said on stderr, once both have ended.
    """
    os.mkfifo(pipe)
    listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(listening, True)
    program = [sys.executable, "-c", code, *arguments, str(pipe)]
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
    return child.returncode, told
