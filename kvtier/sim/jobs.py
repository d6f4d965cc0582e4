"""Several runs at once: one process for each core, each with the trace in memory.

Owns its processes. Always: results come in the order of the jobs; one job, or one core, runs in this process; an error
of one job ends the others; a process ends with the one that began it, whatever that one dies of. Units: requests.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Protocol, TypeVar

from kvtier.errors import KvtierError
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
    context = get_context("spawn")  # a fork would copy whatever threads this process has in the middle of something
    others = {*active_children()}
    with ProcessPoolExecutor(processes, context, _begin, (trace,)) as pool:
        try:
            for result in pool.map(_run_there, jobs):
                progress(len(trace.requests))
                yield result
        except BaseException as error:
            for process in {*active_children()} - others:
                process.terminate()  # what they are at may take minutes, and nobody wants it any more
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise KvtierError("a process that simulated was killed, maybe for want of memory: run fewer") from error
            raise


_traces: list[Trace] = []  # of a worker process: the one that it was begun with


def _begin(trace: Trace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt is for the terminal's whole group: end without a word
    Thread(target=_end_with_parent, name="kvtier-parent", daemon=True).start()
    _traces[:] = [trace]


def _end_with_parent() -> None:
    """A job computes for minutes without looking whether anybody waits for it; a killed parent tells nobody."""
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _run_there(job: Job[Result]) -> Result:
    return job.run(_traces[0])
