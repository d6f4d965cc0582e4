"""The CBOR reader: what kvtier writes and nothing else, in bounded time and memory."""

import cbor2
import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.blocks import plain_cbor

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9) | st.integers(0, 999), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_it_reads_what_the_library_writes(value):
    """A row of our own is taken for damage."""
    assert plain_cbor.loads(cbor2.dumps(value, canonical=True)) == value


@given(st.binary(max_size=60))
def test_random_bytes_end_in_a_value_or_a_value_error(data):
    """A damaged row ends in another error, or never."""
    try:
        value = plain_cbor.loads(data)
    except ValueError:
        return
    assert cbor2.loads(data) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",  # something behind it
        b"\x5b" + b"\xff" * 8,  # bytes of 2**64 - 1
        b"\x9b" + b"\xff" * 8,  # a list of so many
        b"\xbb\x00\x00\x00\xff" + b"\xff" * 4,
        b"\x9f\xff",  # endless
        b"\xc5\x82\x1a\x7f\xff\xff\xff\x01",  # a bigfloat of two gigabits
        b"\xd8\x1c\x81\xd8\x1d\x00",  # a list that holds itself
        b"\xfb" + bytes(8),  # a float
        b"\x81" * 1000 + b"\x00",  # a thousand lists in each other
        b"\xa1\x80\x00",  # a map whose key is a list
        b"\x61\xff",  # text that is no UTF-8
        b"\x1f",
        b"\xf8\x20",
    ],
)
def test_what_is_not_used_here_is_refused(data):
    """A hostile store keeps its reader busy for ever, or takes its memory."""
    with pytest.raises(ValueError):
        plain_cbor.loads(data)
