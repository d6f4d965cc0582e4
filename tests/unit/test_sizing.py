"""Known figures, what is refused and how, and what holds for any mix of layers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.models.layers import layers_of
from kvtier.cache.sizing import size
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Mamba, Mla, SlidingWindow
from kvtier.errors import ConfigError
from tests.published_models import BAMBA_9B, DEEPSEEK_V3, GEMMA3_4B, GEMMA3_27B, LLAMA3_8B, QWEN3_8B

GIB = 1 << 30


def sized(config, memory_bytes=16 * GIB, tokens_max=8192, **how):
    return size(layers_of(config), memory_bytes, tokens_max=tokens_max, **how)


# 2 is K and V, the last factor the bytes of bfloat16.
@pytest.mark.parametrize(
    ("config", "token_bytes", "kept"),
    [
        (LLAMA3_8B, 131_072, 131_072),  # 32 layers x 2 x 8 heads x 128 x 2
        (QWEN3_8B, 147_456, 147_456),  # 36 x 2 x 8 x 128 x 2
        (GEMMA3_4B, 139_264, 20_480),  # 34 x 2 x 4 x 256 x 2, of which 5 layers attend to all
        (GEMMA3_27B, 507_904, 81_920),  # 62 x 2 x 16 x 128 x 2, of which 10
        (DEEPSEEK_V3, 70_272, 70_272),  # 61 x 576 x 2
        (BAMBA_9B, 12_288, 12_288),  # 3 layers of attention x 2 x 8 x 128 x 2
    ],
)
def test_a_token_costs_what_is_known(config, token_bytes, kept):
    """A figure that everybody can look up comes out wrong."""
    sizing = sized(config)
    assert (sizing.token_bytes, sizing.token_bytes_kept) == (token_bytes, kept)


def test_llama_is_divided_by_hand():
    """Blocks, or what fits in them, are not what a pencil says."""
    sizing = sized(LLAMA3_8B)
    assert sizing.page_bytes == 16 * 2 * 8 * 128 * 2 == 65_536
    assert sizing.block_bytes == 32 * 65_536 == 2 << 20
    assert sizing.blocks_total == 8192
    assert sizing.request_blocks == 8192 // 16 == 512
    assert (sizing.concurrency, sizing.tokens_total) == (16.0, 131_072)
    assert sizing.padding_bytes == 0


def test_gemma_is_divided_by_hand():
    """The groups of a model with windows, or what is lost in them, are not what a pencil says."""
    sizing = sized(GEMMA3_4B, tokens_max=131_072)
    # 29 layers with windows and 5 without: groups of 5, the last of the first kind has 4
    assert [(part.group.spec.kind, len(part.group.layers)) for part in sizing.group_sizes] == [
        *[("sliding_window", 5)] * 5,
        ("sliding_window", 4),
        ("full", 5),
    ]
    page = 16 * 2 * 4 * 256 * 2
    assert (sizing.page_bytes, sizing.block_bytes) == (page, 5 * page)
    assert [part.layer_padding_bytes for part in sizing.group_sizes] == [0, 0, 0, 0, 0, page, 0]
    windows = -(-(1023 + 8192) // 16) + 1  # a window of 1024, the tokens in flight, and a block begun before it
    assert [part.request_blocks for part in sizing.group_sizes] == [windows] * 6 + [131_072 // 16]
    lost = windows * page
    assert sizing.padding_bytes == lost
    assert sizing.padding_share == lost / ((6 * windows + 8192) * 5 * page)


def test_bamba_is_aligned_by_hand():
    """A block of attention does not hold a state, or a state is padded to something else than its page."""
    sizing = sized(BAMBA_9B)
    token = 2 * 8 * 128 * 2
    state = (3 * (8192 + 2 * 128) + 128 * 64 * 128) * 2  # convolution, recurrence
    tokens = 528
    assert (tokens - 16) * token < state < tokens * token
    assert {spec.block_tokens for spec in sizing.layers.values()} == {tokens}
    assert {spec.page_bytes for spec in sizing.layers.values()} == {tokens * token}
    assert sizing.layers["layers.0"].content_bytes == state
    assert sizing.group_sizes[0].page_padding_bytes == 3 * (tokens * token - state)


def test_a_state_that_is_not_aligned_pads_attention():
    """Without the option the pages are not equal, or it changes nothing."""
    unaligned = sized(BAMBA_9B, align_to_state=False)
    full = next(spec for spec in unaligned.layers.values() if isinstance(spec, FullAttention))
    assert full.block_tokens == 16
    assert full.page_bytes == unaligned.page_bytes > 30 * full.content_bytes
    assert sized(BAMBA_9B).padding_share < 0.05 < 0.5 < unaligned.padding_share


def test_a_request_that_cannot_fit_is_refused_with_numbers():
    """The user learns that it does not fit, and not what would."""
    with pytest.raises(ConfigError) as caught:
        sized(LLAMA3_8B, GIB, tokens_max=8192)
    assert caught.value.path == "memory_bytes"
    text = "a request of 8192 tokens needs 1026MiB, which are 512 blocks and the null block of 2MiB each; 1GiB hold 512"
    assert caught.value.problem == text
    assert caught.value.remedy == "Give at least 1075838976 bytes, or set tokens_max to at most 8176."
    assert sized(LLAMA3_8B, 1_075_838_976, tokens_max=8192).blocks_total == 513
    assert sized(LLAMA3_8B, GIB, tokens_max=8176).blocks_total == 512
    with pytest.raises(ConfigError, match="or set tokens_max to at most 8176"):
        sized(LLAMA3_8B, GIB, tokens_max=8177)


@pytest.mark.parametrize("memory_bytes", [1, 2 << 20, (4 << 20) - 1])
def test_memory_for_nothing_is_refused(memory_bytes):
    """A pool with no block, or with the null block only, is handed out."""
    with pytest.raises(ConfigError, match="not even a request of one token fits"):
        sized(LLAMA3_8B, memory_bytes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"memory_bytes": -GIB},
        {"memory_bytes": 1.5e9},
        {"memory_bytes": "16GiB"},
        {"tokens_max": 0},
        {"tokens_max": True},
        {"tokens_in_flight": -1},
        {"align_to_state": "no"},
    ],
)
def test_numbers_that_are_no_counts_are_refused(wrong):
    """A slip in an argument gives a traceback or a wrong division."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        sized(LLAMA3_8B, **wrong)


