"""Times contestants in turns, so that the machine's moods hit all of them alike.

A contestant is a context manager: what it does before its yield and after is not measured, what it yields is called
once between two readings of the clocks. Always: every contestant runs once in every round, in an order that changes
from round to round; one round before the first is thrown away.
Units: seconds, by the wall and of all threads' CPU.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from kvtier.cli.bench.progress import Step, still

Contestant = Callable[[], AbstractContextManager[Callable[[], object]]]


@dataclass(slots=True)
class Timed:
    """One contestant's rounds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The first and the third."""
        return quartiles(self.wall_s)

    @property
    def cpu_median_s(self) -> float:
        return statistics.median(self.cpu_s)


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third, of one value or more."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def speed_ratio(ours: Timed, theirs: Timed) -> float:
    """How many times as fast ours was, round by round, so that a slow minute does not hit one side only: the median."""
    return statistics.median(slow / fast for slow, fast in zip(theirs.wall_s, ours.wall_s, strict=True))


def turns(contestants: Sized, rounds: int) -> int:
    """How many `interleave` takes."""
    return len(contestants) * (rounds + 1)


def interleave(contestants: Mapping[str, Contestant], rounds: int, step: Step = still) -> dict[str, Timed]:
    """Run each contestant `rounds` times, and once before. step: called after each turn, and not measured."""
    timed = {name: Timed() for name in contestants}
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    for round_ in range(-1, rounds):
        shuffle(order)
        for name in order:
            with contestants[name]() as move:
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                move()
                wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            if round_ >= 0:
                timed[name].wall_s.append(wall_s)
                timed[name].cpu_s.append(cpu_s)
            step()
    return timed


def plain(move: Callable[[], object]) -> Contestant:
    """A contestant that needs no preparation."""

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        yield move

    return contestant


def prepared(prepare: Callable[[], Callable[[], object]]) -> Contestant:
    """A contestant that is made ready anew, unmeasured, before each call."""

    @contextmanager
    def contestant() -> Iterator[Callable[[], object]]:
        yield prepare()

    return contestant
