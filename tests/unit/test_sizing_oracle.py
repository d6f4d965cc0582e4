"""Sizing against vLLM's own answers (`tests/compat/oracle_sizing.py` made them)."""

import json
import pathlib
import re

import pytest

from kvtier.cache.grouping import aligned_to_state, group_layers
from kvtier.cache.models.layers import layers_of
from kvtier.cache.sizing import size
from kvtier.cache.specs import ChunkedLocal, FullAttention, Mamba, Mla, SlidingWindow
from kvtier.errors import ConfigError

TOLD = json.loads((pathlib.Path(__file__).parents[1] / "data" / "vllm" / "sizing.json").read_text())
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
    "CrossAttentionSpec": "cross",
}
SIZE_WORDS = ("tokens_in_flight", "align_to_state")


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def of_model(case):
    """The layers, and how `size` is to treat them."""
    how = dict(case["how"])
    sizing = {word: how.pop(word) for word in SIZE_WORDS if word in how}
    return layers_of(case["config"], **how), sizing | {"tokens_max": case["tokens_max"]}


def as_told(spec):
    told = {"kind": spec.kind, "block_tokens": spec.block_tokens, "page_bytes": spec.page_bytes}
    if isinstance(spec, Mamba):
        told |= {"shapes": [list(shape) for shape in spec.shapes], "dtypes": list(spec.dtypes)}
    return told


def renamed(told):
    return {key: KINDS[value] if key == "kind" else value for key, value in told.items() if key != "layers"}


def groups_of(grouping):
    order = {name: index for index, name in enumerate(grouping.layers)}
    return [[order[name] for name in group.layers] for group in grouping.groups]


def check_answers(case, layers, how):
    for told in case["answers"]:
        if "longest" in told:
            with pytest.raises(ConfigError) as caught:
                size(layers, told["memory_bytes"], **how)
            assert told["longest"] == int((re.findall(r"at most (\d+)", caught.value.remedy) or [0])[0])
            needed_bytes = told["needed_bytes"] + told["block_bytes"]  # vLLM takes the null block off the memory
            assert f"Give at least {needed_bytes} bytes" in caught.value.remedy
        else:
            sizing = size(layers, told["memory_bytes"], **how)
            assert sizing.block_bytes == told["block_bytes"]
            assert sizing.blocks_total == told["blocks_total"]
            assert sizing.concurrency == told["concurrency"]
            assert sizing.tokens_total == told["tokens_total"]


@by_name(TOLD["models"])
def test_a_model_is_divided_as_by_vllm(case):
    """An engine that sizes with kvtier would have other groups, blocks or limits than with vLLM."""
    layers, how = of_model(case)
    aligned = aligned_to_state(layers) if how.get("align_to_state", True) else layers
    assert [as_told(spec) for spec in aligned.values()] == [renamed(case["specs"][i]) for i in case["layers"]]
    grouping = group_layers(aligned)
    assert groups_of(grouping) == [group["layers"] for group in case["groups"]]
    assert [as_told(group.spec) for group in grouping.groups] == [renamed(group) for group in case["groups"]]
    check_answers(case, layers, how)


def spec_of(told):
    block, heads, dim = told["block_tokens"], told.get("num_kv_heads"), told.get("head_size")
    shape = {"block_tokens": block, "dtype": "bfloat16"}
    if told["kind"] == "MambaSpec":
        drafts = told["num_speculative_blocks"]
        shapes, dtypes = tuple(map(tuple, told["shapes"])), tuple(told["dtypes"])
        return Mamba(block_tokens=block, shapes=shapes, dtypes=dtypes, speculative_blocks=drafts)
    if told["kind"] == "MLAAttentionSpec":
        return Mla(**shape, latent_dim=dim)
    if told["kind"] == "SlidingWindowSpec":
        return SlidingWindow(**shape, kv_heads=heads, head_dim=dim, window=told["sliding_window"])
    if told["kind"] == "ChunkedLocalAttentionSpec":
        return ChunkedLocal(**shape, kv_heads=heads, head_dim=dim, chunk_tokens=told["attention_chunk_size"])
    return FullAttention(**shape, kv_heads=heads, head_dim=dim)


@by_name(TOLD["mixes"])
def test_a_mix_is_grouped_as_by_vllm(case):
    """Unequal pages, numbers or kinds of layers are grouped by other rules than vLLM's."""
    layers = {f"{index}": spec_of(case["specs"][told]) for index, told in enumerate(case["layers"])}
    grouping = group_layers(layers)
    assert groups_of(grouping) == [group["layers"] for group in case["groups"]]
    assert [as_told(group.spec) for group in grouping.groups] == [renamed(group) for group in case["groups"]]
    check_answers(case, layers, {"tokens_max": case["tokens_max"], "align_to_state": False})
