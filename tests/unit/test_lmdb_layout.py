"""Rows of the index are believed only if nothing about them is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb import layout
from kvtier.types import BlockKey, block_key

PLACE = layout.PLACE_KEY.pack(3, 9)
RECORD = layout.Record(5, block_key(b"h" * 32, 1), 4097, 77, 2**63 + 1, 1_700_000_000_000)
HEADER = layout.Header(1, 1 << 20, 4096, b"s" * 16, 1_700_000_000_000, 8 << 20, "batch")

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
WHOLE = st.integers(2**19, 2**32 - 1).map(lambda pages: pages * 4096)
RECORDS = st.builds(
    layout.Record,
    u32,
    st.builds(block_key, st.binary(min_size=1, max_size=64), u32),
    st.integers(1, 2**32 - 1),
    st.integers(0, layout.GENERATION_MAX),
    u64,
    u64,
    st.none()
    | st.builds(layout.Coded, st.sampled_from(sorted(layout.CODEC_NUMBERS)), st.integers(1, 2**32 - 1), WHOLE),
).filter(lambda record: record.length_bytes <= record.stride_bytes)


@given(RECORDS, u32, u32)
def test_records_round_trip(record: layout.Record, extent: int, slot: int) -> None:
    """A block would be found under another name, or at another length."""
    place = layout.PLACE_KEY.pack(extent, slot)
    assert layout.decode_record(place, layout.encode_record(place, record)) == record


@given(RECORDS, st.data())
def test_a_record_names_its_block(record: layout.Record, data: st.DataObject) -> None:
    """An eviction would take another block's slot, or miss its own."""
    row, generation, key = layout.encode_record(PLACE, record), record.generation, record.key
    assert layout.names_block(row, generation, key)
    assert not layout.names_block(row, generation + 1, key)
    assert not layout.names_block(row, -1, key)
    other = bytearray(key)
    other[data.draw(st.integers(0, len(key) - 1))] ^= 1
    assert not layout.names_block(row, generation, BlockKey(bytes(other)))
    whole = layout.encode_record(PLACE, RECORD)
    assert not any(layout.names_block(whole[:cut], RECORD.generation, RECORD.key) for cut in range(len(whole)))


@given(st.data())
def test_a_flipped_bit_anywhere(data: st.DataObject) -> None:
    """A damaged record would send a reader to wrong bytes that happen to match."""
    row = bytearray(layout.encode_record(PLACE, RECORD))
    bit = data.draw(st.integers(0, len(row) * 8 - 1))
    row[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlock):
        layout.decode_record(PLACE, bytes(row))


def test_a_record_of_another_place() -> None:
    """A misplaced record, intact in itself, would be believed."""
    with pytest.raises(CorruptBlock):
        layout.decode_record(layout.PLACE_KEY.pack(3, 8), layout.encode_record(PLACE, RECORD))


@given(st.binary(max_size=200))
def test_garbage_rows(row: bytes) -> None:
    """Garbage in a table would raise what nobody catches."""
    decoders = (layout.decode_record, layout.decode_namespace, layout.decode_extent, layout.decode_limit)
    for decode in decoders:
        with pytest.raises(CorruptBlock):
            decode(PLACE, row)
    for read in (layout.decode_header, layout.format_of):
        with pytest.raises(CorruptBlock):
            read(row)


@given(st.binary(max_size=60))
def test_sealed_garbage(body: bytes) -> None:
    """A row with a right check and impossible content would be believed."""
    row = layout._sealed(layout.HEADER_KEY, body)
    with pytest.raises(CorruptBlock):
        layout.decode_header(row)
    with pytest.raises(CorruptBlock):
        layout.decode_record(layout.HEADER_KEY, row)


def test_headers_round_trip() -> None:
    """A store could not be opened again."""
    row = layout.encode_header(HEADER)
    assert layout.decode_header(row) == HEADER
    assert layout.format_of(row) == 1


def test_other_rows_round_trip() -> None:
    """Namespaces or size classes would be mixed up after a restart."""
    key = layout.ID_KEY.pack(9)
    assert layout.decode_namespace(key, layout.encode_namespace(9, b"f" * 32, b"d")) == (9, b"f" * 32, b"d")
    assert layout.decode_extent(key, layout.encode_extent(9, 17)) == (9, 17)
    assert layout.decode_limit(b"k", layout.encode_limit(b"k", 2**63 - 1)) == 2**63 - 1
