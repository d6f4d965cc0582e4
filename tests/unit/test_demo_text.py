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
    prompts = book.prompts(1000)
    assert len(prompts) == len(text.QUESTIONS) >= 4
    assert len({prompt.tokens[:1000] for prompt in prompts}) == 1
    assert len({prompt.tokens[1000:] for prompt in prompts}) == len(prompts)
    assert book.said(prompts[0].tokens[1000:]).startswith("<|im_end|> <|im_start|>user Who is the director")


def test_the_context_bounds_the_prefix(book: text.Book) -> None:
    """The model would be asked beyond its context, where it was never trained."""
    assert book.prefix_tokens_max == 8192 - text.QUESTION_TOKENS_MAX - text.NEW_TOKENS
    assert book.prompts(book.prefix_tokens_max)
    with pytest.raises(UsageError, match=r"--prefix-tokens 9000: use at most 8128"):
        book.prompts(9000)


def test_the_manual_is_a_long_text_of_its_own() -> None:
    """4,096 tokens of prefix would not be there, or be the same lines again and again."""
    manual = (Path(text.__file__).parent / "manual.txt").read_text()
    paragraphs = [paragraph for paragraph in manual.split("\n\n") if paragraph.strip()]
    assert len(manual.split()) > 3400
    assert len(set(paragraphs)) == len(paragraphs) > 70
