"""What the two processes found, put together: the demo's result, its verdict and its JSON.

Owns no state. Always: every figure is the median over the prompts it is measured on, and ratios are of medians.
Tokens are compared with stock `generate()`, those of both processes. Units: seconds, tokens.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.cli.demo.job import Answer, Filled, Restored, Seconds
from kvtier.cli.demo.text import Prompt


@dataclass(frozen=True, slots=True)
class Row:
    """One question in the second process. `tokens_identical`: both processes gave stock generate()'s tokens."""

    question: str
    said: str
    prompt_tokens: int
    cold: Seconds
    answer: Answer
    tokens_identical: bool

    @property
    def speedup(self) -> float:
        return self.cold.cpu_s / self.answer.restored.cpu_s

    def record(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answer": self.said,
            "prompt_tokens": self.prompt_tokens,
            "tokens_restored": self.answer.tokens_restored,
            "hit_tokens_by_tier": self.answer.tokens_by_tier,
            "ttft_cold_s": self.cold.cpu_s,
            "ttft_restored_s": self.answer.restored.cpu_s,
            "ttft_floor_s": self.answer.floor.cpu_s,
            "ttft_cold_wall_s": self.cold.wall_s,
            "ttft_restored_wall_s": self.answer.restored.wall_s,
            "ttft_floor_wall_s": self.answer.floor.wall_s,
            "speedup": self.speedup,
            "tokens_identical": self.tokens_identical,
            "problem": self.answer.problem,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows, what was asked for, and what the first process moved.

    store_tier: the tier that outlived the first process. written_blocks: given to each tier
    while it answered.
    """

    rows: tuple[Row, ...]
    prefix_tokens: int
    threads: int
    store_tier: str
    written_blocks: dict[str, int]

    @property
    def tokens_identical(self) -> bool:
        return all(row.tokens_identical for row in self.rows)

    @property
    def hit_tokens_by_tier(self) -> dict[str, int]:
        hits: dict[str, int] = {}
        for row in self.rows:
            for tier, tokens in row.answer.tokens_by_tier.items():
                hits[tier] = hits.get(tier, 0) + tokens
        return hits

    @property
    def verdict(self) -> str | None:
        """None if the demo shows what it should, else the sentence that says what it does not."""
        if not self.tokens_identical:
            differing = sum(not row.tokens_identical for row in self.rows)
            return f"{differing} of {len(self.rows)} answers differ from stock generate()"
        if not self.hit_tokens_by_tier.get(self.store_tier):
            problems = {row.answer.problem for row in self.rows} - {None}
            why = f": {'; '.join(sorted(map(str, problems)))}" if problems else ""
            return f"the second process restored nothing from the tier {self.store_tier}{why}"
        return None

    def record(self) -> dict[str, Any]:
        """The JSON. Seconds are CPU seconds of all threads, unless the name says wall."""
        cold, restored, floor = self.medians()
        return {
            "tokens_identical": self.tokens_identical,
            "requests": [row.record() for row in self.rows],
            "hit_tokens_by_tier": self.hit_tokens_by_tier,
            "written_blocks_by_tier": self.written_blocks,
            "device_bytes_read": sum(row.answer.device_bytes for row in self.rows),
            "prefix_tokens": self.prefix_tokens,
            "ttft_cold_s": cold.cpu_s,
            "ttft_restored_s": restored.cpu_s,
            "ttft_floor_s": floor.cpu_s,
            "ttft_cold_wall_s": cold.wall_s,
            "ttft_restored_wall_s": restored.wall_s,
            "ttft_floor_wall_s": floor.wall_s,
            "speedup": cold.cpu_s / restored.cpu_s,
            "speedup_from_store": self.rows[0].speedup,  # the first question: all from the persistent tier
            "speedup_wall": cold.wall_s / restored.wall_s,
            "restored_over_floor": restored.cpu_s / floor.cpu_s,
            "threads": self.threads,
            "machine": machine(),
        }

    def medians(self) -> tuple[Seconds, Seconds, Seconds]:
        """Cold, restored, floor."""
        return (
            _median([row.cold for row in self.rows]),
            _median([row.answer.restored for row in self.rows]),
            _median([row.answer.floor for row in self.rows]),
        )


def rows_of(prompts: Sequence[Prompt], said: Sequence[str], filled: Filled, restored: Restored) -> tuple[Row, ...]:
    """One row per prompt. The first process answered all but the newcomers' through kvtier."""
    rows = []
    for index, (prompt, answer) in enumerate(zip(prompts, restored.answers, strict=True)):
        given = [answer.tokens, *filled.tokens[index : index + 1]]
        identical = all(tokens == filled.references[index] for tokens in given)
        rows.append(Row(prompt.question, said[index], len(prompt.tokens), filled.cold[index], answer, identical))
    return tuple(rows)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _median(values: Sequence[Seconds]) -> Seconds:
    return Seconds(median(value.cpu_s for value in values), median(value.wall_s for value in values))
