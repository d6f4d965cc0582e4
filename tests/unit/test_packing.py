"""Canonical CBOR packed by hand: the bytes of a general encoder, for any input."""

import hashlib

import cbor2
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtier.blocks.chain import HashChain
from kvtier.blocks.extra_keys import ExtraKeys
from kvtier.blocks.packing import ARRAY, BYTES, TOKENS_AT_ONCE, block_packer, head

BORDERS = (0, 1, 2, 23, 24, 26, 255, 256, 257, 6656, 65535, 65536, 0x1A0000, 0x19001A, 2**24 - 1, 2**24, 2**32 - 1)
TOKEN = st.one_of(
    st.sampled_from(BORDERS),
    st.integers(0, 300),
    st.integers(0, 2**18),
    st.integers(0, 2**24),
    st.integers(0, 2**32 - 1),
)


@given(st.lists(TOKEN, min_size=1, max_size=300))
def test_one_block_is_packed_as_an_encoder_would(tokens):
    """A block with an unusual mix of ids gets another name than in vLLM."""
    assert block_packer(len(tokens)).one(tokens, 0) == cbor2.dumps(tokens, canonical=True)


@settings(max_examples=60)
@given(st.lists(TOKEN, min_size=1, max_size=40), st.integers(1, 300), st.integers(0, 3))
def test_many_blocks_are_packed_as_one_by_one(seeds, block_tokens, before):
    """A long prompt gets other names than a short one."""
    blocks = TOKENS_AT_ONCE // block_tokens + 1
    stop = before + blocks * block_tokens
    tokens = [seeds[(7 * at + at // 5) % len(seeds)] for at in range(stop)]
    packed = block_packer(block_tokens).many(tokens, before, stop)
    starts = range(before, stop, block_tokens)
    assert packed == [cbor2.dumps(tokens[at : at + block_tokens], canonical=True) for at in starts]


@pytest.mark.parametrize("low", BORDERS)
def test_every_pair_of_borders_is_told_apart(low):
    """Zero bytes of one id run into the next id's lead."""
    for high in BORDERS:
        for tokens in ([low, high, low], [high, low, low, high]):
            assert block_packer(len(tokens)).one(tokens, 0) == cbor2.dumps(tokens, canonical=True)


@given(st.sampled_from([0, 1, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]), st.sampled_from([BYTES, ARRAY]))
def test_heads_are_the_shortest(count, kind):
    """A block size or a hash of unusual length is spelled in a way that is not canonical."""
    value, shift = cbor2.dumps(count), kind << 5
    assert head(kind, count) == bytes([value[0] | shift]) + value[1:]


EXTRA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(
    st.lists(TOKEN, min_size=1, max_size=60),
    st.integers(1, 60),
    st.binary(min_size=1, max_size=64),
    st.none() | st.lists(st.lists(EXTRA, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
)
def test_the_whole_message_is_canonical(tokens, block_tokens, parent, extra):
    """A parent of unusual length, or an extra key, is spelled otherwise than vLLM spells it."""
    hashes = HashChain(block_tokens, extra=ExtraKeys())
    hashes._extra = None if extra is None else Always(extra)
    hashes._root, hashes._before = parent, head(ARRAY, 3) + head(BYTES, len(parent))
    hashes.update(tokens[:block_tokens])  # later parents are digests, of 32 bytes
    message = cbor2.dumps((parent, tuple(tokens[:block_tokens]), extra), canonical=True)
    assert hashes.hashes == ([hashlib.sha256(message).digest()] if len(tokens) >= block_tokens else [])


class Always:
    """Gives every block the same extra keys."""

    def __init__(self, extra):
        self.extra = extra

    def of_block(self, start, end):
        return self.extra
