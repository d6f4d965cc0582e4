"""Descriptions in our own words, and what is wrong with some."""

import json

import pytest

from kvtier.cache.models.layers import layers_of
from kvtier.cache.specs import ChunkedLocal, CrossAttention, FullAttention, Mamba, Mla, SlidingWindow
from kvtier.errors import ConfigError
from tests.published_models import LLAMA3_8B

SHAPE = {"kv_heads": 8, "head_dim": 128}
PLAIN = {"layers": 2, **SHAPE, "dtype": "bfloat16"}
FULL = FullAttention(block_tokens=16, kv_heads=8, head_dim=128, dtype="bfloat16")


def test_a_plain_model_needs_four_words():
    """The shortest description does not work."""
    assert layers_of(PLAIN) == {"layers.0": FULL, "layers.1": FULL}


def test_the_model_section_of_the_yaml_is_a_description():
    """One text cannot serve as configuration and for sizing."""
    section = {"name": "m", "weights_epoch": "v1", "hash": "sha256_cbor", "layout": "token_major", "tensor_parallel": 1}
    assert layers_of(section | PLAIN) == layers_of(PLAIN)


def test_every_kind_can_be_described():
    """A kind of layer that the cache keeps cannot be sized."""
    groups = [
        {"layers": [1, 3], **SHAPE},
        {"kind": "sliding_window", "layers": [0, 2], **SHAPE, "window": 512, "block_tokens": 32},
        {"kind": "chunked_local", "layers": 1, **SHAPE, "chunk_tokens": 1024, "value_dim": 64},
        {"kind": "mla", "layers": 1, "head_dim": 576, "dtype": "float16"},
        {"kind": "mamba", "layers": 1, "shapes": [[3, 64], [8, 16]], "dtypes": ["bfloat16", "float32"]},
        {"kind": "cross", "layers": 1, **SHAPE, "encoder_tokens_max": 1500},
    ]
    heads = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    window = SlidingWindow(block_tokens=32, **heads, window=512)
    assert layers_of({"dtype": "bfloat16", "groups": groups}, draft_tokens=2, state_mode="all") == {
        "layers.0": window,
        "layers.1": FULL,
        "layers.2": window,
        "layers.3": FULL,
        "layers.4": ChunkedLocal(block_tokens=16, **heads, chunk_tokens=1024, value_dim=64),
        "layers.5": Mla(block_tokens=16, latent_dim=576, dtype="float16"),
        "layers.6": Mamba(
            block_tokens=16,
            shapes=((3, 64), (8, 16)),
            dtypes=("bfloat16", "float32"),
            mode="all",
            speculative_blocks=2,
        ),
        "layers.7": CrossAttention(block_tokens=16, **heads, encoder_tokens_max=1500),
    }


def test_what_is_asked_for_wins():
    """An argument is overruled by the description."""
    described = {"dtype": "bfloat16", "block_tokens": 8, "groups": [{"layers": 1, **SHAPE, "block_tokens": 4}]}
    (spec,) = layers_of(described).values()
    assert spec.block_tokens == 4
    (spec,) = layers_of(described, block_tokens=64, dtype="float8_e4m3", tensor_parallel=4).values()
    assert (spec.block_tokens, spec.dtype, spec.kv_heads) == (64, "float8_e4m3", 2)
    (spec,) = layers_of(described, tensor_parallel=16).values()
    assert spec.kv_heads == 1


@pytest.mark.parametrize("named", [True, False])
def test_a_file_and_its_folder_are_descriptions(tmp_path, named):
    """A config.json must be read by hand first."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert layers_of(tmp_path / "config.json" if named else str(tmp_path)) == layers_of(LLAMA3_8B)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b"{", "is not JSON"), (b"[1]", "is not a mapping"), (b"[" * 100_000, "is not JSON")],
)
def test_a_file_that_is_no_description_is_refused(tmp_path, content, problem):
    """A wrong file gives a traceback."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        layers_of(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


GROUP = {"layers": 2, **SHAPE}


