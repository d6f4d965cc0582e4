"""Conversations through the transformers helper: a turn finds what all turns before it computed.

A block holds 4 tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import Chat, PrefixSession, next_turn  # noqa: E402
from tests.tiny_llama import CHAT_TEMPLATE, open_cache, padded, prompt_of, tiny_llama, tiny_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[kvtier.SyncCache]:
    with open_cache(model, tmp_path, gpu_blocks=200) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    return prompt_of(tokens, seed)[0].tolist()


def test_every_turn_finds_all_turns_before_it(cache: Any, model: Any) -> None:
    """An answer would be computed again in each later turn, or not be the answer of stock generate()."""
    chat = Chat(cache, model)
    history: list[int] = []
    for turn, new_tokens in enumerate((7, 12, 1, 9)):
        known = max(len(history) - 1, 0)  # the last token was never fed back
        question = ids_of(10, seed=turn)
        (reply,) = chat.reply([question], max_new_tokens=new_tokens, do_sample=False)
        stock = model.generate(torch.tensor([history + question]), max_new_tokens=new_tokens, do_sample=False)
        assert chat.session.tokens_restored == known // 4 * 4
        assert chat.session.problem is None
        assert history + question + reply == stock[0].tolist()
        history += question + reply
        assert chat.histories == [history]


def test_conversations_of_a_batch_end_at_different_lengths(cache: Any, model: Any) -> None:
    """The filler behind a short answer would become part of what was said."""
    model = tiny_llama()
    first = [ids_of(16), ids_of(9, seed=1)]
    ids, mask = padded(first)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, 16:].tolist()
    said = next(n for n in range(1, 9) if free[0][n] not in free[0][:n] + free[1]) + 1
    model.generation_config.eos_token_id = free[0][said - 1]
    chat = Chat(cache, model)
    assert chat.reply(first, max_new_tokens=12, do_sample=False) == [free[0][:said], free[1]]
    second = [ids_of(5, seed=2), ids_of(8, seed=3)]
    prompts = [row + new for row, new in zip(chat.histories, second, strict=True)]
    ids, mask = padded(prompts)
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    replies = chat.reply(second, max_new_tokens=5, do_sample=False)
    assert [reply[:1] for reply in replies] == stock[:, ids.shape[1] : ids.shape[1] + 1].tolist()
    assert chat.histories == [row + reply for row, reply in zip(prompts, replies, strict=True)]
    # The ended row's last token was fed back, the other's was not; columns up to the smaller of the two.
    ready = [(16 + said) // 4 * 4, (9 + 11) // 4 * 4]
    pads = [ids.shape[1] - len(prompt) for prompt in prompts]
    columns = min(pad + tokens for pad, tokens in zip(pads, ready, strict=True))
    assert chat.session.tokens_restored == sum(columns - pad for pad in pads)


def test_a_turn_that_fails_changes_nothing(cache: Any, model: Any) -> None:
    """A conversation would go on from words that nobody has seen."""
    chat = Chat(cache, model)
    chat.reply([ids_of(10)], max_new_tokens=4)
    before = [list(row) for row in chat.histories]
    with pytest.raises(UsageError, match="num_beams"):
        chat.reply([ids_of(5)], max_new_tokens=4, num_beams=2)
    with pytest.raises(UsageError, match="2 turns for 1 conversations"):
        chat.reply([ids_of(5), ids_of(5)], max_new_tokens=4)
    assert chat.histories == before


def test_a_result_in_a_record_is_taken_too(cache: Any, model: Any) -> None:
    """`return_dict_in_generate` would end in an AttributeError after all the work."""
    (reply,) = Chat(cache, model).reply([ids_of(10)], max_new_tokens=4, return_dict_in_generate=True)
    assert len(reply) == 4


# ---------------------------------------------------------------- chat templates


def test_the_next_turn_is_what_the_template_adds(tokenizer: Any) -> None:
    """Ids would be doubled, or the end of the reply be missing, and the model see another conversation."""
    first = [{"role": "system", "content": "hi"}, {"role": "user", "content": "ab"}]
    history = next_turn(tokenizer, first)
    assert tokenizer.decode(history) == "<start>system hi<end><start>user ab<end><start>assistant "
    second = [{"role": "user", "content": "you"}]
    added = "<end><start>user you<end><start>assistant "
    said = tokenizer("hi", add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    assert tokenizer.decode(next_turn(tokenizer, second, history + said)) == added  # the reply was cut short
    assert tokenizer.decode(next_turn(tokenizer, second, history + said + end)) == added.removeprefix("<end>")


def test_a_template_that_changes_replies_is_refused() -> None:
    """The added ids would be guessed."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("m.content", "m.content | reverse")
    with pytest.raises(UsageError, match="chat template"):
        next_turn(tokenizer, [{"role": "user", "content": "a"}], history=[1, 2])


def test_encoding_a_reply_again_only_costs_time(cache: Any, model: Any, tokenizer: Any) -> None:
    """Text that comes back as other tokens would be given the KV of the first ones; appended ids would not be found."""
    a, b, ab = (tokenizer.convert_tokens_to_ids(word) for word in ("a", "b", "ab"))
    prompt = tokenizer("ab" * 6, add_special_tokens=False)["input_ids"]
    reply = [a, b] * 6  # as a model may spell it
    assert tokenizer.decode(prompt + reply) == "ab" * 12
    spoken = torch.tensor([prompt + reply])
    with PrefixSession(cache, model, spoken) as session:
        model(spoken, **session.generate_kwargs)
    encoded = tokenizer(tokenizer.decode(spoken[0]), add_special_tokens=False)["input_ids"]
    assert encoded == [ab] * 12 != spoken[0].tolist()
    for ids, restored in ((encoded, 4), (spoken[0].tolist(), 16)):
        turn = torch.tensor([ids + ids_of(5)])
        with PrefixSession(cache, model, turn) as session:
            output = model.generate(turn, **session.generate_kwargs, max_new_tokens=6, do_sample=False)
        assert session.tokens_restored == restored
        assert torch.equal(output, model.generate(turn, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("turns", [[], [[]], ["hi"], [5, 6]])
def test_turns_that_are_none_are_refused(cache: Any, model: Any, turns: Any) -> None:
    """A plain mistake ends in an error of max(), or of torch."""
    with pytest.raises(UsageError, match="one list of new token ids"):
        Chat(cache, model).reply(turns, max_new_tokens=1)


@pytest.mark.parametrize("by_option", [False, True])
def test_replies_are_what_the_model_said(cache: Any, by_option: bool) -> None:
    """A row that ended with one end token gets another one as its filler; or the options' pads stay in the history."""
    model = tiny_llama()
    turns = [ids_of(16), ids_of(16, seed=1)]
    ids, mask = padded(turns)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, 16:].tolist()
    said = next(n for n in range(2, 9) if free[0][n] not in free[0][:n] + free[1]) + 1
    unused = next(token for token in range(3, 99) if token not in free[0] + free[1])
    ends = {"eos_token_id": [unused, free[0][said - 1]]}
    options = ends | {"pad_token_id": unused + 1 if by_option else None}
    if not by_option:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends["eos_token_id"], None
    given = options if by_option else {}
    chat = Chat(cache, model)
    replies = chat.reply(turns, max_new_tokens=12, do_sample=False, **given)
    assert replies == [free[0][:said], free[1]]
    assert chat.histories == [turn + reply for turn, reply in zip(turns, replies, strict=True)]
