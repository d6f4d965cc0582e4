"""What tiers code with on the CPU: the bytes of the reference, in the room that is set aside for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES, LOSSY, Coding
from kvtier.kernels import exponents, quantize
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.batch_exponents import PIECE_GROUPS
from kvtier.kernels.batch_quantize import PIECE_VALUES, BatchQuantizer
from kvtier.kernels.block_coder import BlockCoder, check_head
from kvtier.kernels.coded import EXP4, coded_bytes_max
from kvtier.kernels.exponents import ESCAPE_BYTES, Layout
from tests.kernels.bit_patterns import DTYPES, bits_type, normal, specials

ROW_VALUES = 64


def values_of(bits: NDArray, dtype: str) -> NDArray:
    return bits if dtype == "bfloat16" else bits.view(dtype)


def expected(block: NDArray, coding: Coding) -> NDArray[np.uint8]:
    """The reference's coded form of one block of bits."""
    if coding.codec == "exp4":
        return exponents.encode(block, coding.dtype)
    with np.errstate(invalid="ignore"):
        rows = values_of(block.reshape(-1, coding.row_values), coding.dtype)
        return quantize.encode(rows, coding.dtype, coding.codec)


def coded(coding: Coding, blocks: NDArray, room_bytes: int) -> tuple[NDArray[np.uint8], list[int]]:
    """Coded blocks, in rows of which the end is 0xEE, and their lengths."""
    rows = np.full((len(blocks), room_bytes + 8), 0xEE, np.uint8)
    lengths = BlockCoder().encode(coding, blocks.view(np.uint8), rows[:, :room_bytes])
    assert (rows[:, room_bytes:] == 0xEE).all(), "nothing is written behind the room"
    return rows, lengths


def hostile(rng: np.random.Generator, dtype: str, values: int) -> NDArray:
    """Plain values with all the special ones among them."""
    block = normal(rng, dtype, values)
    some = specials(dtype)
    block[rng.choice(values, min(len(some), values), replace=False)] = some[: min(len(some), values)]
    return block


