"""The restart proof: what a process that was killed with SIGKILL left to the next one.

Owns no state. Always: both prompts were asked of the process that was killed and of the one after it. Units: tokens,
seconds.
"""

from dataclasses import dataclass
from typing import Any

from kvtier.cli.demo.job import Answer

STEPS_FLUSHED = "send, flush, kill -9, start again, send again"
STEPS_UNFLUSHED = "send, no flush, kill -9, start again, send again"


@dataclass(frozen=True, slots=True)
class Resent:
    """One prompt, sent again after the kill. reference: stock generate()'s answer; kept: the killed process's."""

    steps: str
    prompt_tokens: int
    reference: list[int]
    kept: list[int]
    answer: Answer
    store_tier: str

    @property
    def tokens_from_store(self) -> int:
        return self.answer.tokens_by_tier.get(self.store_tier, 0)

    @property
    def tokens_identical(self) -> bool:
        return self.kept == self.answer.tokens == self.reference

    @property
    def line(self) -> str:
        answered = "the same answer" if self.tokens_identical else "ANOTHER ANSWER"
        return (
            f"{self.steps}: {self.tokens_from_store} of {self.prompt_tokens} tokens from {self.store_tier}, {answered}"
        )

    def record(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens_from_store": self.tokens_from_store,
            "tokens_identical": self.tokens_identical,
            "problem": self.answer.problem,
        }


@dataclass(frozen=True, slots=True)
class Restart:
    """flushed: its blocks were flushed before the kill. unflushed: they were committed after that.

    killed_after_s: from the return of flush() to SIGKILL, the commit included.
    """

    flushed: Resent
    unflushed: Resent
    killed_after_s: float

    @property
    def lines(self) -> list[str]:
        soon_ms = 1000 * self.killed_after_s
        return [
            f"{self.flushed.line}. SIGKILL came {soon_ms:.0f} ms after flush() had returned.",
            f"{self.unflushed.line}. What is not on disk yet is computed again.",
        ]

    def record(self) -> dict[str, Any]:
        return {
            "signal": "SIGKILL",
            "killed_after_flush_s": self.killed_after_s,
            "flushed": self.flushed.record(),
            "unflushed": self.unflushed.record(),
        }
