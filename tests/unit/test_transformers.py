"""The transformers helper: what it restores never changes what the model says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import PrefixSession  # noqa: E402
from tests.tiny_llama import BLOCK_TOKENS, config_of, open_cache, prompt_of, tiny_llama  # noqa: E402

pytestmark = pytest.mark.torch

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[kvtier.SyncCache]:
    with open_cache(model, tmp_path) as opened:
        yield opened


def stock(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, **{"do_sample": False} | options)


def through(cache: Any, model: Any, prompt: Any, **options: Any) -> tuple[Any, PrefixSession]:
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs, **options)
    return output, session


@pytest.mark.parametrize("layout", ["layer_token_major", "layer_head_major", "token_major"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_new_cache_on_the_same_store_answers_as_stock(tmp_path: Path, dtype: str, layout: str) -> None:
    """A restored prefix would make the model say something else, in some dtype or layout."""
    model = tiny_llama(getattr(torch, dtype))
    config = config_of(model, tmp_path, layout=layout)
    prompt = prompt_of(42)
    reference = stock(model, prompt)
    with kvtier.open_sync(config) as cache:
        output, first = through(cache, model, prompt)
        assert torch.equal(output, reference)
    with kvtier.open_sync(config) as cache:
        output, second = through(cache, model, prompt)
    assert torch.equal(output, reference)
    assert (first.tokens_restored, first.tokens_committed) == (0, 40)
    assert (second.tokens_restored, second.tokens_committed) == (40, 0)
    assert second.tokens_by_tier == {"gpu": 0, "host": 0, "lmdb": 40}
    assert first.problem is None
    assert second.problem is None


def test_restored_kv_is_bit_for_bit_what_the_model_made(cache: Any, model: Any) -> None:
    """KV would come back rounded, transposed or from another layer, and small models would not notice."""
    prompt = prompt_of(41)
    _, _ = through(cache, model, prompt)
    past = model(prompt, use_cache=True).cache
    with PrefixSession(cache, model, prompt) as session:
        for made, restored in zip(past, session.past, strict=True):
            assert torch.equal(made[0][:, :, :40], restored[0])
            assert torch.equal(made[1][:, :, :40], restored[1])


def test_the_last_prompt_token_is_always_computed(cache: Any, model: Any) -> None:
    """generate() would have no token to start from when the whole prompt is kept."""
    prompt = prompt_of(10 * BLOCK_TOKENS)
    reference = stock(model, prompt)
    through(cache, model, prompt)
    output, session = through(cache, model, prompt)
    assert session.tokens_restored == 9 * BLOCK_TOKENS
    assert torch.equal(output, reference)


def test_a_longer_prompt_reuses_the_shared_prefix_only(cache: Any, model: Any) -> None:
    """Blocks behind the first different token would be taken for the same."""
    first = prompt_of(40)
    second = torch.cat([first[:, :22], prompt_of(20, seed=1)], dim=1)
    reference = stock(model, second)
    through(cache, model, first)
    output, session = through(cache, model, second)
    assert session.tokens_restored == 20
    assert torch.equal(output, reference)


def test_generated_blocks_are_kept_for_the_next_turn(cache: Any, model: Any) -> None:
    """A conversation would recompute every answer that the model gave before."""
    prompt = prompt_of(30)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs, min_new_tokens=NEW_TOKENS)
        added = session.commit(output)
    assert added == session.tokens_committed == 40  # 42 tokens; the last one has no KV
    turn = torch.cat([output, prompt_of(9, seed=2)], dim=1)
    reference = stock(model, turn)
    output, session = through(cache, model, turn)
    assert session.tokens_restored == 40
    assert torch.equal(output, reference)


def test_generated_tokens_are_kept_up_to_a_limit(cache: Any, model: Any) -> None:
    """`max_new_tokens` would be ignored."""
    prompt = prompt_of(30)
    with PrefixSession(cache, model, prompt, max_new_tokens=3) as session:
        output = stock(model, prompt, **session.generate_kwargs, min_new_tokens=NEW_TOKENS)
        assert session.commit(output) == 32


def test_nothing_is_held_while_the_model_runs(cache: Any, model: Any) -> None:
    """Sessions that think for long would keep others from their slots, and could wait for each other."""
    prompt = prompt_of(42)
    through(cache, model, prompt)
    with PrefixSession(cache, model, prompt) as session:
        assert session.tokens_restored == 40
        assert cache.stats()["leases"] == 0
        room = cache.reserve(cache.match(kvtier.hash_blocks([], cache.config.model), owner="other"), blocks_total=60)
        assert isinstance(room, kvtier.Lease)  # all of it
        cache.release(room)
        output = stock(model, prompt, **session.generate_kwargs)
    assert torch.equal(output, stock(model, prompt))


def test_a_prefix_that_left_meanwhile_is_kept_again(cache: Any, model: Any) -> None:
    """The tail of a prompt would be kept without its head, where no lookup finds it."""
    prompt = torch.cat([prompt_of(20), prompt_of(20, seed=1)], dim=1)
    through(cache, model, prompt_of(20))
    with PrefixSession(cache, model, prompt) as session:
        assert session.tokens_restored == 20
        stock(model, prompt, **session.generate_kwargs)
        cache.reset()
    assert session.tokens_committed == 40
    assert cache.peek(kvtier.hash_blocks(prompt[0].tolist(), cache.config.model)).tokens == 40


def test_sampling_draws_the_same_tokens(cache: Any, model: Any) -> None:
    """Restored logits would differ in a bit, and a seeded sample with them."""
    prompt = prompt_of(40)
    through(cache, model, prompt)
    torch.manual_seed(5)
    reference = stock(model, prompt, do_sample=True, temperature=2.0)
    torch.manual_seed(5)
    output, session = through(cache, model, prompt, do_sample=True, temperature=2.0)
    assert session.tokens_restored > 0
    assert torch.equal(output, reference)


def test_wrong_kv_shows_in_the_answer(cache: Any, model: Any) -> None:
    """The comparisons of this file could not fail: the restored KV would not be used at all."""
    prompt = prompt_of(40)
    reference = stock(model, prompt)
    keys = kvtier.hash_blocks(prompt[0].tolist(), cache.config.model)
    lease = cache.reserve(cache.match(keys, owner="vandal"), blocks_total=10)
    for layer in range(3):
        for view in cache.kv(group=0, layer=layer).values():
            view[list(lease.slots(0))] = 0
    cache.commit(lease, list(zip(lease.slots(0), keys.groups[0], strict=True)))
    cache.release(lease)
    output, session = through(cache, model, prompt)
    assert session.tokens_restored == 36
    assert not torch.equal(output, reference)


def test_slots_are_copied_not_aliased(cache: Any, model: Any) -> None:
    """Whoever fills a released slot would change KV that the model still reads."""
    prompt = prompt_of(40)
    through(cache, model, prompt)
    with PrefixSession(cache, model, prompt) as session:
        before = [k.clone() for k, _, _ in session.past]
        for layer in range(3):
            for view in cache.kv(group=0, layer=layer).values():
                view += 1
        assert all(torch.equal(k, old) for (k, _, _), old in zip(session.past, before, strict=True))


def test_a_salt_keeps_tenants_apart(cache: Any, model: Any) -> None:
    """One tenant's blocks would be found by another's equal tokens."""
    prompt = prompt_of(40)
    salt = kvtier.ExtraKeys(cache_salt="one")
    for extra, restored in ((salt, 0), (salt, 36), (None, 0)):
        with PrefixSession(cache, model, prompt, extra=extra) as session:
            stock(model, prompt, **session.generate_kwargs)
        assert session.tokens_restored == restored


def test_a_prompt_shorter_than_a_block_runs_as_usual(cache: Any, model: Any) -> None:
    """A prompt with nothing to name would be refused, or crash."""
    prompt = prompt_of(3)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs)
        assert session.commit() == 0
    assert session.tokens_restored == session.tokens_committed == 0
    assert torch.equal(output, stock(model, prompt))
    assert session.problem is None


# ---------------------------------------------------------------- no room, failures


def test_a_prompt_larger_than_the_gpu_tier_is_kept_in_part(model: Any, tmp_path: Path) -> None:
    """A prompt that does not fit would not use the cache at all, or not answer."""
    prompt = prompt_of(80)
    reference = stock(model, prompt)
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=9)) as cache:
        for restored, problem in ((0, "room for 9 of 20 blocks"), (36, "room for 0 of 11 blocks")):
            output, session = through(cache, model, prompt)
            assert torch.equal(output, reference)
            assert session.tokens_restored == restored
            assert session.problem == f"{problem} in the fastest tier"
            cache.flush()


def test_without_any_free_slot_it_runs_cold(model: Any, tmp_path: Path) -> None:
    """A busy cache would make generate() wait or fail."""
    prompt = prompt_of(40)
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=9)) as cache:
        nothing = kvtier.hash_blocks([], cache.config.model)
        hog = cache.reserve(cache.match(nothing, owner="hog"), blocks_total=9)
        output, session = through(cache, model, prompt)
        cache.release(hog)
    assert torch.equal(output, stock(model, prompt))
    assert session.tokens_restored == session.tokens_committed == 0
    assert session.problem == "room for 0 of 10 blocks in the fastest tier"


def test_a_known_prefix_larger_than_the_gpu_tier_is_restored_in_part(model: Any, tmp_path: Path) -> None:
    """Of a prefix that does not fit nothing would be used."""
    prompt = prompt_of(42)
    with kvtier.open_sync(config_of(model, tmp_path)) as cache:
        through(cache, model, prompt)
    with kvtier.open_sync(config_of(model, tmp_path, gpu_blocks=7)) as cache:
        with PrefixSession(cache, model, prompt) as session:
            assert session.problem == "room for 7 of 10 blocks in the fastest tier"
            output = stock(model, prompt, **session.generate_kwargs)
        assert cache.stats()["leases"] == 0
    assert session.tokens_restored == 28
    assert torch.equal(output, stock(model, prompt))


def test_blocks_that_came_too_late_are_kept_where_they_are_fast(model: Any, tmp_path: Path) -> None:
    """A slow disk would cost the prompt each time, although it was computed."""
    prompt = prompt_of(42)
    with kvtier.open_sync(config_of(model, tmp_path)) as cache:
        through(cache, model, prompt)

    class Impatient(Broken):
        def _fail(self, match: Any, blocks_total: int, load_deadline_s: float | None = None) -> Any:
            return self._cache.reserve(match, blocks_total, load_deadline_s=0.0)

    with kvtier.open_sync(config_of(model, tmp_path)) as cache:
        output, session = through(Impatient(cache, "reserve"), model, prompt)
        found = cache.peek(kvtier.hash_blocks(prompt[0].tolist(), cache.config.model))
    assert torch.equal(output, stock(model, prompt))
    assert session.problem is None
    assert found.tiers["gpu"] == 40


class Broken:
    """A cache one of whose verbs fails."""

    def __init__(self, cache: Any, verb: str) -> None:
        self._cache, self._verb = cache, verb

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._verb else getattr(self._cache, name)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the disk is on fire")


@pytest.mark.parametrize("verb", ["match", "reserve", "kv", "commit"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_failing_cache_only_costs_time(cache: Any, model: Any, verb: str, kept: bool) -> None:
    """An error of the cache would become an error of the model, or leave slots behind (the fixture counts leases)."""
    prompt = prompt_of(42)
    if kept:
        through(cache, model, prompt_of(42)[:, :20])
    output, session = through(Broken(cache, verb), model, prompt)
    assert torch.equal(output, stock(model, prompt))
    assert session.problem is not None
    assert "the disk is on fire" in session.problem
    assert session.tokens_committed == 0
    output, session = through(cache, model, prompt)
    assert torch.equal(output, stock(model, prompt))
    assert session.tokens_restored == (20 if kept else 0)


def test_half_a_prefix_is_never_seen(cache: Any, model: Any) -> None:
    """A failure in the middle of restoring would leave some layers longer than others."""
    prompt = prompt_of(42)
    through(cache, model, prompt)
    view, calls = cache.kv, iter(range(100))

    class HalfBroken(Broken):
        def _fail(self, group: int, layer: int) -> Any:
            if next(calls) == 2:
                raise RuntimeError("torn")
            return view(group=group, layer=layer)

    output, session = through(HalfBroken(cache, "kv"), model, prompt)
    assert torch.equal(output, stock(model, prompt))
    assert session.tokens_restored == 0


def test_a_closed_cache_is_a_miss(model: Any, tmp_path: Path) -> None:
    """Shutting the cache down first would break requests that are still answered."""
    cache = kvtier.open_sync(config_of(model, tmp_path))
    prompt = prompt_of(42)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs)
        cache.close()
    assert torch.equal(output, stock(model, prompt))
    assert session.problem is not None
    output, session = through(cache, model, prompt)
    assert torch.equal(output, stock(model, prompt))


def test_an_error_of_the_caller_keeps_nothing(cache: Any, model: Any) -> None:
    """Blocks of a request that failed half way would be published, or its slots lost."""
    prompt = prompt_of(42)

    def generate_and_fail(session: PrefixSession) -> None:
        with session:
            stock(model, prompt, **session.generate_kwargs)
            raise ZeroDivisionError

    session = PrefixSession(cache, model, prompt)
    with pytest.raises(ZeroDivisionError):
        generate_and_fail(session)
    assert session.tokens_committed == 0
    assert cache.stats()["blocks"] == 0


def test_an_interrupt_while_restoring_gives_the_slots_back(cache: Any, model: Any) -> None:
    """Ctrl-C at the wrong moment would leak a lease for good (the fixture counts them)."""
    prompt = prompt_of(42)
    through(cache, model, prompt)

    class Interrupted(Broken):
        def _fail(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrefixSession(Interrupted(cache, "kv"), model, prompt).__enter__()


# ---------------------------------------------------------------- wrong calls


@pytest.mark.parametrize("shape", [(9,), (1, 0), (0, 9), (1, 3, 3)])
def test_other_shapes_are_refused(cache: Any, model: Any, shape: tuple[int, ...]) -> None:
    """A flat list of ids would raise an IndexError somewhere inside."""
    with pytest.raises(UsageError, match=r"pass \[prompts, tokens\]"):
        PrefixSession(cache, model, torch.zeros(shape, dtype=torch.long))


def test_an_adapter_must_be_named(cache: Any, model: Any) -> None:
    """Blocks of the bare model would be served to its adapter, or the reverse."""
    adapted = tiny_llama()
    adapted._hf_peft_config_loaded = True
    with pytest.raises(UsageError, match="adapter"):
        PrefixSession(cache, adapted, prompt_of(9))
    PrefixSession(cache, adapted, prompt_of(9), extra=kvtier.ExtraKeys(lora=("poet", "/adapters/poet")))


def test_commit_wants_the_output_of_its_prompt(cache: Any, model: Any) -> None:
    """KV would be published under keys of tokens that it was not made from."""
    prompt = prompt_of(20)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs)
        with pytest.raises(UsageError, match="begin with the session's prompt"):
            session.commit(output[:, 1:])
        with pytest.raises(UsageError, match="1 rows"):
            session.commit(output[0])
        with pytest.raises(UsageError, match="1 rows"):
            session.commit(output.repeat(2, 1))
    with pytest.raises(UsageError, match="the session is over"):
        session.commit(output)


def test_kv_of_another_dtype_is_not_kept(cache: Any, model: Any) -> None:
    """Under autocast the model makes bfloat16; its bits would be kept as float32."""
    prompt = prompt_of(40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, session = through(cache, model, prompt)
        assert torch.equal(output, stock(model, prompt))
    assert session.tokens_committed == 0
    assert session.problem is not None
    assert "bfloat16" in session.problem
