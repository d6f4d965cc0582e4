"""Several runs at once: one process for each core, each with the trace in memory.

Always: results come in the order of the jobs; one job, or one core, runs in this process; an error of one job ends the
others. Units: requests.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from kvtier.errors import KvtierError
from kvtier.processes import pool
from kvtier.sim.trace import Trace

Result = TypeVar("Result", covariant=True)
Progress = Callable[[int], None]  # requests served since the last call


class Job(Protocol[Result]):
    """Something to do with a trace. It, and what comes of it, can be pickled."""

    def run(self, trace: Trace, progress: Progress | None = None) -> Result:
        """Do it, in this process."""
        ...


def run_all(
    trace: Trace, jobs: Sequence[Job[Result]], progress: Progress, processes: int | None = None
) -> Iterator[Result]:
    """Run the jobs. progress hears of the requests of all of them. processes: None: one for each core.

    Raises what a job raises, and KvtierError if a process is killed.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    if processes <= 1:
        for job in jobs:
            yield job.run(trace, progress)
        return
    try:
        with pool(processes, _begin, trace) as workers:
            for result in workers.map(_run_there, jobs):
                progress(len(trace.requests))
                yield result
    except BrokenProcessPool as error:
        raise KvtierError("a process that simulated was killed, maybe for want of memory: run fewer") from error


_traces: list[Trace] = []  # of a worker process: the one that it was begun with


def _begin(trace: Trace) -> None:
    _traces[:] = [trace]


def _run_there(job: Job[Result]) -> Result:
    return job.run(_traces[0])
