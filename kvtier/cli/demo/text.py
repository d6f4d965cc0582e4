"""What the demo's users ask, and about what: prompts as token ids.

Owns no state. Always: all prompts begin with the same `prefix_tokens` tokens, the manual of an invented
observatory cut at that length, and go on with one question each. Units: tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtier.cli.demo.weights import CONTEXT_TOKENS
from kvtier.errors import UsageError

TASK = "You work at an observatory. Answer questions about its manual in one short sentence.\n\n"
QUESTIONS = (
    "Who is the director of the observatory?",
    "When must the dome be closed because of wind?",
    "How much does the primary mirror weigh?",
    "How long does it take to open the dome?",  # the newcomer: only the second process is asked this
)
NEWCOMERS = 1
NEW_TOKENS = 24
QUESTION_TOKENS_MAX = 40  # the longest question above with its frame, rounded up


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user's question and the tokens that the model is given."""

    question: str
    tokens: tuple[int, ...]


class Book:
    """The manual, in the tokens of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        manual = files("kvtier.cli.demo").joinpath("manual.txt").read_text()
        self._tokens = self._encode(f"<|im_start|>system\n{TASK}{manual}")

    @property
    def prefix_tokens_max(self) -> int:
        """The longest prefix that the text gives and that leaves the model room for question and answer."""
        return min(len(self._tokens), CONTEXT_TOKENS - QUESTION_TOKENS_MAX - NEW_TOKENS)

    def prompts(self, prefix_tokens: int) -> list[Prompt]:
        """One prompt per question. Raises UsageError if the text is shorter than the prefix."""
        if prefix_tokens > self.prefix_tokens_max:
            raise UsageError(
                f"--prefix-tokens {prefix_tokens}: use at most {self.prefix_tokens_max}, the text's length"
            )
        prefix = self._tokens[:prefix_tokens]
        return [Prompt(question, (*prefix, *self._asked(question))) for question in QUESTIONS]

    def said(self, tokens: Sequence[int]) -> str:
        """An answer as text on one line."""
        return " ".join(self._tokenizer.decode(list(tokens), skip_special_tokens=True).split())

    def _asked(self, question: str) -> tuple[int, ...]:
        return self._encode(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
