"""`python -m kvtier.testing.explore`: run many seeds of the explorer and say which one fails, and how to see it.

Exit codes: 0 all passed, 1 a seed failed or a row of the coverage was never reached, 2 usage. The outcome depends on
the seeds alone, not on the number of processes. Units: seeds, operations.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvtier.processes import pool
from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.run import STEPS, Result, explore

SEEDS_DEFAULT = "0:200"
SEEDS_TELL = "write 100:300 for the seeds from 100 to 299, or 300 for those from 0"
SEED_MAX, SEEDS_MAX = (1 << 32) - 1, 1_000_000
STEPS_MAX, JOBS_MAX = 1_000_000, 256
COVERING_SEEDS = 200  # fewer need not reach everything


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    tell = _print if options.trace else None
    results = _results(seeds, partial(explore, steps=options.steps, tell=tell), options.jobs)
    return _report(results, len(seeds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kvtier.testing.explore",
        description="Run many seeds of the explorer and say which one fails, and how to see it.",
        epilog="exit codes: 0 all passed; 1 a seed failed, or a row of the coverage was never reached; 2 usage",
        allow_abbrev=False,  # `--s 5` could mean any of three
    )
    which = parser.add_mutually_exclusive_group()
    seeds = f"which seeds, each a run of its own that it alone decides: {SEEDS_TELL} (default: {SEEDS_DEFAULT})"
    which.add_argument("--seeds", type=_seeds, default=_seeds(SEEDS_DEFAULT), metavar="FIRST:STOP", help=seeds)
    which.add_argument("--seed", type=_number(0, SEED_MAX), metavar="SEED", help="one seed")
    steps = f"operations per seed (default: {STEPS})"
    parser.add_argument("--steps", type=_number(0, STEPS_MAX), default=STEPS, metavar="COUNT", help=steps)
    parser.add_argument("--trace", action="store_true", help="print every operation")
    parser.add_argument("--jobs", type=_number(1, JOBS_MAX), default=1, metavar="COUNT", help="processes (default: 1)")
    return parser


def _results(seeds: range, run: "partial[Result]", jobs: int) -> Iterable[Result]:
    """In the order of the seeds."""
    if jobs <= 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with pool(jobs) as workers:
        yield from workers.map(run, seeds, chunksize=4)


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


def _number(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        number = _digits(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return number

    return parse


def _seeds(text: str) -> range:
    first, colon, stop = text.partition(":")
    start, end = (_digits(first), _digits(stop)) if colon else (0, _digits(first))
    if start is None or end is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no range of seeds; {SEEDS_TELL}")
    if end <= start:
        raise argparse.ArgumentTypeError(f"{text!r} has no seeds; {SEEDS_TELL}")
    if end - 1 > SEED_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} goes beyond the last seed, {SEED_MAX}")
    if end - start > SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} are {end - start} seeds; run {SEEDS_MAX} at most at a time")
    return range(start, end)


def _digits(text: str) -> int | None:
    """The number, if nothing but a few digits is written there."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


if __name__ == "__main__":
    sys.exit(main())