@pytest.mark.parametrize(
    ("description", "place"),
    [
        (PLAIN | {"kvheads": 8}, "kvheads"),
        (PLAIN | {"layers": 0}, "layers"),
        (PLAIN | {"layers": 1 << 30}, "layers"),
        (PLAIN | {"layers": []}, "layers"),
        (PLAIN | {"layers": [1, 1]}, "layers"),
        (PLAIN | {"layers": [-1]}, "layers[0]"),
        (PLAIN | {"layers": [0, 5]}, "layers"),
        (PLAIN | {"layers": [1]}, "layers"),
        ({"dtype": "float32", "groups": [GROUP | {"layers": [1]}, GROUP | {"layers": [3]}]}, "groups"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": ""}]}, "groups[0].kind"),
        (PLAIN | {"kv_heads": None}, "kv_heads"),
        (PLAIN | {"head_dim": 12.5}, "head_dim"),
        (PLAIN | {"dtype": None}, "dtype"),
        (PLAIN | {"dtype": "int4"}, "dtype"),
        (PLAIN | {"dtype": 16}, "dtype"),
        (PLAIN | {"block_tokens": -16}, "block_tokens"),
        (PLAIN | {"tensor_parallel": 2}, "tensor_parallel"),
        (PLAIN | {"groups": [GROUP]}, "layers"),
        ({"groups": []}, "groups"),
        ({"groups": {"kind": "full"}}, "groups"),
        ({"groups": ["full"]}, "groups"),
        ({"dtype": "float32", "groups": [GROUP, GROUP | {"layers": [1]}]}, "groups[1].layers"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": "ful"}]}, "groups[0].kind"),
        ({"dtype": "float32", "groups": [GROUP | {"window": 8}]}, "groups[0].window"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": "sliding_window"}]}, "groups[0].window"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": "chunked_local"}]}, "groups[0].chunk_tokens"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": "cross"}]}, "groups[0].encoder_tokens_max"),
        ({"dtype": "float32", "groups": [GROUP | {"kind": "mla"}]}, "groups[0].kv_heads"),
        ({"groups": [{"kind": "mamba", "layers": 1}]}, "groups[0].shapes"),
        ({"groups": [{"kind": "mamba", "layers": 1, "shapes": [[0]], "dtypes": ["float32"]}]}, "groups[0].shapes[0]"),
        ({"groups": [{"kind": "mamba", "layers": 1, "shapes": [3], "dtypes": ["float32"]}]}, "groups[0].shapes[0]"),
        ({"groups": [{"kind": "mamba", "layers": 1, "shapes": [[3]], "dtypes": ["int8"]}]}, "groups[0].dtypes"),
        ({"groups": [{"kind": "mamba", "layers": 1, "shapes": [[3]], "dtypes": [1]}]}, "groups[0].dtypes"),
        ({}, "num_hidden_layers"),
    ],
)
def test_a_wrong_description_says_where(description, place):
    """A slip gives a traceback, or is taken for something else."""
    with pytest.raises(ConfigError) as caught:
        layers_of(description, dtype="float32" if not description else None)
    assert caught.value.path == place
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"tensor_parallel": None}, "tensor_parallel"),
        ({"draft_tokens": None}, "draft_tokens"),
        ({"dtype": []}, "dtype"),
        ({"dtype": 5}, "dtype"),
        ({"dtype": ""}, "dtype"),
        ({"state_dtype": {}}, "state_dtype"),
        ({"state_mode": "x"}, "state_mode"),
        ({"state_mode": None}, "state_mode"),
        ({"state_mode": []}, "state_mode"),
        ({"tensor_parallel": -1}, "tensor_parallel"),
        ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"encoder_tokens_max": 0}, "encoder_tokens_max"),
        ({"dtype": "fp8"}, "dtype"),
        ({"state_dtype": "fp8"}, "state_dtype"),
    ],
)
def test_wrong_arguments_are_refused(wrong, told):
    """A slip in an argument is taken for something else."""
    with pytest.raises(ConfigError) as caught:
        layers_of(PLAIN, **wrong)
    assert caught.value.path == told


