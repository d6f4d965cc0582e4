"""Names and shapes of blocks: bit-compatible keys, layouts, namespaces."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvtier.blocks.chain import chain
from kvtier.blocks.extra_keys import ExtraKeys, MultiModalItem
from kvtier.blocks.hashing import Keys, hash_blocks
from kvtier.blocks.namespace import NamespaceTable, encode_fields, fingerprint
from kvtier.blocks.spec import LAYOUTS, block_specs
from kvtier.errors import UsageError
from kvtier.types import GroupSpec, ModelSpec, block_key, block_key_of, group_of, hash_of, namespace_of, store_key

GOLDENS = json.loads((pathlib.Path(__file__).parents[1] / "data/vllm_hashes.json").read_text())
GROUP = GroupSpec("full", (0, 1, 2), 2, 8, "float16", 4)
MODEL = ModelSpec("m", "v1", (GROUP,))

EXTRAS = {
    "plain": None,
    "bigtokens": None,
    "salt": ExtraKeys(cache_salt="tenant-a"),
    "lora": ExtraKeys(lora=("my-lora", "/adapters/x")),
    "mm": ExtraKeys(items=(MultiModalItem("imghash1", 2, 5), MultiModalItem("imghash2", 9, 2))),
    "all": ExtraKeys(
        lora=("my-lora", "/adapters/x"),
        items=(MultiModalItem("imghash1", 2, 5), MultiModalItem("imghash2", 9, 2)),
        cache_salt="tenant-a",
    ),
}


@pytest.mark.parametrize("case", GOLDENS)
def test_hashes_equal_vllms_own(case):
    """A vLLM engine and kvtier name the same block differently."""
    golden = GOLDENS[case]
    hash_name, seed, name = case.split("|")
    seed = None if seed.endswith("None") else seed.split("=")[1]
    hashes = list(chain(golden["tokens"], golden["block_size"], hash_name, seed, EXTRAS[name]))
    assert [h.hex() for h in hashes] == golden["hashes"]


def test_keys_are_the_same_in_every_process():
    """Two processes share nothing because their hashes are seeded apart (LMCache#1139, #2979)."""
    code = "import kvtier.blocks.chain as h; print([k.hex() for k in h.chain(list(range(32)), 16)])"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "random")
    ]
    assert len(set(runs)) == 1
    assert "[" in runs[0]


