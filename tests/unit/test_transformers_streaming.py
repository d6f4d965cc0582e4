"""Streams, threads, loops of one's own and interrupts: whatever happens while a model runs, only whole KV is kept.

A block holds 4 tokens.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvtier  # noqa: E402 -- what follows needs torch
from kvtier.errors import UsageError  # noqa: E402
from kvtier.integrations.transformers import PrefixSession  # noqa: E402
from tests.tiny_llama import open_cache, prompt_of, tiny_llama, tiny_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch

NEW_TOKENS = 8


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[kvtier.SyncCache]:
    with open_cache(model, tmp_path) as opened:
        yield opened


class Ids(transformers.generation.streamers.BaseStreamer):
    """Collects ids, and calls `on_token` after each step."""

    def __init__(self, on_token: Any = None) -> None:
        self.ids: list[int] = []
        self._on_token = on_token

    def put(self, value: Any) -> None:
        self.ids += value.flatten().tolist()
        if self._on_token:
            self._on_token(len(self.ids))

    def end(self) -> None:
        pass


def stock(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def known(cache: Any, ids: Any) -> int:
    return cache.peek(kvtier.hash_blocks(ids[0].tolist(), cache.config.model)).tokens


def test_a_streamer_sees_the_tokens_of_stock(cache: Any, model: Any) -> None:
    """Streaming would skip the tokens that were restored, or give them twice."""
    prompt = prompt_of(30)
    reference = stock(model, prompt)
    for restored in (0, 28):
        streamer = Ids()
        with PrefixSession(cache, model, prompt) as session:
            output = stock(model, prompt, **session.generate_kwargs, streamer=streamer)
            session.commit(output)
        assert session.tokens_restored == restored
        assert streamer.ids == reference[0].tolist()
    assert known(cache, reference) == 36


def test_text_streams_from_a_thread_that_generates(cache: Any, model: Any) -> None:
    """A server that streams could not use the cache."""
    tokenizer = tiny_tokenizer()
    prompt = prompt_of(30)
    reference = stock(model, prompt)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with PrefixSession(cache, model, prompt) as session:
        outputs: list[Any] = []
        thread = threading.Thread(
            target=lambda: outputs.append(stock(model, prompt, **session.generate_kwargs, streamer=streamer))
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
        session.commit(outputs[0])
    assert text == tokenizer.decode(reference[0, 30:])
    assert known(cache, reference) == 36


def test_a_session_may_end_in_another_thread(cache: Any, model: Any) -> None:
    """A worker that takes over a request could not keep its blocks."""
    prompt = prompt_of(30)
    session = PrefixSession(cache, model, prompt).__enter__()

    def rest() -> None:
        session.commit(stock(model, prompt, **session.generate_kwargs))
        session.__exit__(None, None, None)

    thread = threading.Thread(target=rest)
    thread.start()
    thread.join()
    assert session.problem is None
    assert session.tokens_committed == 36


def test_sessions_of_several_threads_answer_as_stock(cache: Any, model: Any) -> None:
    """Requests that run at the same time would get each other's KV."""
    prompts = [torch.cat([prompt_of(20), prompt_of(9, seed=seed)], dim=1) for seed in (1, 2, 3)]
    references = [stock(model, prompt) for prompt in prompts]
    outputs: dict[int, Any] = {}

    def serve(number: int) -> None:
        for _ in range(3):
            with PrefixSession(cache, model, prompts[number]) as session:
                outputs[number] = stock(model, prompts[number], **session.generate_kwargs)
                session.commit(outputs[number])

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outputs[number], reference) for number, reference in enumerate(references))


def test_the_prompt_can_be_kept_while_tokens_stream(cache: Any, model: Any) -> None:
    """Others would wait for the end of a long answer before they find the prompt, or find half of it."""
    prompt = prompt_of(30)
    seen: list[int] = []
    with PrefixSession(cache, model, prompt) as session:
        streamer = Ids(lambda count: seen.append(session.commit()))
        output = stock(model, prompt, **session.generate_kwargs, streamer=streamer)
    assert seen[:3] == [0, 28, 0]  # the prompt comes first, before any KV
    assert torch.equal(output, stock(model, prompt))
    assert known(cache, output) == 28


def test_layers_that_are_not_all_there_yet_are_not_kept(cache: Any, model: Any) -> None:
    """A commit from another thread, between two layers, would publish blocks whose later layers are empty."""
    prompt = prompt_of(30)
    added: list[int] = []
    with PrefixSession(cache, model, prompt) as session:
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: added.append(session.commit()))
        stock(model, prompt, **session.generate_kwargs)
        handle.remove()
    assert added[:3] == [0, 28, 0]
    assert session.problem is None
    with PrefixSession(cache, model, prompt) as session:
        assert torch.equal(stock(model, prompt, **session.generate_kwargs), stock(model, prompt))