@pytest.mark.parametrize("codec", ["int8", "fp8", "exp4"])
@pytest.mark.parametrize("dtype", DTYPES)
# several small blocks share a piece, one is a piece, one takes three, the last of them short
@pytest.mark.parametrize("shape", [(5, 128), (2, PIECE_VALUES), (2, 2 * PIECE_VALUES + 3 * 64), (0, 128)])
def test_blocks_are_coded_as_the_reference_does(codec: str, dtype: str, shape: tuple[int, int]) -> None:
    """A tier would keep bytes that another reader, or the device, reads as other values."""
    rng = np.random.default_rng(7)
    blocks = normal(rng, dtype, *shape)
    if len(blocks):
        blocks[0] = hostile(rng, dtype, shape[1])
    coding = Coding(codec, dtype, ROW_VALUES)
    rows, lengths = coded(coding, blocks, coded_bytes_max(codec, dtype, shape[1], ROW_VALUES))
    for row, length, block in zip(rows, lengths, blocks, strict=True):
        want = expected(block, coding)
        if length == 0:
            assert codec == "exp4"
            assert want[0] != EXP4, "only what is kept raw finds no room"
            continue
        assert row[:length].tobytes() == want.tobytes()
        back = np.zeros((1, block.nbytes), np.uint8)
        assert BlockCoder().decode(coding, [row[:length]], back) == [True]
        whole = block.view(np.uint8)
        if codec in LOSSY:
            rows_back = quantize.decode(want, dtype, shape[1] // ROW_VALUES, ROW_VALUES, codec)
            whole = np.ascontiguousarray(rows_back).view(np.uint8).reshape(-1)
        assert back[0].tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
@given(st.data())
def test_any_rows_any_codes(codec: str, dtype: str, data: st.DataObject) -> None:
    """Denormals, huge rows or a scale that nobody writes would decode otherwise than on the device."""
    rows = data.draw(arrays(bits_type(dtype), st.tuples(st.integers(1, 4), st.just(6))))
    quantizer = BatchQuantizer(codec, dtype, 6)
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), "<u2")
    quantizer.encode(values_of(rows, dtype), codes, scales)
    with np.errstate(invalid="ignore"):
        want = quantize.encode(values_of(rows, dtype), dtype, codec)
    assert want[HEAD_BYTES:].tobytes() == codes.tobytes() + scales.tobytes()
    codes = data.draw(arrays(np.uint8, rows.shape))
    scales = data.draw(arrays(np.dtype("<u2"), len(rows)))
    quantizer.decode(codes, scales, values_of(rows, dtype))
    with np.errstate(invalid="ignore"):
        assert rows.tobytes() == quantize.restored(codes, scales.astype(np.uint16), dtype, codec).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_many_escapes_finds_no_room(dtype: str) -> None:
    """A block is written beyond its slot, or one that fits exactly is kept raw."""
    values = 64 * (PIECE_GROUPS + 1)
    layout = Layout.of(dtype, values)
    assert layout is not None
    block = normal(np.random.default_rng(3), dtype, values)
    block[::64] = block[
        np.argmax(values_of(block, dtype).astype(np.float64) if dtype != "bfloat16" else block & 0x7FFF)
    ]
    block[1::256] = 0  # exponents far below their groups'
    want = exponents.encode(block, dtype)
    coding = Coding("exp4", dtype, ROW_VALUES)
    for room_bytes, length in ((len(want), len(want)), (len(want) - 1, 0), (layout.escapes - 1, 0)):
        _, lengths = coded(coding, block[None], room_bytes)
        assert lengths == [length if want[0] == EXP4 else 0]
    assert want[0] == EXP4
    assert len(want) >= layout.escapes + ESCAPE_BYTES * (values // 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [64, 256, 320, 64 * 1000])
def test_the_room_holds_what_the_kernels_write(dtype: str, values: int) -> None:
    """A slot is too short for its block, or half as long again as it need be."""
    raw_bytes = values * item_bytes(dtype)
    for codec in LOSSY:
        assert Coding(codec, dtype, 64).room_bytes(raw_bytes) == coded_bytes_max(codec, dtype, values, 64)
    layout = Layout.of(dtype, values)
    assert layout is not None
    room_bytes = Coding("exp4", dtype, 64).room_bytes(raw_bytes)
    assert room_bytes == raw_bytes or layout.escapes <= room_bytes <= layout.escapes + raw_bytes // 64


@pytest.mark.parametrize("codec", ["int8", "fp8", "exp4"])
@pytest.mark.parametrize("place", range(HEAD_BYTES))
def test_a_damaged_head_is_noticed(codec: str, place: int) -> None:
    """Bytes of another codec, dtype or length are served as this block, or end in an exception of a worker."""
    coding = Coding(codec, "bfloat16", ROW_VALUES)
    block = normal(np.random.default_rng(5), "bfloat16", 64 * 64)
    rows, (length,) = coded(coding, block[None], coding.room_bytes(block.nbytes))
    row, back = rows[0], np.zeros((1, block.nbytes), np.uint8)
    assert check_head(row, codec, block.nbytes, length) == ""
    row[place] ^= 0x40
    assert BlockCoder().decode(coding, [row], back) == [False]
    if place not in (1, 2, 3, 8, 9, 10, 11):  # dtype by another of one size, rows and escapes: not in the record
        assert check_head(row, codec, block.nbytes, length)


@pytest.mark.parametrize("codec", ["int8", "exp4"])
def test_a_block_that_ends_too_soon_is_noticed(codec: str) -> None:
    """What lies behind the block in memory is read as its values."""
    coding = Coding(codec, "bfloat16", ROW_VALUES)
    block = normal(np.random.default_rng(5), "bfloat16", 64 * 64)
    rows, (length,) = coded(coding, block[None], coding.room_bytes(block.nbytes))
    back = np.zeros((3, block.nbytes), np.uint8)
    pieces = [rows[0, : length - 1], rows[0, :8], rows[0, :length]]
    assert BlockCoder().decode(coding, pieces, back) == [False, False, True]
    if codec == "exp4":
        rows[0, length - 4 : length] = 0xFF  # an escape far outside
        assert BlockCoder().decode(coding, [rows[0, :length]], back[:1]) == [length == coding.room_bytes(block.nbytes)]