def test_an_unknown_mode_of_states_is_refused():
    """States are kept in a way that nobody asked for."""
    group = {"kind": "mamba", "layers": 1, "shapes": [[3]], "dtypes": ["float32"]}
    with pytest.raises(ConfigError, match=r"state_mode: unknown mode 'none'\. Known: align, all"):
        layers_of({"groups": [group]}, state_mode="none")


class Config:
    """As transformers has them: the fields are attributes."""

    def to_dict(self):
        return LLAMA3_8B


@pytest.mark.parametrize(
    ("description", "told"),
    [
        (Config(), r"is a Config, neither a mapping nor a path. Pass its to_dict\(\)"),
        (None, "is a NoneType, neither.*: None. Pass the path of a config.json, its content as a dict"),
        ([LLAMA3_8B], r"is a list, neither.*: \[\{.*\.\.\.\. Pass the path"),
        (5, "is a int"),
        (b"config.json", "is a bytes"),
        (json.dumps(LLAMA3_8B, indent=2), r"is the text of a description, not a path. Pass json.loads"),
        ("  [1]", "is the text of a description"),
        ("x" * 100_000, r"x\.\.\.: cannot be read: File name too long. Name the config.json"),
        ("no\nsuch\nfile", "no such file: cannot be read: No such file"),
        ("no such file", "no such file: cannot be read: No such file"),
        ("null\0byte", "is no path"),
        ("half \ud800", "is no path"),
        ("", "Is a directory|cannot be read"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_description_is_refused_in_one_line(description, told):
    """An object, a list or the text of a file gives a traceback, or is printed whole."""
    with pytest.raises(ConfigError, match=told) as caught:
        layers_of(description)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("description", "told"),
    [
        (
            {"layers": 2, "kv_heads": 8, "dtype": "float16"},
            "head_dim: is missing. Add it: a model of layers.*layers, kv_heads, head_dim and",
        ),
        ({**SHAPE, "dtype": "bfloat16"}, "layers: is missing. Add it: a model of layers that are all alike"),
        ({"kv_heads": 8, "hidden_size": 64}, "hidden_size: unknown word. "),
        ({"dtype": "bfloat16"}, "kv_heads: is missing. Add it: a model of layers"),
        (
            {"groups": [{"layers": 2, "head_dim": 576}]},
            r"groups\[0\].kv_heads: is missing. A group of kind full, which is meant without `kind` \(kinds: full,"
            r" sliding_window, chunked_local, cross, mla, mamba\) needs layers, kv_heads, head_dim\.",
        ),
        (
            {"groups": [{"kind": "mla", "layers": 2}]},
            r"groups\[0\].head_dim: is missing. A group of kind mla needs layers, head_dim\.",
        ),
        (
            {"groups": [{"kind": "sliding_window", "layers": 2, **SHAPE}]},
            "window: is missing. A group of kind sliding_window needs layers, kv_heads, head_dim, window",
        ),
        (
            {"groups": [{"layers": 2, "shapes": [[3]], "dtypes": ["float32"]}]},
            r"shapes: is no word of kind full, but of mamba. Write `kind: mamba`, or leave the word out. A group of",
        ),
        ({"groups": [GROUP | {"kind": "mla", "window": 9}]}, "window: is no word of kind mla, but of sliding_window"),
        ({"groups": [GROUP | {"windw": 9}]}, "windw: unknown word. Known|Did you mean"),
        ({"dtype": "bfloat16", "groups": [SHAPE]}, r"groups\[0\].layers: is missing. A group of kind full, which"),
        (
            {"dtype": "float32", "groups": [GROUP | {"layers": [0, 5]}, GROUP | {"layers": [7]}]},
            "groups: 1, 2, 3, 4, 6 of 8 layers are in no group. Number the layers that keep something from 0",
        ),
    ],
)
def test_our_words_are_answered_in_our_words(description, told):
    """Who describes a group is sent to transformers for a file, or not told which words are missing."""
    with pytest.raises(ConfigError, match=told) as caught:
        layers_of(description, dtype=description.get("dtype", "bfloat16") if "groups" in description else None)
    assert "transformers" not in str(caught.value)
