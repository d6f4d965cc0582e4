"""Part `engine`: a small engine on the card's tier: match, reserve, compute, attend through the block table, commit.

Owns no state. Every request attends, in every layer, from its last token over all its blocks, where they lie in the
tier's slots. It is served cold, then restored from host memory, then in a new cache from the store. Finds: an answer
that differs by one bit from the cold one, or by more than rounding from float64. KV is random and no prefill is
computed, so no time to first token is claimed: the demo with a real model keeps its KV in host memory in this version.
"""

import statistics
import time

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Lease
from kvtier.kernels.attention import Batch
from kvtier.kernels.floats import F32, from_float
from kvtier.testing.gpu_check.card import Card, Desk
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS, Placed, Problem, relative_error
from kvtier.testing.gpu_check.part_attention import ERROR_MAX
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.serving import DTYPE, Serving, configured


def measure(card: Card, record: Record) -> None:
    with configured(card) as config:
        with Serving(card, config) as serving:
            cold = _serve_all(serving, record, "cold", 0)
            for number, answers in enumerate(cold):
                keys = serving.prompt(number)
                wanted = _question(serving, keys, 0, _content(serving, keys)).oracle()[0]
                error = relative_error(answers[0], wanted)
                bound = ERROR_MAX[DTYPE]
                record.expect(error <= bound, f"request {number}: relative error {error:.1e}, at most {bound:.0e}")
            serving.poison()
            warm = _serve_all(serving, record, "restored from host", card.scale.prompt_blocks * BLOCK_TOKENS)
        with Serving(card, config) as serving:
            late = _serve_all(serving, record, "restored from lmdb", card.scale.prompt_blocks * BLOCK_TOKENS)
    for when, again in (("from host", warm), ("from lmdb", late)):
        same = sum(all(map(np.array_equal, *pair)) for pair in zip(cold, again, strict=True))
        record.expect(same == len(cold), f"restored {when}: {len(cold) - same} of {len(cold)} answers differ")
        record.measured(f"answers equal to the cold ones, restored {when}", f"{same} of {len(cold)}")


def _serve_all(serving: Serving, record: Record, when: str, tokens_wanted: int) -> list[list[F32]]:
    """Each request's answers by layer."""
    answers, times = [], []
    for number in range(serving.card.scale.prompts):
        keys = serving.prompt(number)
        start = time.perf_counter()
        with serving.leased(keys) as lease:
            ready = lease.tokens_ready
            record.expect(ready == tokens_wanted, f"{when}, request {number}: {ready} of {tokens_wanted} tokens")
            serving.compute(lease, keys)
            content = _content(serving, keys)
            questions = [_question(serving, keys, layer, content) for layer in range(content.shape[1])]
            answers.append([_attend(serving, lease, layer, question) for layer, question in enumerate(questions)])
        times.append((time.perf_counter() - start) * 1e3)
        serving.flush()
    record.measured(f"a request, {when} (KV written, not computed)", statistics.median(times), "ms")
    return answers


def _attend(serving: Serving, lease: Lease, layer: int, question: Problem) -> F32:
    card = serving.card
    segment = serving.spec.of_layer(layer)[0]
    with card.memory(question.desk_bytes) as address:
        desk = Desk(card, address, question.desk_bytes)
        pool = serving.address + segment.offset_bytes
        placed = Placed(card, question, pool, desk, stride_bytes=serving.stride_bytes)
        card.put(placed.tables, np.array([lease.slots()], np.int32))
        placed.run()
        card.streams.finish(card.stream)
        return placed.result()


def _content(serving: Serving, keys: Keys) -> NDArray[np.float16]:
    """What the prompt's blocks hold: [blocks, layers, values]."""
    return np.stack([serving.content(key).reshape(serving.card.scale.layers, -1) for key in keys.groups[0]])


def _question(serving: Serving, keys: Keys, layer: int, content: NDArray[np.float16]) -> Problem:
    """The last token of a prompt over all of it, in one layer. The pool holds the prompt's blocks in their order."""
    heads, kv_heads = serving.card.scale.heads
    head_dim = serving.card.scale.head_dims[0]
    count = len(content)
    tokens = count * BLOCK_TOKENS
    seed = int.from_bytes(keys.groups[0][-1][:8], "big") + layer
    asked = np.random.default_rng(seed).standard_normal((1, heads, head_dim), np.float32)
    batch = Batch(
        query_starts=np.array([0, 1], np.int32),
        positions=np.array([tokens - 1], np.int32),
        kv_tokens=np.array([tokens], np.int32),
        tables=np.arange(count, dtype=np.int32)[None],
    )
    pool = content[:, layer].reshape(count, 2, BLOCK_TOKENS, kv_heads, head_dim)
    return Problem(pool, from_float(asked, DTYPE), batch, DTYPE)