def test_a_salt_keeps_tenants_apart():
    """Equal prompts of two tenants share KV (sglang#37160)."""
    tokens = list(range(12))
    plain, ours, theirs = (
        hash_blocks(tokens, MODEL, ExtraKeys(cache_salt=salt)).groups[0] for salt in (None, "a", "b")
    )
    assert not set(plain) & set(ours)
    assert not set(ours) & set(theirs)
    assert hash_blocks(tokens, MODEL, ExtraKeys(cache_salt="a")).groups[0] == ours


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(0, 29))
def test_a_key_names_everything_before_it(tokens, position):
    """Two different prefixes get the same key, or a partial block gets one."""
    keys = hash_blocks(tokens, MODEL).groups[0]
    assert len(keys) == len(tokens) // 4
    if position < len(tokens):
        changed = [*tokens]
        changed[position] ^= 1
        other = hash_blocks(changed, MODEL).groups[0]
        assert keys[: position // 4] == other[: position // 4]
        assert not set(keys[position // 4 :]) & set(other[position // 4 :])


def test_tokens_may_be_an_array_and_nothing_but_token_ids():
    """A numpy integer is hashed as something else, or a mistake makes keys that never match."""
    assert hash_blocks(np.arange(8), MODEL) == hash_blocks(list(range(8)), MODEL)
    for wrong in ([1, 2, 3, -1], [1.0] * 4, ["a"] * 4, [[1, 2], [3, 4]], np.ones((2, 4), int), [2**32] * 4, [True] * 4):
        with pytest.raises(UsageError, match="token"):
            hash_blocks(wrong, MODEL)


def test_opaque_keys_are_checked():
    """An engine's own hashes are cut off or mixed up between groups."""
    keys = Keys.opaque([[b"x", b"y" * 64]], MODEL)
    assert keys.tokens == 8
    assert hash_of(keys.groups[0][1]) == b"y" * 64
    for wrong in ([[b""]], [[b"z" * 65]], [[b"a"], [b"b"]], [["text"]], [[5]], [[None]], [[bytearray(b"x")]]):
        with pytest.raises(UsageError):
            Keys.opaque(wrong, MODEL)


def test_calls_that_would_name_something_else_are_refused():
    """A slip of the pen makes keys that never match, or match another adapter's."""
    mistakes = (
        lambda: hash_blocks(None, MODEL),
        lambda: hash_blocks(5, MODEL),
        lambda: hash_blocks([1, 2, 3, 4], None),
        lambda: hash_blocks([1, 2, 3, 4], MODEL, "salt"),
        lambda: ExtraKeys(lora="ab"),
        lambda: ExtraKeys(lora=("a",)),
        lambda: ExtraKeys(items=("image",)),
        lambda: ExtraKeys(cache_salt=5),
        lambda: ExtraKeys(cache_salt="\udc00"),
    )
    for mistake in mistakes:
        with pytest.raises(UsageError):
            mistake()


def test_keys_of_hybrid_models_are_cut_alike():
    """Groups with other block sizes get prefixes of different lengths."""
    model = ModelSpec("h", "v1", (GROUP, GroupSpec("full", (3,), 2, 8, "float16", 6)))
    keys = hash_blocks(list(range(40)), model)
    assert [len(row) for row in keys.groups] == [10, 6]
    assert keys.tokens == 36
    assert [len(row) for row in keys.prefix(35).groups] == [6, 4]
    assert {group_of(key) for key in keys.groups[1]} == {1}


def test_key_parts_survive():
    """A key's namespace or group is read from the wrong bytes."""
    key = block_key(b"h" * 7, 513)
    assert (hash_of(key), group_of(key)) == (b"h" * 7, 513)
    stored = store_key(70000, key)
    assert (namespace_of(stored), block_key_of(stored)) == (70000, key)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["full", "mla"])
def test_segments_tile_the_block(layout, kind):
    """Two segments overlap, or a byte of the block belongs to none."""
    group = GroupSpec(kind, (0, 1, 2), 1 if kind == "mla" else 2, 8, "float16", 4)
    (spec,) = block_specs(ModelSpec("m", "v1", (group,), layout))
    assert spec.block_bytes == 3 * (1 if kind == "mla" else 4) * 4 * 8 * 2
    touched = np.zeros(spec.block_bytes, np.uint8)
    for s in spec.segments:
        view = np.ndarray(s.shape, "uint16", touched.data, s.offset_bytes, s.strides_bytes)
        view += 0x0101
    assert (touched == 1).all()


def test_layouts_order_the_axes_as_they_say():
    """A block written by one layout is read by another without a complaint (LMCache#4463)."""
    expected = {
        "layer_token_major": ("layer", "kv", "token", "head", "dim"),
        "layer_head_major": ("layer", "kv", "head", "token", "dim"),
        "token_major": ("token", "layer", "kv", "head", "dim"),
    }
    sizes = {"layer": 3, "kv": 2, "token": 4, "head": 2, "dim": 8}
    for layout, axes in expected.items():
        (spec,) = block_specs(dataclasses.replace(MODEL, layout=layout))
        memory = np.zeros(spec.block_bytes, np.uint8)
        for s in spec.segments:
            view = np.ndarray(s.shape, "uint16", memory.data, s.offset_bytes, s.strides_bytes)
            kv = "kv".index(s.name)
            for index in np.ndindex(*s.shape):
                view[index] = s.layer * 10000 + kv * 5000 + index[0] * 100 + index[1] * 10 + index[2]
        whole = memory.view("uint16").reshape([sizes[a] for a in axes])
        at = {"layer": 2, "kv": 1, "token": 3, "head": 1, "dim": 5}
        assert whole[tuple(at[a] for a in axes)] == 25315


def test_everything_that_makes_bytes_shareable_is_in_the_fingerprint():
    """KV of another layout, epoch, precision or parallel split is served (vllm#55904, vllm#42125)."""
    changes = {
        "name": "n",
        "weights_epoch": "v2",
        "layout": "token_major",
        "hash": "xxhash_cbor",
        "hash_seed": "0",
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "context_parallel": 2,
        "codec": "int8",
        "groups": (dataclasses.replace(GROUP, dtype="bfloat16"),),
    }
    assert set(changes) == {f.name for f in dataclasses.fields(ModelSpec)}
    prints = {fingerprint(dataclasses.replace(MODEL, **{name: value})) for name, value in changes.items()}
    for field, value in {"kind": "mla", "layers": (0, 1), "kv_heads": 1, "head_dim": 4, "block_tokens": 8}.items():
        prints.add(fingerprint(dataclasses.replace(MODEL, groups=(dataclasses.replace(GROUP, **{field: value}),))))
    assert len(prints | {fingerprint(MODEL)}) == len(changes) + 5 + 1


def test_the_fingerprint_never_changes_by_itself():
    """A new version of kvtier silently forgets every store: raise IDENTITY_VERSION if this must change."""
    assert fingerprint(MODEL).hex() == GOLDEN_FINGERPRINT


GOLDEN_FINGERPRINT = "83e16f1eab5e35e3c4376fb99898b1bf6b90557be6cd8c2366f27d739299ba70"


def test_namespace_ids_are_given_once():
    """Two namespaces share an id."""
    table = NamespaceTable()
    first = table.id_of_model(MODEL)
    second = table.id_of_model(dataclasses.replace(MODEL, weights_epoch="v2"))
    assert (first, second, table.id_of_model(MODEL), len(table)) == (0, 1, 0, 2)
    assert table.description_of(0) == encode_fields(MODEL)
    assert table.find(fingerprint(MODEL)) == 0
    assert table.find(b"?" * 32) is None
    with pytest.raises(ValueError, match="32 bytes"):
        table.id_of(b"short", b"")
