"""Specs: how large a block is, and how many a request holds at most."""

import dataclasses

import pytest

from kvtier.cache.specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Group,
    Mamba,
    Mla,
    SlidingWindow,
    blocks_for,
)
from kvtier.errors import UsageError

HEADS = {"block_tokens": 16, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
STATE = {"block_tokens": 16, "shapes": ((4, 8), (3,)), "dtypes": ("float32", "bfloat16")}
GOOD = {
    FullAttention: HEADS,
    Mla: {"block_tokens": 16, "latent_dim": 576, "dtype": "bfloat16"},
    SlidingWindow: HEADS | {"window": 512},
    ChunkedLocal: HEADS | {"chunk_tokens": 8192},
    Mamba: STATE,
    CrossAttention: HEADS | {"encoder_tokens_max": 1500},
}


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_part_of_a_block_takes_a_block(tokens, blocks):
    """A request's last tokens have no slots."""
    assert blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize(
    ("spec", "content_bytes"),
    [
        (FullAttention(**HEADS), 16 * 8 * (128 + 128) * 2),
        (FullAttention(**HEADS, value_dim=64), 16 * 8 * (128 + 64) * 2),
        (Mla(**GOOD[Mla]), 16 * 576 * 2),
        (SlidingWindow(**GOOD[SlidingWindow]), 16 * 8 * 256 * 2),
        (ChunkedLocal(**GOOD[ChunkedLocal]), 16 * 8 * 256 * 2),
        (Mamba(**STATE), 4 * 8 * 4 + 3 * 2),
        (CrossAttention(**GOOD[CrossAttention]), 16 * 8 * 256 * 2),
    ],
)
def test_a_block_has_the_bytes_of_its_tensors(spec, content_bytes):
    """Pages overlap, or memory is wasted."""
    assert spec.content_bytes == spec.page_bytes == content_bytes
    padded = dataclasses.replace(spec, padded_bytes=content_bytes + 6)
    assert (padded.content_bytes, padded.page_bytes) == (content_bytes, content_bytes + 6)


@pytest.mark.parametrize(
    ("spec", "tokens_max", "in_flight", "blocks"),
    [
        (FullAttention(**HEADS), 100, 10, 7),
        (Mla(**GOOD[Mla]), 100, 10, 7),
        (SlidingWindow(**HEADS, window=33), 1000, 16, 4),
        (SlidingWindow(**HEADS, window=33, retained_tokens=16), 1000, 16, 5),
        (SlidingWindow(**HEADS, window=33), 20, 16, 3),
        (ChunkedLocal(**HEADS, chunk_tokens=64), 1000, 16, 5),
        (ChunkedLocal(**HEADS, chunk_tokens=64), 40, 16, 3),
        (Mamba(**STATE), 1000, 16, 2),
        (Mamba(**STATE, mode="all"), 1000, 16, 1),
        (Mamba(**STATE, speculative_blocks=3), 1000, 16, 5),
        (CrossAttention(**HEADS, encoder_tokens_max=33), 1000, 16, 3),
    ],
)
def test_the_most_blocks_of_a_request(spec, tokens_max, in_flight, blocks):
    """Sizing promises more requests than fit, or refuses some that do."""
    assert spec.blocks_max(tokens_max, in_flight) == blocks


@pytest.mark.parametrize("kind", GOOD)
def test_specs_are_frozen_and_compared_by_value(kind):
    """Layers with one spec get a block table each; or a spec changes under its manager."""
    assert kind(**GOOD[kind]) == kind(**GOOD[kind])
    assert kind(**GOOD[kind]) != kind(**GOOD[kind] | {"block_tokens": 32})
    assert len({kind(**GOOD[kind]), kind(**GOOD[kind])}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind(**GOOD[kind]).block_tokens = 8
    assert Group(kind(**GOOD[kind])) == Group(kind(**GOOD[kind]), layers=(), eagle=False)


@pytest.mark.parametrize("value", [0, -1, 1.5, 16.0, True, "16", None])
@pytest.mark.parametrize("kind", GOOD)
def test_what_is_no_count_is_refused(kind, value):
    """A block of no tokens divides by nought, deep in a manager."""
    counts = [name for name, good in GOOD[kind].items() if isinstance(good, int)]
    for name in counts:
        with pytest.raises(UsageError, match=f"{name} is .*; give a number from"):
            kind(**GOOD[kind] | {name: value})


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        (FullAttention, {"dtype": "float8"}, "unknown dtype 'float8'"),
        (FullAttention, {"padded_bytes": 100}, "leave padded_bytes out, or make it larger"),
        (FullAttention, {"padded_bytes": True}, "padded_bytes is True"),
        (FullAttention, {"padded_bytes": -1}, "padded_bytes is -1"),
        (FullAttention, {"value_dim": 0}, "value_dim is 0"),
        (SlidingWindow, {"retained_tokens": -1}, "retained_tokens is -1; give a number from 0"),
        (Mamba, {"mode": "some"}, "unknown mode 'some'"),
        (Mamba, {"mode": None}, "unknown mode None"),
        (Mamba, {"dtypes": ("float32",)}, "for each tensor"),
        (Mamba, {"shapes": (), "dtypes": ()}, "for each tensor"),
        (Mamba, {"dtypes": ("float32", "x")}, "unknown dtype 'x'"),
        (Mamba, {"speculative_blocks": -1}, "speculative_blocks is -1"),
        (Mamba, {"padded_bytes": 1}, "does not hold"),
    ],
)
def test_what_does_not_fit_together_is_refused(kind, change, text):
    """A typing error in a model's description shows as wrong bytes, or as a traceback."""
    with pytest.raises(UsageError, match=text):
        kind(**GOOD[kind] | change)


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": ((0,), (3,))},
        {"shapes": ((-4,), (3,))},
        {"shapes": ((1.5,), (3,))},
        {"shapes": (4, 3)},
        {"shapes": None},
        {"dtypes": (["float32"], "bfloat16")},
        {"mode": ["align"]},
    ],
)
def test_shapes_of_states_are_counts(change):
    """A state of no bytes, or of less, makes room for any number of requests."""
    with pytest.raises(UsageError):
        Mamba(**STATE | change)


@pytest.mark.parametrize("dtype", [None, 4, ["float32"]])
def test_a_dtype_is_a_name(dtype):
    """A dtype that is none gives a traceback, or a block of unknown size."""
    with pytest.raises(UsageError):
        FullAttention(**HEADS | {"dtype": dtype})
