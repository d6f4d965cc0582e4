"""The chain of block hashes: vLLM's own answers, growth token by token, refusals that change nothing."""

import json
import pathlib
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvtier.blocks.algorithms import HASHES
from kvtier.blocks.chain import HashChain, chain
from kvtier.blocks.extra_keys import ExtraKeys, MultiModalItem
from kvtier.errors import UsageError

GOLDENS = json.loads((pathlib.Path(__file__).parents[1] / "data/vllm_hash_cases.json").read_text())
CASES = {f"{c['hash']}-{c['seed']}-{c['block_tokens']}-{c['extra']}": c for c in GOLDENS["cases"]}
PLAIN_HASHES = ("sha256_cbor", "xxhash_cbor", "sha256", "xxhash")


@cache
def embeddings(dtype, rows):
    """The rows that vLLM was asked about; bfloat16 as the bits that numpy has no name for."""
    numbers = ((np.arange(rows * GOLDENS["hidden"]) * 37 % 101 - 50) / 8).astype("float32")
    if dtype == "bfloat16":
        return (numbers.view("uint32") >> 16).astype("uint16").reshape(rows, -1)
    return numbers.astype(dtype).reshape(rows, -1)


def extra_keys(given_extra):
    return ExtraKeys(
        lora=tuple(given_extra["lora"]) if "lora" in given_extra else None,
        items=tuple(MultiModalItem(*item) for item in given_extra.get("items", ())),
        cache_salt=given_extra.get("salt"),
        prompt_embeds=embeddings(**given_extra["embeds"]) if "embeds" in given_extra else None,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_names_equal_vllms_own(case):
    """A vLLM engine and kvtier name the same block differently, at once or token by token."""
    extra = extra_keys(GOLDENS["extras"][case["extra"]])
    at_once, growing = (HashChain(case["block_tokens"], case["hash"], case["seed"], extra) for _ in range(2))
    at_once.update(GOLDENS["tokens"])
    tokens = []
    for token in GOLDENS["tokens"]:
        tokens.append(token)
        growing.update(tokens)
    assert (len(at_once.hashes), at_once.hashes[-1].hex()) == (case["blocks"], case["last"])
    assert growing.hashes == at_once.hashes


def test_the_goldens_cover_what_can_differ():
    """A case that vLLM was asked about is lost, and with it the proof for an algorithm or a kind of extra key."""
    assert {case["hash"] for case in CASES.values()} == set(PLAIN_HASHES)
    assert {case["block_tokens"] for case in CASES.values()} == {1, 4, 16, 24, 100}
    assert {case["extra"] for case in CASES.values()} == set(GOLDENS["extras"])


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=120),
    st.lists(st.integers(0, 120), max_size=6),
    st.integers(1, 9),
    st.sampled_from(PLAIN_HASHES),
)
def test_growth_does_not_matter(tokens, stops, block_tokens, hash_name):
    """A block gets another name when its prompt arrives in pieces, or a partial block gets one."""
    growing = HashChain(block_tokens, hash_name)
    for stop in [*sorted(stops), len(tokens)]:
        growing.update(tokens[:stop])
    assert growing.hashes == list(chain(tokens, block_tokens, hash_name))
    assert len(growing.hashes) == len(tokens) // block_tokens


def test_a_default_root_needs_no_environment(monkeypatch):
    """The xxhash pair has another root in each process, as in vLLM without PYTHONHASHSEED."""
    for hash_name in PLAIN_HASHES:
        monkeypatch.setenv("PYTHONHASHSEED", "5")
        seeded = list(chain(range(4), 4, hash_name))
        monkeypatch.delenv("PYTHONHASHSEED")
        assert list(chain(range(4), 4, hash_name)) == seeded == list(chain(range(4), 4, hash_name, "vllm-none-hash"))
        assert list(chain(range(4), 4, hash_name, "5")) != seeded


