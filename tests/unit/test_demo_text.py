"""The demo's prompts: one shared prefix of exactly the length asked for."""

from pathlib import Path

import pytest

from kvtier.cli.demo import text
from kvtier.errors import UsageError

tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.torch


@pytest.fixture
def book(tmp_path: Path) -> text.Book:
    """The manual in a tokenizer that knows bytes only: one token per letter."""
    vocabulary = {letter: index for index, letter in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return text.Book(tmp_path)


def test_prompts_share_the_prefix_and_nothing_more(book: text.Book) -> None:
    """The hit lengths that the demo reports would not be those that were asked for."""
    prompts = book.asks(1000, 16).prompts
    assert len(prompts) == len(text.QUESTIONS) >= 4
    assert len({prompt.tokens[:1000] for prompt in prompts}) == 1
    assert len({prompt.tokens[1000:] for prompt in prompts}) == len(prompts)
    assert book.said(prompts[0].tokens[1000:]).startswith("<|im_end|> <|im_start|>user Who is the director")


def test_the_context_bounds_the_prefix(book: text.Book) -> None:
    """The model would be asked beyond its context, where it was never trained."""
    assert book.prefix_tokens_max == 8192 - text.QUESTION_TOKENS_MAX - text.NEW_TOKENS
    assert book.asks(book.prefix_tokens_max, 16).prompts
    with pytest.raises(UsageError, match=r"--prefix-tokens 9000: use at most 8128"):
        book.asks(9000, 16)


@pytest.mark.parametrize(
    ("prefix_tokens", "block_tokens", "lengths"),
    [
        (16, 16, [16]),
        (31, 16, [31]),
        (64, 16, [16, 32, 64]),
        (300, 16, [144, 300]),
        (1000, 16, [496, 1000]),
        (1024, 16, [256, 512, 1024]),
        (4096, 16, [256, 512, 1024, 2048, 4096]),
        (1024, 512, [512, 1024]),
    ],
)
def test_the_sweep_halves_the_prefix_in_full_blocks(prefix_tokens: int, block_tokens: int, lengths: list[int]) -> None:
    """Points would be of lengths that no block ends at, or so short that they cost time and say nothing."""
    assert text.sweep_lengths(prefix_tokens, block_tokens) == lengths


def test_the_sweep_asks_for_what_is_kept(book: text.Book) -> None:
    """A point would be restored in part only, or its cold time be of another prompt."""
    asks = book.asks(64, 16)
    assert [prompt.prefix_tokens for prompt in asks.sweep] == [16, 32, 64] * 3
    assert [prompt for prompt in asks.sweep if prompt in asks.prompts] == list(asks.prompts[: -text.NEWCOMERS])
    assert {prompt.prefix_tokens for prompt in asks.sweep_shorter} == {16, 32}
    assert all(prompt.tokens[:16] == asks.prompts[0].tokens[:16] for prompt in asks.sweep)


def test_the_late_prompt_shares_no_block_and_is_no_longer(book: text.Book) -> None:
    """Flushed blocks would count as survivors of the kill, or the prompt would find no room."""
    asks = book.asks(1024, 16)
    assert asks.late.tokens[:16] != asks.prompts[0].tokens[:16]
    assert len(asks.late.tokens) < len(asks.prompts[0].tokens)
    assert (
        len(book.asks(16, 16).late.tokens) < 16 + len(book.asks(1024, 16).late.tokens) - text.LATE_TEXT_TOKENS_MAX + 1
    )


def test_the_manual_is_a_long_text_of_its_own() -> None:
    """4,096 tokens of prefix would not be there, or be the same lines again and again."""
    manual = (Path(text.__file__).parent / "manual.txt").read_text()
    paragraphs = [paragraph for paragraph in manual.split("\n\n") if paragraph.strip()]
    assert len(manual.split()) > 3400
    assert len(set(paragraphs)) == len(paragraphs) > 70
