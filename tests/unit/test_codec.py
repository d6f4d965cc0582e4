"""The frame: what goes in comes out, and nothing else ever does."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.codec import checksum, decode, decode_first, encode
from kvtier.errors import CorruptBlock, UsageError
from kvtier.types import block_key

FINGERPRINT = bytes(range(32))
KEYS = st.builds(block_key, st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1))


def framed(key: bytes = block_key(b"h" * 32, 3), payload: bytes = b"payload") -> bytes:
    return b"".join(encode(FINGERPRINT, key, payload))


@given(KEYS, st.binary(max_size=300))
def test_round_trip(key: bytes, payload: bytes) -> None:
    """A block would change on its way through a bundle."""
    frame = decode(framed(key, payload))
    assert (frame.fingerprint, frame.key, bytes(frame.payload)) == (FINGERPRINT, key, payload)


def test_seed_is_the_hash() -> None:
    """Another reader, following the document, would find every checksum wrong."""
    seed = int.from_bytes(b"12345678", "little")
    assert checksum(block_key(b"12345678and more", 0), b"x") == xxhash.xxh3_64_intdigest(b"x", seed=seed)
    assert checksum(block_key(b"ab", 7), b"x") == xxhash.xxh3_64_intdigest(b"x", seed=int.from_bytes(b"ab", "little"))


def test_layout_is_the_documented_one() -> None:
    """Frames written by one version would not be read by the next."""
    data = framed()
    assert struct.unpack_from("<4sBBBB32sQ", data) == (b"KVTB", 1, 0, 32, 0, FINGERPRINT, 7)
    assert data[56:92] == b"h" * 32 + b"\0\0\0\3"
    assert struct.unpack_from("<Q", data, 92)[0] == xxhash.xxh3_64_intdigest(data[:92])
    assert data[100:] == b"payload"


def test_frames_in_a_row() -> None:
    """A bundle would be read as one block."""
    first, rest = decode_first(framed(payload=b"one") + framed(payload=b"two"))
    assert bytes(first.payload) == b"one"
    assert bytes(decode(rest).payload) == b"two"
    with pytest.raises(CorruptBlock, match="follow"):
        decode(framed() + b"x")


@given(st.data())
def test_damage_is_corrupt_block(data: st.DataObject) -> None:
    """A flipped, cut or lengthened frame would be believed, or crash the reader."""
    whole = framed()
    kind = data.draw(st.sampled_from(["flip", "cut"]))
    position = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        mask = data.draw(st.integers(1, 255))
        hostile = bytearray(whole)
        hostile[position] ^= mask
    else:
        hostile = bytearray(whole[:position])
    with pytest.raises(CorruptBlock):
        decode(hostile)


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_corrupt_block(garbage: bytes, with_head: bool) -> None:
    """Bytes from a hostile remote would raise something that nobody catches."""
    with pytest.raises(CorruptBlock):
        decode(b"KVTB\1\0\x20\0" + garbage if with_head else garbage)


@given(st.integers(0, 2**64 - 1), st.integers(0, 255))
def test_consistent_lies(length: int, hash_bytes: int) -> None:
    """A head with a right check and a huge length would be trusted."""
    head = struct.pack("<4sBBBB32sQQ", b"KVTB", 1, 0, hash_bytes, 0, FINGERPRINT, length, 1) + bytes(hash_bytes + 4)
    with pytest.raises(CorruptBlock):
        decode(head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + b"not it")


def test_future_version() -> None:
    """A frame of a later version would be read by this one's rules."""
    hostile = bytearray(framed())
    hostile[4] = 2
    with pytest.raises(CorruptBlock, match="version 2"):
        decode(hostile)


def test_bad_names_are_refused() -> None:
    """A frame that no reader accepts could be written."""
    with pytest.raises(UsageError, match="fingerprint"):
        encode(b"short", block_key(b"h", 0), b"")
    with pytest.raises(UsageError, match="hash"):
        encode(FINGERPRINT, block_key(b"h" * 65, 0), b"")