def test_a_loop_of_ones_own_works_as_generate(cache: Any, model: Any) -> None:
    """Engines that call the model themselves could not use the cache, or not keep what they sampled."""
    prompt = prompt_of(30)
    reference = stock(model, prompt)
    for restored in (0, 28):
        with PrefixSession(cache, model, prompt) as session, torch.no_grad():
            assert session.tokens_restored == restored
            ids, fed = prompt, session.tokens_restored
            while ids.shape[1] < 30 + NEW_TOKENS:
                logits = model(ids[:, fed:], **session.generate_kwargs).logits
                fed = ids.shape[1]
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
                session.commit(ids)
        assert torch.equal(ids, reference)
    assert known(cache, reference) == 36


def test_a_prompt_fed_twice_is_refused(cache: Any, model: Any) -> None:
    """A loop that forgets to skip the restored tokens would answer something else, and poison the cache with it."""
    prompt = prompt_of(30)
    with PrefixSession(cache, model, prompt) as session:
        model(prompt, **session.generate_kwargs)
    with (
        PrefixSession(cache, model, prompt) as session,
        pytest.raises(UsageError, match=r"30 tokens, but only 2 .* input_ids\[:, session\.past\.get_seq_length\(\):\]"),
    ):
        model(prompt, **session.generate_kwargs)


def test_generating_without_a_cache_is_no_option(cache: Any, model: Any) -> None:
    """transformers would append the whole prompt to the given cache at each step, and answer something else."""
    prompt = prompt_of(30)
    model.generation_config.use_cache = False
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs)
        with pytest.raises(TypeError, match="use_cache"):
            stock(model, prompt, **session.generate_kwargs, use_cache=False)
    assert torch.equal(output, stock(model, prompt))


def test_a_prompt_may_be_computed_in_chunks(cache: Any, model: Any) -> None:
    """Long prompts, which need both most, could not have chunks and restored blocks."""
    prompt = torch.cat([prompt_of(20), prompt_of(25, seed=1)], dim=1)
    with PrefixSession(cache, model, prompt[:, :21]) as session:
        stock(model, prompt[:, :21], **session.generate_kwargs)
    with PrefixSession(cache, model, prompt) as session:
        output = stock(model, prompt, **session.generate_kwargs, prefill_chunk_size=7)
    assert session.tokens_restored == 20
    assert torch.equal(output, stock(model, prompt))


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize(("at", "kept"), [(30, 0), (32, 28)])
def test_an_interrupt_keeps_the_prompt_if_it_is_whole(
    cache: Any, model: Any, interrupt: type[BaseException], at: int, kept: int
) -> None:
    """Ctrl-C in a long answer would throw the prompt's work away, or keep what was not computed."""
    prompt = prompt_of(30)

    def stop(count: int) -> None:
        if count == at:
            raise interrupt

    def interrupted(session: PrefixSession) -> None:
        with session:
            stock(model, prompt, **session.generate_kwargs, streamer=Ids(stop))

    session = PrefixSession(cache, model, prompt)
    with pytest.raises(interrupt):
        interrupted(session)
    assert session.tokens_committed == kept
    assert known(cache, prompt) == kept
    with PrefixSession(cache, model, prompt) as session:
        assert torch.equal(stock(model, prompt, **session.generate_kwargs), stock(model, prompt))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupt_inside_a_forward_keeps_nothing_half(cache: Any, model: Any, layer: int) -> None:
    """Blocks would be published whose first layers are there and whose last are not."""
    prompt = prompt_of(30)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with session:
            stock(model, prompt, **session.generate_kwargs)

    session = PrefixSession(cache, model, prompt)
    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(stop)  # its KV is there by then
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    handle.remove()
    assert session.problem is None
    assert known(cache, prompt) == (28 if layer == 2 else 0)
    with PrefixSession(cache, model, prompt) as session:
        assert torch.equal(stock(model, prompt, **session.generate_kwargs), stock(model, prompt))


@pytest.mark.parametrize("error", [StopIteration, RuntimeError])
def test_an_error_keeps_nothing(cache: Any, model: Any, error: type[Exception]) -> None:
    """KV of a model that failed would be kept although nobody knows what is wrong with it."""
    prompt = prompt_of(30)

    def stop(count: int) -> None:
        if count == 32:
            raise error

    def failing() -> None:
        with PrefixSession(cache, model, prompt) as session:
            stock(model, prompt, **session.generate_kwargs, streamer=Ids(stop))

    with pytest.raises(error):
        failing()
    assert known(cache, prompt) == 0


def test_a_closed_stream_keeps_the_prompt(cache: Any, model: Any) -> None:
    """A client that hangs up in the middle would cost the next one the whole prompt."""
    prompt = prompt_of(30)

    def tokens() -> Iterator[int]:
        with PrefixSession(cache, model, prompt) as session, torch.no_grad():
            ids, fed = prompt, session.tokens_restored
            while True:
                token = model(ids[:, fed:], **session.generate_kwargs).logits[:, -1:].argmax(-1)
                fed = ids.shape[1]
                ids = torch.cat([ids, token], dim=1)
                yield int(token)

    stream = tokens()
    assert [next(stream) for _ in range(3)] == stock(model, prompt)[0, 30:33].tolist()
    stream.close()
    assert known(cache, prompt) == 28
