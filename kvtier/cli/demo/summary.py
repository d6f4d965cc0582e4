"""What the two processes found, put together: the demo's result, its verdict and its JSON.

Owns no state. Always: every figure is the median over the prompts it is measured on, and ratios are of medians.
Tokens are compared with stock `generate()`, those of both processes. Units: seconds, tokens.
"""

from dataclasses import dataclass
from typing import Any

from kvtier.cli import machine as facts
from kvtier.cli.demo.job import Answer, Filled, Restored, Seconds
from kvtier.cli.demo.restart import STEPS_FLUSHED, STEPS_UNFLUSHED, Resent, Restart
from kvtier.cli.demo.sweep import Point, figures, medians, points_of
from kvtier.cli.demo.text import Asks, Book
from kvtier.cli.demo.weights import NAME


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
        """The JSON of a question; the keys are described in docs/demo.md."""
        return {
            "question": self.question,
            "answer": self.said,
            "prompt_tokens": self.prompt_tokens,
            "tokens_restored": self.answer.tokens_restored,
            "hit_tokens_by_tier": self.answer.tokens_by_tier,
            **figures(medians([self.cold], [self.answer])),
            "tokens_identical": self.tokens_identical,
            "problem": self.answer.problem,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything the demo found.

    store_tier: the tier that outlived the first process. written_blocks: given to each tier while that answered.
    """

    rows: tuple[Row, ...]
    points: tuple[Point, ...]
    restart: Restart
    threads: int
    store_tier: str
    written_blocks: dict[str, int]

    @property
    def prefix_tokens(self) -> int:
        return self.points[-1].prefix_tokens

    @property
    def tokens_identical(self) -> bool:
        parts: list[Row | Point | Resent] = [*self.rows, *self.points, self.restart.flushed, self.restart.unflushed]
        return all(part.tokens_identical for part in parts)

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
        if differing := sum(not row.tokens_identical for row in self.rows):
            return f"{differing} of {len(self.rows)} answers differ from stock generate()"
        if lengths := [str(point.prefix_tokens) for point in self.points if not point.tokens_identical]:
            return f"first tokens differ from stock generate() after a prefix of {', '.join(lengths)} tokens"
        if not self.tokens_identical:
            return "the answer after kill -9 differs from stock generate()"
        if not self.restart.flushed.tokens_from_store:
            problems = {row.answer.problem for row in self.rows} - {None}
            why = f": {'; '.join(sorted(map(str, problems)))}" if problems else ""
            return f"the second process restored nothing from the tier {self.store_tier}{why}"
        return None

    def medians(self) -> dict[str, Seconds]:
        """Over the questions."""
        return medians([row.cold for row in self.rows], [row.answer for row in self.rows])

    def record(self) -> dict[str, Any]:
        """The JSON; the keys are described in docs/demo.md."""
        return {
            "tokens_identical": self.tokens_identical,
            "requests": [row.record() for row in self.rows],
            "lengths": [point.record() for point in self.points],
            "restart": self.restart.record(),
            "hit_tokens_by_tier": self.hit_tokens_by_tier,
            "written_blocks_by_tier": self.written_blocks,
            "device_bytes_read": sum(row.answer.device_bytes for row in self.rows),
            "prefix_tokens": self.prefix_tokens,
            **figures(self.medians()),
            "speedup_from_store": self.rows[0].speedup,  # the first question: all from the persistent tier
            "threads": self.threads,
            "model": NAME,
            "machine": machine(),
        }


def summary_of(
    asks: Asks, book: Book, filled: Filled, restored: Restored, killed_after_s: float, threads: int, store_tier: str
) -> Summary:
    """Put together what the processes found."""
    rows = rows_of(asks, [book.said(answer.tokens) for answer in restored.prompts], filled, restored)
    first, late = filled.prompts[0], asks.late
    restart = Restart(
        Resent(STEPS_FLUSHED, rows[0].prompt_tokens, first.tokens, filled.kept[0], restored.prompts[0], store_tier),
        Resent(STEPS_UNFLUSHED, len(late.tokens), filled.late.tokens, filled.late_kept, restored.late, store_tier),
        killed_after_s,
    )
    return Summary(
        rows=rows,
        points=points_of(asks, filled, restored),
        restart=restart,
        threads=threads,
        store_tier=store_tier,
        written_blocks=filled.written_blocks,
    )


def rows_of(asks: Asks, said: list[str], filled: Filled, restored: Restored) -> tuple[Row, ...]:
    """One row per question. The first process answered all but the newcomers' through kvtier."""
    rows = []
    for index, (prompt, answer) in enumerate(zip(asks.prompts, restored.prompts, strict=True)):
        stock = filled.prompts[index]
        given = [answer.tokens, *filled.kept[index : index + 1]]
        identical = all(tokens == stock.tokens for tokens in given)
        rows.append(Row(prompt.question, said[index], len(prompt.tokens), stock.first, answer, identical))
    return tuple(rows)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return facts.machine() | {"transformers": facts.package_version("transformers")}
