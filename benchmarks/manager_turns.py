"""Two sides do the same steps in turns; what each took, and that both came to the same.

A scenario is a generator that drives one side and yields a `Step` after each operation that is measured. `take_turns`
runs one per side, step by step, the sides in an order that changes each time. Always: a step counts only if all sides
ended it in the same state.
Units: seconds of CPU time of the process.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.cli.bench.timing import quartiles
from kvtier.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Step:
    """What was done, the CPU seconds it took per unit of work, and what must be the same on all sides."""

    name: str
    took_s: float
    proof: Any


@dataclass(slots=True)
class Figure:
    """One operation: what it took on each side, round by round. `target`: our time by vLLM's, not above it."""

    name: str
    unit: str
    target: float | None
    took_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, took_s: float) -> None:
        self.took_s.setdefault(side, []).append(took_s)

    def record(self) -> dict[str, Any]:
        """Microseconds: median and quartiles by side, and the ratio of the medians if there are two sides."""
        found: dict[str, Any] = {"name": self.name, "unit": self.unit, "target": self.target, "ratio": None}
        medians = []
        for side, values in self.took_s.items():
            first, third = quartiles(values)
            medians.append(statistics.median(values))
            found[side] = {"median_us": medians[-1] * 1e6, "q1_us": first * 1e6, "q3_us": third * 1e6}
        if len(medians) == 2:
            found["ratio"] = medians[0] / medians[1]
        return found


def timed(move: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """CPU seconds, and what it returned."""
    begin = time.process_time_ns()
    found = move(*arguments)
    return (time.process_time_ns() - begin) / 1e9, found


def take_turns(scenarios: Mapping[str, Iterator[Step]], shuffle: random.Random) -> Iterator[tuple[str, str, float]]:
    """Yields (side, step, seconds). Raises InvariantError if the sides came to different states."""
    order = list(scenarios)
    while True:
        shuffle.shuffle(order)
        steps = {side: next(scenarios[side], None) for side in order}
        first = steps[order[0]]
        if first is None:
            assert not any(steps.values())
            return
        for side in scenarios:
            step = steps[side]
            if step is None or (step.name, step.proof) != (first.name, first.proof):
                raise InvariantError(f"{first.name}: {side} and {order[0]} came to different states")
            yield side, step.name, step.took_s
