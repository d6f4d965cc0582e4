"""Batches through the transformers helper: every row is a prompt of its own, and says what it says without kvtier.

A block holds 4 tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import PrefixSession  # noqa: E402
from tests.tiny_llama import config_of, open_cache, padded, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[kvtier.SyncCache]:
    with open_cache(model, tmp_path, gpu_blocks=200) as opened:
        yield opened


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    return prompt_of(tokens, seed)[0].tolist()


def stock(model: Any, rows: list[list[int]], **options: Any) -> Any:
    ids, mask = padded(rows)
    given = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, **given | options)


def through(cache: Any, model: Any, rows: list[list[int]], **options: Any) -> tuple[Any, PrefixSession]:
    ids, mask = padded(rows)
    with PrefixSession(cache, model, ids, attention_mask=mask, **options) as session:
        output = model.generate(ids, **session.generate_kwargs, max_new_tokens=NEW_TOKENS, do_sample=False)
        session.commit(output)
    return output, session


def known(cache: Any, tokens: list[int]) -> int:
    return cache.peek(kvtier.hash_blocks(tokens, cache.config.model)).tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_rows_answer_as_stock(tmp_path: Path, attention: str, dtype: str) -> None:
    """A row's KV would sit in another row's columns or at other positions."""
    model = tiny_llama(getattr(torch, dtype))
    model.set_attn_implementation(attention)
    rows = [ids_of(30), ids_of(13, seed=1), ids_of(41, seed=2)]
    reference = stock(model, rows)
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=200)) as cache:
        output, first = through(cache, model, rows)
        assert torch.equal(output, reference)
        output, second = through(cache, model, rows)
    if dtype == "float32":  # in bfloat16 the two ways to sum up may differ in a token
        assert torch.equal(output, reference)
    assert first.tokens_restored == 0
    # Columns up to min(11 + 28, 28 + 12, 0 + 40) = 39: of the rows 28, 11 and 39 tokens, in 7 + 3 + 10 blocks.
    assert second.tokens_restored == 28 + 11 + 39
    assert sum(second.tokens_by_tier.values()) == 28 + 12 + 40
    assert (first.problem, second.problem) == (None, None)


def test_restored_columns_are_the_kept_ones_and_padding_is_zero(cache: Any, model: Any) -> None:
    """Columns that the mask hides could be garbage that turns into NaN, or rows could be shifted by one."""
    long, short = ids_of(40), ids_of(20, seed=1)
    through(cache, model, [long])
    through(cache, model, [short])
    ids, mask = padded([long, short])
    with PrefixSession(cache, model, ids, attention_mask=mask) as session:
        assert session.past.get_seq_length() == 36
        for layer, (k, v, _) in enumerate(session.past):
            for row, (tokens, pad) in enumerate(((long, 0), (short, 20))):
                made = model(torch.tensor([tokens]), use_cache=True).cache.layers[layer]
                assert torch.equal(k[row, :, pad:], made.keys[0, :, : 36 - pad])
                assert torch.equal(v[row, :, pad:], made.values[0, :, : 36 - pad])
                assert not k[row, :, :pad].any()
                assert not v[row, :, :pad].any()


@pytest.mark.parametrize("gpu_blocks", [200, 24, 9])
def test_any_batch_answers_as_stock(model: Any, tmp_path: Path, gpu_blocks: int) -> None:
    """Some mix of lengths, shared prefixes, duplicates and lacking room would change an answer or lose a lease."""
    dice = random.Random(gpu_blocks)
    texts = [ids_of(60, seed=seed) for seed in range(3)]
    restored = 0
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=gpu_blocks)) as cache:
        for _ in range(12):
            rows = []
            for _ in range(dice.randint(1, 4)):
                row = dice.choice(texts)[: dice.randint(1, 45)] + ids_of(dice.randint(0, 9), seed=dice.randint(5, 9))
                rows += [row] * dice.choice([1, 1, 1, 2])
            output, session = through(cache, model, rows, share_prefix=dice.random() < 0.5)
            assert torch.equal(output, stock(model, rows))
            restored += session.tokens_restored
            assert cache.stats()["leases"] == 0
        assert cache.check() == []
    assert restored > 100


def test_a_cold_row_keeps_the_others_from_their_prefix(cache: Any, model: Any) -> None:
    """Rows of one transformers cache have one length: a row would be given columns that another has not computed."""
    rows = [ids_of(30), ids_of(30, seed=1)]
    through(cache, model, rows[:1])
    output, session = through(cache, model, rows)
    assert torch.equal(output, stock(model, rows))
    assert (session.tokens_restored, sum(session.tokens_by_tier.values())) == (0, 0)
    assert session.tokens_committed == 32  # the cold row's only


def test_only_what_a_batch_can_use_is_loaded(model: Any, tmp_path: Path) -> None:
    """Blocks would be read from disk for columns that another row does not reach."""
    long, short = ids_of(60), ids_of(12, seed=1) + ids_of(48, seed=2)
    config = config_of(model, tmp_path, gpu_blocks=200)
    with kvtier.open_sync(config) as cache:
        through(cache, model, [long])
        through(cache, model, [short[:13]])
    with kvtier.open_sync(config) as cache:
        _, session = through(cache, model, [long, short])
    assert session.tokens_restored == 24
    assert session.tokens_by_tier == {"gpu": 0, "host": 0, "lmdb": 24}


def test_all_rows_wait_for_disk_until_one_deadline(model: Any, tmp_path: Path) -> None:
    """A batch of many rows would wait for a slow disk many times over."""
    rows = [ids_of(30), ids_of(30, seed=1)]
    config = config_of(model, tmp_path, gpu_blocks=200)
    with kvtier.open_sync(config) as cache:
        through(cache, model, rows)
    with kvtier.open_sync(config) as cache:
        reserve, patience_s = cache.reserve, []

        def watched(match: Any, blocks_total: int, *, load_deadline_s: float | None) -> Any:
            patience_s.append(load_deadline_s)
            return reserve(match, blocks_total, load_deadline_s=load_deadline_s)

        cache.reserve = watched
        through(cache, model, rows)
    assert config.limits.load_deadline_s >= patience_s[0] > patience_s[1]


def test_padding_beyond_the_longest_row_is_no_prompt(cache: Any, model: Any) -> None:
    """`pad_to_multiple_of` would restore columns without a token, or count them as restored."""
    ids, mask = padded([ids_of(21), ids_of(9, seed=1)])
    ids, mask = torch.nn.functional.pad(ids, (5, 0), value=1), torch.nn.functional.pad(mask, (5, 0))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    reference = model.generate(ids, attention_mask=mask, **options)
    for restored in (0, 20 + 8):
        with PrefixSession(cache, model, ids, attention_mask=mask) as session:
            assert session.tokens_restored == restored
            assert torch.equal(model.generate(ids, **session.generate_kwargs, **options), reference)


# ---------------------------------------------------------------- shared prefixes


def test_a_shared_prefix_is_kept_once(cache: Any, model: Any) -> None:
    """Each row would take slots for the same blocks."""
    rows = [ids_of(40) + ids_of(5, seed=seed) for seed in (1, 2, 3)] * 2
    ids, mask = padded(rows)
    with PrefixSession(cache, model, ids, attention_mask=mask) as session:
        stock(model, rows, **session.generate_kwargs)
    assert session.tokens_committed == 40 + 3 * 4
    assert cache.stats()["blocks"] == 13


def test_a_shared_prefix_is_computed_once(cache: Any, model: Any) -> None:
    """`share_prefix` would not save what it is for, or compute what is known."""
    rows = [ids_of(42) + ids_of(5 + seed, seed=seed) for seed in (1, 2, 3)]
    fed: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kw: fed.append((args or (kw["input_ids"],))[0].numel()), with_kwargs=True
    )
    try:
        output, first = through(cache, model, rows, share_prefix=True)
        assert fed[:2] == [40, 3 * 10]  # the shared blocks once, then all rows from column 40 on
        fed.clear()
        _, second = through(cache, model, rows, share_prefix=True)
        assert fed[0] < 3 * 10
        fed.clear()
        through(cache, model, [ids_of(40, seed=4)] * 2, share_prefix=True)
        assert fed[:2] == [36, 2 * 4]  # not the last token of a prompt, which is never restored
    finally:
        handle.remove()
    assert torch.equal(output, stock(model, rows))
    assert first.tokens_restored == 38 + 39 + 40  # rows of 48, 49 and 50 tokens
    assert second.problem is None


def test_sharing_without_room_only_costs_time(model: Any, tmp_path: Path) -> None:
    """A batch would fail, or answer wrongly, because its prefix does not fit."""
    rows = [ids_of(60) + ids_of(5, seed=seed) for seed in (1, 2)]
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=9)) as cache:
        output, session = through(cache, model, rows, share_prefix=True)
    assert torch.equal(output, stock(model, rows))
    assert session.tokens_restored == 2 * 36
    assert session.problem is not None
    assert "in the fastest tier" in session.problem


def test_rows_with_nothing_in_common_share_nothing(cache: Any, model: Any) -> None:
    """An empty prefix would be given to the model."""
    rows = [ids_of(20), ids_of(20, seed=1), ids_of(1)]
    output, session = through(cache, model, rows, share_prefix=True)
    assert torch.equal(output, stock(model, rows))
    assert session.problem is None


# ---------------------------------------------------------------- rows that end early


@pytest.mark.parametrize("pad_is_end", [False, True])
def test_what_follows_a_rows_end_is_not_kept(cache: Any, pad_is_end: bool) -> None:
    """The filler behind an answer would be kept as if the model had said it."""
    model = tiny_llama()
    rows = [ids_of(16), ids_of(16, seed=1)]
    free = stock(model, rows, max_new_tokens=20)[:, 16:].tolist()
    said = next(n for n in range(2, 9) if free[0][n] not in free[0][:n] + free[1]) + 1
    end = free[0][said - 1]
    model.generation_config.eos_token_id = [end, 2]
    model.generation_config.pad_token_id = end if pad_is_end else 1
    ids, mask = padded(rows)
    with PrefixSession(cache, model, ids, attention_mask=mask) as session:
        output = stock(model, rows, **session.generate_kwargs, max_new_tokens=20)
        session.commit(output)
        ended, full = session.rows_of(output)
    assert output[0, 16 + said :].tolist() == [model.generation_config.pad_token_id] * (20 - said)
    assert ended == rows[0] + free[0][:said]
    assert full == output[1].tolist()
    assert known(cache, output[0].tolist()) == len(ended) // 4 * 4 < 36  # not the block that the filler completes
    assert known(cache, full) == 32


def test_an_end_token_that_did_not_end_the_row_is_kept(cache: Any, model: Any) -> None:
    """With a least number of new tokens, everything behind the first end token would be lost."""
    rows = [ids_of(16), ids_of(16, seed=1)]
    ids, mask = padded(rows)
    output = torch.cat([ids, torch.tensor([[2, 9, 2], [9, 1, 1]])], dim=1)
    with PrefixSession(cache, model, ids, attention_mask=mask) as session:
        assert session.rows_of(output) == [rows[0] + [2, 9, 2], rows[1] + [9]]


# ---------------------------------------------------------------- wrong calls


def test_only_padding_on_the_left_is_served(cache: Any, model: Any) -> None:
    """KV of other positions would be kept under the key of the tokens alone, or generate() go on behind the padding."""
    ids, mask = padded([ids_of(12), ids_of(9, seed=1)])
    with pytest.raises(UsageError, match="padding_side='left'"):
        PrefixSession(cache, model, ids.flip(1), attention_mask=mask.flip(1))
    with pytest.raises(UsageError, match="padding_side='left'"):
        PrefixSession(cache, model, ids, attention_mask=torch.zeros_like(mask))  # a row without a token
    mask[0, 5] = 0
    with pytest.raises(UsageError, match="hides tokens inside"):
        PrefixSession(cache, model, ids, attention_mask=mask)
    with pytest.raises(UsageError, match=r"shape \[2, 11\] for token ids of \[2, 12\]"):
        PrefixSession(cache, model, ids, attention_mask=mask[:, 1:])


def test_padding_is_inferred_as_generate_does(cache: Any, model: Any) -> None:
    """Without a mask, KV of padding would be kept as that of the tokens, or a padded batch refused."""
    ids, mask = padded([ids_of(12), ids_of(9, seed=1)])
    session = PrefixSession(cache, model, ids)
    assert torch.equal(session.generate_kwargs["attention_mask"], mask)
    ids[0, 5] = model.generation_config.pad_token_id
    with pytest.raises(UsageError, match="hides tokens inside"):
        PrefixSession(cache, model, ids)
    assert "attention_mask" not in PrefixSession(cache, model, ids[:1], attention_mask=mask[:1]).generate_kwargs
    model = tiny_llama(pad_token_id=2)  # also the end token: generate() infers nothing
    assert "attention_mask" not in PrefixSession(cache, model, ids).generate_kwargs


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "input_ids.repeat"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ],
)
def test_ways_to_generate_that_change_rows_are_refused(
    cache: Any, model: Any, kept: bool, options: dict[str, Any], problem: str
) -> None:
    """transformers would fail deep inside, or answer something else without an error."""
    prompt = prompt_of(30)
    if kept:
        through(cache, model, [prompt[0].tolist()])
    with PrefixSession(cache, model, prompt) as session, pytest.raises(UsageError, match=problem):
        stock(model, prompt.tolist(), **session.generate_kwargs, **options)


def test_beams_are_refused_when_the_number_of_rows_fits(cache: Any, model: Any) -> None:
    """Two beams of one prompt would pass for two prompts."""
    with PrefixSession(cache, model, prompt_of(30).repeat(2, 1)) as session, pytest.raises(UsageError, match="beam"):
        stock(model, prompt_of(30).tolist(), **session.generate_kwargs, num_beams=2)
    for method in ("batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(UsageError, match="rows"):
            getattr(session.past, method)(2)


def test_samples_of_one_prompt_are_a_batch(cache: Any, model: Any) -> None:
    """What the refusal of `num_return_sequences` recommends would not work."""
    ids = prompt_of(30).repeat(3, 1)
    torch.manual_seed(3)
    reference = stock(model, ids.tolist(), do_sample=True, temperature=2.0)
    through(cache, model, ids.tolist())
    torch.manual_seed(3)
    with PrefixSession(cache, model, ids) as session:
        assert session.tokens_restored == 3 * 28
        output = stock(model, ids.tolist(), **session.generate_kwargs, do_sample=True, temperature=2.0)
    assert torch.equal(output, reference)


def test_an_output_of_another_batch_is_refused(cache: Any, model: Any) -> None:
    """KV would be published under keys of tokens that it was not made from."""
    rows = [ids_of(30), ids_of(20, seed=1)]
    ids, mask = padded(rows)
    with PrefixSession(cache, model, ids, attention_mask=mask) as session:
        output = stock(model, rows, **session.generate_kwargs)
        for wrong in (output.flip(0), output[:1], output[:, 1:], output[0]):
            with pytest.raises(UsageError, match=r"(what|all that) generate\(\) returned"):
                session.commit(wrong)
        assert session.commit(output) > 0
