"""The sweep over prefix lengths: the same questions after shorter and longer prefixes, cold and restored.

Owns no state. Always: a point's figures are medians over the same prompts, and ratios are of medians; every one of
its restored answers came out of tiers that were empty above the store. Units: tokens, seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cli.demo.job import Answer, Asked, Filled, Restored, Seconds
from kvtier.cli.demo.text import Asks


@dataclass(frozen=True, slots=True)
class Point:
    """One length. cold and answers: what stock generate() and kvtier made of the same prompts, in the same order."""

    prefix_tokens: int
    prompt_tokens: tuple[int, ...]
    cold: tuple[Asked, ...]
    answers: tuple[Answer, ...]

    def medians(self) -> dict[str, Seconds]:
        """cold, restored, floor, and the two parts of restored: load and forward."""
        return medians([asked.first for asked in self.cold], self.answers)

    @property
    def tokens_identical(self) -> bool:
        """The sweep asks for the first token only, and compares that."""
        return all(answer.tokens[:1] == asked.tokens[:1] for asked, answer in zip(self.cold, self.answers, strict=True))

    def record(self) -> dict[str, Any]:
        """The JSON of a point; the keys are described in `record`."""
        return {
            "prefix_tokens": self.prefix_tokens,
            "prompt_tokens": list(self.prompt_tokens),
            "tokens_restored": [answer.tokens_restored for answer in self.answers],
            "tokens_identical": self.tokens_identical,
            "count": len(self.answers),
            **figures(self.medians()),
            "samples_s": {
                "cold": [asked.first.cpu_s for asked in self.cold],
                "restored": [answer.restored.cpu_s for answer in self.answers],
                "load": [answer.load.cpu_s for answer in self.answers],
                "forward": [answer.forward.cpu_s for answer in self.answers],
                "floor": [answer.floor.cpu_s for answer in self.answers],
            },
        }


def points_of(asks: Asks, filled: Filled, restored: Restored) -> tuple[Point, ...]:
    """One point per length, ascending."""
    cold = dict(zip((prompt.tokens for prompt in asks.prompts), filled.prompts, strict=True))
    cold |= zip((prompt.tokens for prompt in asks.sweep_shorter), filled.sweep, strict=True)
    answers = dict(zip((prompt.tokens for prompt in asks.sweep), restored.sweep, strict=True))
    points = []
    for length in sorted({prompt.prefix_tokens for prompt in asks.sweep}):
        tokens = [prompt.tokens for prompt in asks.sweep if prompt.prefix_tokens == length]
        points.append(
            Point(
                prefix_tokens=length,
                prompt_tokens=tuple(map(len, tokens)),
                cold=tuple(cold[each] for each in tokens),
                answers=tuple(answers[each] for each in tokens),
            )
        )
    return tuple(points)


def medians(cold: Sequence[Seconds], answers: Sequence[Answer]) -> dict[str, Seconds]:
    """By name, over prompts that were answered cold and restored."""
    return {
        "cold": Seconds.median(cold),
        "restored": Seconds.median([answer.restored for answer in answers]),
        "floor": Seconds.median([answer.floor for answer in answers]),
        "load": Seconds.median([answer.load for answer in answers]),
        "forward": Seconds.median([answer.forward for answer in answers]),
    }


def figures(times: dict[str, Seconds]) -> dict[str, float]:
    """Times and their ratios as flat JSON."""
    flat: dict[str, float] = {}
    for name, seconds in times.items():
        prefix = name if name in ("load", "forward") else f"ttft_{name}"
        flat |= {f"{prefix}_s": seconds.cpu_s, f"{prefix}_wall_s": seconds.wall_s}
    cold, restored, floor = times["cold"], times["restored"], times["floor"]
    return flat | {
        "speedup": cold.cpu_s / restored.cpu_s,
        "speedup_wall": cold.wall_s / restored.wall_s,
        "restored_over_floor": restored.cpu_s / floor.cpu_s,
    }