WRONG = (-1, 2**32, 2**200, True, False, 1.0, 7.0, "7", b"7", None, [7], np.float32(7), np.bool_(True), np.int8(-1))


@pytest.mark.parametrize("hash_name", PLAIN_HASHES)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_token_is_refused(hash_name, wrong):
    """A mistake is hashed as something else, or leaves half a prompt named."""
    for length, at in ((16, 0), (16, 15), (40, 17), (1024, 1023)):
        grown = HashChain(8, hash_name)
        tokens = [5] * length
        grown.update(tokens[:8])
        before = list(grown.hashes)
        tokens[at] = wrong
        fresh = HashChain(8, hash_name)
        with pytest.raises(UsageError, match=f"token {at} is "):
            fresh.update(tokens)
        assert fresh.hashes == []
        if at >= 8:
            with pytest.raises(UsageError, match=f"token {at} is "):
                grown.update(tokens)
        assert grown.hashes == before
        tokens[at] = 5  # mended: the chain goes on as if nothing had been
        grown.update(tokens)
        assert grown.hashes == list(chain([5] * length, 8, hash_name))


@pytest.mark.parametrize("hash_name", PLAIN_HASHES)
def test_numpy_integers_are_the_integers_they_are(hash_name):
    """A list of numpy integers gets keys of its own."""
    for length in (16, 1024):
        ids = np.arange(length) * 4099 % 70000
        assert list(chain(list(ids), 16, hash_name)) == list(chain(ids.tolist(), 16, hash_name))
        assert list(chain(ids, 16, hash_name)) == list(chain(ids.tolist(), 16, hash_name))


def test_a_chain_says_what_it_cannot_be_made_of():
    """A typing error makes keys that never match."""
    for block_tokens in (0, -4, True, 4.0, "4", None, 2**32):
        with pytest.raises(UsageError, match="block_tokens"):
            HashChain(block_tokens)
    for seed in (5, b"0", ["0"], "\udc00"):
        with pytest.raises(UsageError):
            HashChain(4, seed=seed)
    for hash_name in ("sha265", "", None, ["sha256"]):
        with pytest.raises(UsageError, match="hash"):
            HashChain(4, hash_name)
    with pytest.raises(UsageError, match="extra"):
        HashChain(4, extra="salt")


def test_a_chain_knows_its_blocks_extra_keys():
    """An event tells other extra keys than the block was named with."""
    extra = ExtraKeys(lora=("a", "/a"), items=(MultiModalItem("cat", 2, 5),), cache_salt="s")
    hashes = HashChain(4, extra=extra)
    hashes.update(list(range(12)))
    assert hashes.extra_of(0) == (("lora", "a", "/a"), ("mm", "cat", 2), ("cache_salt", "s"))
    assert hashes.extra_of(1) == (("lora", "a", "/a"), ("mm", "cat", -2))
    assert hashes.extra_of(2) == (("lora", "a", "/a"),)
    assert HashChain(4).extra_of(0) is None


def test_the_digest_gets_the_canonical_message(monkeypatch):
    """A registered hash is fed something else than what is documented."""
    import cbor2

    from kvtier.blocks.algorithms import register_hash

    monkeypatch.setattr(HASHES, "_entries", {name: HASHES.get(name) for name in HASHES})
    seen = []

    def digest(data):
        seen.append(data)
        return (sum(data) % 251).to_bytes(1, "big") * 7

    register_hash("summed", digest)
    seen.clear()
    hashes = HashChain(2, "summed", "x", ExtraKeys(cache_salt="s"))
    hashes.update([1, 2, 70000, 4, 5])
    first, second = hashes.hashes
    root = digest(cbor2.dumps("x"))
    assert seen[1] == cbor2.dumps((root, (1, 2), (("cache_salt", "s"),)), canonical=True)
    assert seen[2] == cbor2.dumps((first, (70000, 4), None), canonical=True)
    assert second == digest(seen[2])