def test_no_layers_are_refused():
    """A model without layers divides by zero."""
    with pytest.raises(ConfigError, match="layers: there are none"):
        size({}, GIB, tokens_max=1)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (None, "None is no mapping"),
        ([1], r"\[1\] is no mapping"),
        ("model", "'model' is no mapping"),
        (LLAMA3_8B, "which is no spec of a layer"),
        ({"layers.0": None}, "'layers.0' is None, which is no spec"),
    ],
    ids=str,
)
@pytest.mark.parametrize("align_to_state", [True, False])
def test_a_description_is_no_layers(layers, told, align_to_state):
    """Who forgets layers_of gets a traceback."""
    with pytest.raises(ConfigError, match=f"layers: .*{told}.*Pass what layers_of.description. returns"):
        size(layers, GIB, tokens_max=1, align_to_state=align_to_state)


def test_the_table_says_what_the_numbers_say():
    """People are shown other numbers than programs."""
    sizing = sized(GEMMA3_4B)
    lines = str(sizing).splitlines()
    assert lines[0] == "16GiB: 52,428 blocks of 320KiB"
    assert lines[1] == f"{sizing.concurrency:.2f} requests of 8,192 tokens, {sizing.tokens_total:,} tokens in all"
    assert lines[2] == "a token writes 139,264 bytes, of which 20,480 stay; padding takes 2.9%"
    rows = [re.split(r"  +", line) for line in lines[3:]]
    assert rows == [
        ["group", "kind", "layers", "block", "page", "padding", "per request"],
        ["0-4", "sliding_window", "5", "16 tokens", "64KiB", "0.0%", "513 blocks"],
        ["5", "sliding_window", "4", "16 tokens", "64KiB", "20.0%", "513 blocks"],
        ["6", "full", "5", "16 tokens", "64KiB", "0.0%", "512 blocks"],
    ]


HEADS = {"kv_heads": st.integers(1, 9), "head_dim": st.sampled_from([64, 80, 128]), "dtype": st.just("bfloat16")}
BLOCK = {"block_tokens": st.sampled_from([16, 32])}
SPECS = st.one_of(
    st.builds(FullAttention, **BLOCK, **HEADS),
    st.builds(SlidingWindow, **BLOCK, **HEADS, window=st.sampled_from([128, 512])),
    st.builds(ChunkedLocal, **BLOCK, **HEADS, chunk_tokens=st.sampled_from([256, 1024])),
    st.builds(CrossAttention, **BLOCK, **HEADS, encoder_tokens_max=st.just(1500)),
    st.builds(Mla, **BLOCK, latent_dim=st.just(576), dtype=st.just("bfloat16")),
    st.builds(
        Mamba,
        **BLOCK,
        shapes=st.tuples(st.tuples(st.integers(1, 200_000))),
        dtypes=st.just(("float32",)),
        mode=st.sampled_from(["align", "all"]),
    ),
)
MIXES = st.lists(st.tuples(SPECS, st.integers(1, 9)), min_size=1, max_size=4)


@given(MIXES, st.integers(1, 1 << 40), st.integers(1, 100_000), st.booleans())
def test_any_mix_of_layers_is_divided_whole(mix, memory_bytes, tokens_max, align_to_state):
    """A layer is lost or kept twice, pages differ, blocks overrun the memory or leave room for one more."""
    specs = [spec for spec, times in mix for _ in range(times)]
    layers = {f"layers.{index}": spec for index, spec in enumerate(specs)}
    try:
        sizing = size(layers, memory_bytes, tokens_max=tokens_max, align_to_state=align_to_state)
    except ConfigError as error:
        refused = error.path
    else:
        refused = None
    if refused is not None:
        assert refused in ("memory_bytes", "layers") or isinstance(layers[refused], Mla)
        return
    assert sorted(name for group in sizing.groups for name in group.layers) == sorted(layers)
    assert sizing.blocks_total * sizing.block_bytes <= memory_bytes < (sizing.blocks_total + 1) * sizing.block_bytes
    assert sizing.blocks_total > sizing.request_blocks > 0
    if len(sizing.groups) > 1:
        assert {spec.page_bytes for spec in sizing.layers.values()} == {sizing.page_bytes}
        assert max(len(group.layers) for group in sizing.groups) * sizing.page_bytes == sizing.block_bytes
        assert all(sizing.layers[name] == group.spec for group in sizing.groups for name in group.layers)
    for part in sizing.group_sizes:
        assert part.content_bytes + part.padding_bytes == sizing.block_bytes
        assert part.content_bytes == sum(sizing.layers[name].content_bytes for name in part.group.layers)
    assert str(sizing)


def test_a_group_holds_what_its_hungriest_layer_holds():
    """A request is let in whose longest layer finds no block."""
    short, long = (
        CrossAttention(block_tokens=16, kv_heads=8, head_dim=64, dtype="float16", encoder_tokens_max=tokens)
        for tokens in (100, 1500)
    )
    for layers in ({"a": short, "b": long}, {"a": long, "b": short}):
        assert size(layers, GIB, tokens_max=448).request_blocks == 94
