"""Part `attention`: our kernel over a block table, for every dtype and head dim, against float64.

Owns no state. Finds: a result further off than rounding explains. Units: microseconds of the device's time, from the
first launch's to the last one's end; GB of K and V that a step reads, by that time.
"""

import statistics

import numpy as np

from kvtier.kernels.arrays import FORMATS
from kvtier.testing.gpu_check.card import Card, Desk
from kvtier.testing.gpu_check.paged import BLOCK_TOKENS, Placed, Problem, problem, relative_error
from kvtier.testing.gpu_check.record import Record

# of float sums over thousands of tokens, and of the one rounding of the result
ERROR_MAX = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
QUERIES = 5  # of a short prefill
WINDOW_SHARE, WINDOW_TOKENS_MIN = 3, 24  # of the longest sequence: a third


def measure(card: Card, record: Record) -> None:
    oracles = set()
    for dtype in FORMATS:
        for head_dim in card.scale.head_dims:
            questions = _questions(card, dtype, head_dim)
            errors = []
            for question in questions.values():
                error, took_us, oracle = _answer(card, question)
                oracles.add(oracle)
                errors.append(error)
            name = f"{dtype}, head dim {head_dim}"
            for what, error in zip(questions, errors, strict=True):
                within = error <= ERROR_MAX[dtype]
                record.expect(within, f"{name}, {what}: relative error {error:.1e}, at most {ERROR_MAX[dtype]:.0e}")
            record.measured(f"{name}: relative error, worst of {len(errors)}", max(errors))
            record.measured(f"{name}: a decode step", took_us, "us")
    record.notes += [f"compared with {oracle}" for oracle in sorted(oracles)]


def _questions(card: Card, dtype: str, head_dim: int) -> dict[str, Problem]:
    """The decode step comes last: it is the one whose time is told."""
    scale = card.scale
    lengths = np.linspace(BLOCK_TOKENS - 1, scale.kv_tokens, scale.sequences).astype(int).tolist()
    window = max(WINDOW_TOKENS_MIN, scale.kv_tokens // WINDOW_SHARE)
    make = (dtype, scale.heads, head_dim, [1, *lengths])
    return {
        "prefill over a prefix": problem(1, *make, queries=QUERIES),
        "sliding window": problem(2, *make, queries=QUERIES, window=window),
        "decode": problem(3, *make),
    }


def _answer(card: Card, question: Problem) -> tuple[float, float, str]:
    """Relative error, time of a step in us, and who was asked."""
    wanted, oracle = question.oracle()
    with card.memory(question.pool.nbytes) as pool, card.memory(question.desk_bytes) as desk:
        card.put(pool, question.pool)
        placed = Placed(card, question, pool, Desk(card, desk, question.desk_bytes))
        placed.run()
        card.streams.finish(card.stream)
        error = relative_error(placed.result(), wanted)
        times = [card.milliseconds(placed.run) for _ in range(card.scale.rounds)]
    return error, statistics.median(times) * 1e3, oracle
