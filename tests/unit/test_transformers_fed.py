"""What a session accepts: the ids it was made for, one run of the model, and that run's own output."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import PrefixSession  # noqa: E402
from tests.tiny_llama import config_of, open_cache, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[kvtier.SyncCache]:
    with open_cache(model, tmp_path) as opened:
        yield opened


def stock(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=12, do_sample=False, **options)


def test_a_second_generate_in_one_session_is_refused(cache: Any, model: Any) -> None:
    """It would say something wrong, and its KV would be kept under the keys of what it said."""
    prompt = prompt_of(21)
    with PrefixSession(cache, model, prompt) as session:
        stock(model, prompt, **session.generate_kwargs)
        with pytest.raises(UsageError, match="one generate"):
            stock(model, prompt, **session.generate_kwargs)
    with PrefixSession(cache, model, prompt) as again:
        assert torch.equal(stock(model, prompt, **again.generate_kwargs), stock(model, prompt))
    assert again.tokens_restored == 20


@pytest.mark.parametrize("tokens", [1, 2, 3, 21])
def test_only_the_output_of_the_session_is_kept(cache: Any, model: Any, tokens: int) -> None:
    """Wrong KV lies under right keys, for good, and nobody is told."""
    prompt = prompt_of(tokens)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs)
        edited = output.clone()
        edited[0, tokens + 2] += 1
        with pytest.raises(UsageError, match="not what the session's cache was fed"):
            session.commit(edited)
        assert session.commit(output) > 0


def test_other_tokens_than_the_sessions_are_refused(cache: Any, model: Any) -> None:
    """A prompt's KV is kept under the keys of another one of the same length."""
    with PrefixSession(cache, model, prompt_of(21)) as session:
        with pytest.raises(UsageError, match="other tokens"):
            stock(model, prompt_of(21, seed=5), **session.generate_kwargs)
        stock(model, prompt_of(21), **session.generate_kwargs)
    with pytest.raises(UsageError, match="embeddings"), PrefixSession(cache, model, prompt_of(21)) as session:
        model(inputs_embeds=model.get_input_embeddings()(prompt_of(21)), cache=session.past, use_cache=True)


def test_a_session_looks_at_its_own_calls_only(cache: Any, model: Any) -> None:
    """Two sessions over one model, or a call without one, disturb each other; or hooks pile up on the model."""
    first, second = prompt_of(21), prompt_of(17, seed=3)
    with PrefixSession(cache, model, first) as outer, PrefixSession(cache, model, second) as inner:
        stock(model, second, **inner.generate_kwargs)
        stock(model, first)
        outer.commit(stock(model, first, **outer.generate_kwargs))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([[5, 6]], {}),
        (None, {}),
        (torch.ones(1, 4), {}),
        (torch.tensor([[1, -1]]), {}),
        (torch.ones(1, 4, dtype=torch.long), {"attention_mask": [1]}),
    ],
)
def test_mistakes_are_told_as_such(cache: Any, model: Any, ids: Any, options: dict[str, Any]) -> None:
    """A plain mistake ends in an AttributeError."""
    with pytest.raises(UsageError):
        PrefixSession(cache, model, ids, **options)


def test_an_asyncio_cache_is_refused(model: Any, tmp_path: Path) -> None:
    """Nothing is ever kept, and a coroutine is never awaited."""
    with pytest.raises(UsageError, match="open_sync"):
        PrefixSession(kvtier.open(config_of(model, tmp_path)), model, prompt_of(8))


def test_the_cache_hears_how_long_a_prompt_took(tmp_path: Path) -> None:
    """Nobody knows what computing costs, and a slow disk is waited for (sglang#26305)."""
    model = tiny_llama()
    with open_cache(model, tmp_path) as cache:
        reports: list[tuple[int, int, float]] = []
        cache.prefilled = lambda tokens, seconds, *, start: reports.append((start, tokens, seconds))  # type: ignore[method-assign]
        for prompt, expected in ((prompt_of(200), [(0, 200)]), (prompt_of(230), [])):
            reports.clear()
            with PrefixSession(cache, model, prompt) as session:
                model.generate(prompt, max_new_tokens=4, do_sample=False, **session.generate_kwargs)
            assert [report[:2] for report in reports] == expected, "short calls tell nothing of a token's cost"
            assert all(0 < seconds < 60 for _, _, seconds in reports)
