"""What the demo's users ask, and about what: prompts as token ids.

Owns no state. Always: prompts of one length begin with the same `prefix_tokens` tokens, the manual of an invented
observatory cut at that length, and go on with one question each; the late prompt shares no token with them where it
counts, at the beginning. Units: tokens.
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

LATE_TASK = "Say in one sentence what this is about.\n\n"
LATE_TEXT_TOKENS_MAX = 224
LATE_NEW_TOKENS = 8

SWEEP_TOKENS_MIN = 256  # a prefix below that is cold in less than a second


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user's question and the tokens that the model is given, of which `prefix_tokens` are shared."""

    question: str
    tokens: tuple[int, ...]
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class Asks:
    """All prompts of a demo.

    prompts: one per question, after the whole prefix. sweep: the kept questions after each length of prefix, the
    whole one included, round by round. late: about something else, and shorter.
    """

    prompts: tuple[Prompt, ...]
    sweep: tuple[Prompt, ...]
    late: Prompt

    @property
    def sweep_shorter(self) -> tuple[Prompt, ...]:
        """The sweep without what is among `prompts` anyway."""
        return tuple(prompt for prompt in self.sweep if prompt not in self.prompts)


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

    def asks(self, prefix_tokens: int, block_tokens: int) -> Asks:
        """Everything to be asked. Raises UsageError if the text is shorter than the prefix."""
        if prefix_tokens > self.prefix_tokens_max:
            raise UsageError(
                f"--prefix-tokens {prefix_tokens}: use at most {self.prefix_tokens_max}, the text's length"
            )
        lengths = sweep_lengths(prefix_tokens, block_tokens)
        return Asks(
            prompts=tuple(self._prompt(question, prefix_tokens) for question in QUESTIONS),
            sweep=tuple(self._prompt(question, length) for question in QUESTIONS[:-NEWCOMERS] for length in lengths),
            late=self._late(min(prefix_tokens, LATE_TEXT_TOKENS_MAX)),
        )

    def said(self, tokens: Sequence[int]) -> str:
        """An answer as text on one line."""
        return " ".join(self._tokenizer.decode(list(tokens), skip_special_tokens=True).split())

    def _prompt(self, question: str, prefix_tokens: int) -> Prompt:
        asked = self._encode(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        return Prompt(question, (*self._tokens[:prefix_tokens], *asked), prefix_tokens)

    def _late(self, text_tokens: int) -> Prompt:
        task, end = self._encode(f"<|im_start|>user\n{LATE_TASK}"), self._encode("<|im_end|>\n<|im_start|>assistant\n")
        return Prompt(LATE_TASK.strip(), (*task, *self._tokens[-text_tokens:], *end), 0)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def sweep_lengths(prefix_tokens: int, block_tokens: int) -> list[int]:
    """Ascending prefix lengths: the whole one, and its halves in full blocks, down to what is worth a point."""
    lengths = [prefix_tokens]
    least = min(SWEEP_TOKENS_MIN, prefix_tokens // 4)
    while (half := lengths[0] // 2 // block_tokens * block_tokens) >= max(least, block_tokens):
        lengths.insert(0, half)
    return lengths
