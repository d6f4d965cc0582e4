"""`python -m kvtier.testing.explore`: run many seeds of the explorer and say which one fails, and how to see it.

Exit codes: 0 all passed, 1 a seed failed or a row of the coverage was never reached, 2 usage. The outcome depends on
the seeds alone, not on the number of processes. Units: seeds, operations.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.run import STEPS, Result, explore

SEEDS_DEFAULT = "0:200"
COVERING_SEEDS = 200  # fewer need not reach everything
STEPS_MIN = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser("python -m kvtier.testing.explore", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=_seeds, default=_seeds(SEEDS_DEFAULT), metavar="FIRST:STOP")
    which.add_argument("--seed", type=_number, help="one seed")
    parser.add_argument("--steps", type=_number, default=STEPS, help=f"operations per seed (default: {STEPS})")
    parser.add_argument("--trace", action="store_true", help="print every operation")
    parser.add_argument("--jobs", type=_number, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    tell = _print if options.trace else None
    results = _results(seeds, partial(explore, steps=options.steps, tell=tell), options.jobs)
    return _report(results, len(seeds))


def _results(seeds: range, run: "partial[Result]", jobs: int) -> Iterable[Result]:
    """In the order of the seeds."""
    if jobs <= 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(run, seeds, chunksize=4)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _report(results: Iterable[Result], count: int) -> int:
    coverage = Coverage()
    for done, result in enumerate(results, start=1):
        coverage.add(result.coverage)
        if result.failure:
            _print_failure(result)
            return 1
        if done % 100 == 0 and done < count:
            _print(f"{done} of {count} seeds passed")
    _print(f"{count} seeds passed. What they reached:")
    for name, times in coverage.rows():
        _print(f"{times:9} {name}")
    missed = coverage.missed()
    if missed and count >= COVERING_SEEDS:
        _print(f"never reached: {', '.join(missed)}")
        return 1
    return 0


def _print_failure(result: Result) -> None:
    at = "at the end" if result.failed_at is None else f"after operation {result.failed_at}"
    steps = "" if result.failed_at is None else f" --steps {result.failed_at}"
    _print(f"seed {result.seed} failed {at}:\n{result.failure}")
    _print(f"to see it: python -m kvtier.testing.explore --seed {result.seed}{steps} --trace")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return number


def _seeds(text: str) -> range:
    first, colon, stop = text.partition(":")
    try:
        seeds = range(int(first), int(stop)) if colon else range(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds; write 0:2000") from None
    if not seeds or seeds.start < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has no seeds")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
