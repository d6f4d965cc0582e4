"""exp4: lossless whatever the bits are, the same bytes from the device, and harmless on damaged bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES
from kvtier.errors import CorruptBlock
from kvtier.kernels import exponents
from kvtier.kernels.coded import EXP4, RAW, CodedHead, coded_bytes_max
from kvtier.kernels.exponents import GROUP_VALUES, VALUES_MAX, Layout
from kvtier.kernels.reference import ReferenceKernels
from tests.kernels.bit_patterns import DTYPES, bits_type, normal, specials
from tests.kernels.emulated import EmulatedKernels
from tests.kernels.guarded import guarded


def kv_like(dtype: str, values: int, seed: int = 0) -> NDArray:
    """Normal values, and all special ones in the last group (an infinity makes the rest of its group escape)."""
    bits = normal(np.random.default_rng(seed), dtype, values)
    strange = specials(dtype)
    bits[-2 * len(strange) :: 2] = strange
    return bits


def with_escapes(dtype: str, values: int, escapes: int) -> NDArray:
    """Ones, and so many zeroes, each of which needs an escape."""
    one = specials(dtype)[4]
    bits = np.full(values, one)
    bits[np.random.default_rng(escapes).permutation(values)[:escapes]] = 0
    return bits


def round_trip(bits: NDArray, dtype: str) -> CodedHead:
    coded = exponents.encode(bits, dtype)
    head = CodedHead.of(coded)
    assert head.length_bytes == len(coded) <= coded_bytes_max("exp4", dtype, len(bits), 0)
    assert np.array_equal(exponents.decode(coded, dtype, len(bits)), bits)
    return head


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_any_bits_survive(dtype: str, data: st.DataObject) -> None:
    """Some pattern of bits (a NaN's payload, -0, a denormal) comes back changed."""
    bits = data.draw(arrays(bits_type(dtype), st.integers(0, 5).map(lambda groups: groups * GROUP_VALUES)))
    head = round_trip(bits, dtype)
    assert head.codec in (RAW, EXP4)
    assert head.values == len(bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_special_value_survives_among_others(dtype: str) -> None:
    """A special value beside normal ones takes the path of escapes, and is lost there."""
    bits = kv_like(dtype, 4096)
    head = round_trip(bits, dtype)
    assert head.codec == EXP4
    assert head.escapes > 0


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.30), ("float32", 1.13), ("float16", 1.05)])
def test_kv_shrinks(dtype: str, ratio: float) -> None:
    """The codec is paid for and saves nothing: its whole purpose."""
    bits = normal(np.random.default_rng(3), dtype, 64 * 256)
    assert bits.nbytes / round_trip(bits, dtype).length_bytes > ratio


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_would_not_shrink_is_raw(dtype: str) -> None:
    """A block of noise grows beyond the room set aside for it, or its head calls it packed."""
    noise = np.random.default_rng(1).integers(0, np.iinfo(bits_type(dtype)).max, 640, bits_type(dtype))
    assert round_trip(noise, dtype).codec == RAW
    assert round_trip(noise[:100], dtype).codec == RAW, "values that are no multiple of 64"


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_at_the_limit(dtype: str) -> None:
    """With one escape too many the packed form is as long as the raw one; with one less it is not."""
    layout = Layout.of(dtype, 1024)
    assert layout is not None
    packed = round_trip(with_escapes(dtype, 1024, layout.escapes_max), dtype)
    raw = round_trip(with_escapes(dtype, 1024, layout.escapes_max + 1), dtype)
    assert (packed.codec, packed.escapes) == (EXP4, layout.escapes_max)
    assert packed.length_bytes < raw.length_bytes
    assert raw.codec == RAW


def test_a_block_too_long_for_positions_is_raw() -> None:
    """A position that needs more than 24 bits would name another value."""
    assert Layout.of("bfloat16", VALUES_MAX) is None
    assert Layout.of("bfloat16", VALUES_MAX - GROUP_VALUES) is not None


# ---------------------------------------------------------------- on the device


def blocks_of(dtype: str, values: int) -> NDArray:
    """Blocks that take every path: packed, without and with escapes, at the limit, over it, noise."""
    layout = Layout.of(dtype, values)
    limit = layout.escapes_max if layout else 0
    noise = np.random.default_rng(5).integers(0, np.iinfo(bits_type(dtype)).max, values, bits_type(dtype))
    return np.stack(
        [
            normal(np.random.default_rng(4), dtype, values),
            kv_like(dtype, values),
            with_escapes(dtype, values, min(limit, values)),
            with_escapes(dtype, values, min(limit + 1, values)),
            noise,
        ]
    )


# One group, one more than the warps of a thread block take at once, several rounds, and no multiple of 64 at all.
@pytest.mark.parametrize("values", [64, 576, 2048, 4160, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_writes_the_same_bytes(device: EmulatedKernels, dtype: str, values: int) -> None:
    """A block coded on the device cannot be read by the host, or the other way round."""
    blocks = blocks_of(dtype, values)
    slots, places = np.array([4, 2, 0, 3, 1], np.int32), np.array([0, 5, 3, 1, 2], np.int32)
    pool = guarded(np.zeros((5, -(-blocks[0].nbytes // 16) * 16), np.uint8))
    pool[slots, : blocks[0].nbytes] = blocks.view(np.uint8)
    room = -(-coded_bytes_max("exp4", dtype, values, 0) // 16) * 16
    coded = guarded(np.full((6, room), 0xA5, np.uint8))
    device.pack(pool, slots, coded, places, dtype, values)
    for block, place in zip(blocks, places, strict=True):
        expected = exponents.encode(block, dtype)
        assert np.array_equal(coded[place, : len(expected)], expected)
    assert (coded[4] == 0xA5).all()

    for kernels in (device, ReferenceKernels()):
        restored = guarded(np.full_like(pool, 0x5A))
        assert kernels.unpack(coded, places, restored, slots, dtype, values) == [True] * 5
        assert np.array_equal(restored[:, : blocks[0].nbytes], pool[:, : blocks[0].nbytes])
        assert (restored[:, blocks[0].nbytes :] == 0x5A).all()


def damaged(dtype: str, values: int) -> list[NDArray[np.uint8]]:
    """Coded blocks that are none: each field of the head wrong, too many escapes, escapes outside of the block."""
    good = exponents.encode(kv_like(dtype, values), dtype)
    raw = exponents.encode(with_escapes(dtype, values, values // 2), dtype)
    assert (good[0], raw[0]) == (EXP4, RAW)
    layout = Layout.of(dtype, values)
    assert layout is not None
    found = [np.zeros_like(good)]
    for field in (0, 1, 2, 5, 9, 12):
        for coded in (good, raw):
            copy = coded.copy()
            copy[field] ^= 0x7
            found.append(copy)
    outside = good.copy()
    outside[layout.escapes : layout.escapes + 4] = 0xFF
    found.append(outside)
    crowd = CodedHead(EXP4, dtype, 0, values, layout.escapes_max + 1, layout.escapes + 4 * (layout.escapes_max + 1))
    found.append(np.concatenate([np.frombuffer(crowd.pack(), np.uint8), np.zeros(8 * values, np.uint8)]))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_is_found(device: EmulatedKernels, dtype: str) -> None:
    """Damaged bytes lead to an access outside of the block, or to values that look sound."""
    values = 4096
    cases = damaged(dtype, values)
    for case in cases:
        with pytest.raises(CorruptBlock):
            exponents.decode(case, dtype, values)
    coded = np.zeros((len(cases) + 1, 16 * values), np.uint8)
    for row, case in zip(coded, cases, strict=False):
        row[: len(case)] = case
    good = exponents.encode(kv_like(dtype, values), dtype)
    coded[-1, : len(good)] = good
    pool = guarded(np.full((len(coded), values * bits_type(dtype).itemsize), 0x5A, np.uint8))
    everyone = np.arange(len(coded), dtype=np.int32)
    wanted = [False] * len(cases) + [True]
    assert device.unpack(coded, everyone, pool, everyone, dtype, values) == wanted
    assert (pool[: len(cases) - 2] == 0x5A).all(), "a foreign head must leave the slot alone"
    assert ReferenceKernels().unpack(coded, everyone, pool, everyone, dtype, values) == wanted


def test_short_bytes_are_corrupt() -> None:
    """A coded block that was cut off is decoded from whatever lies behind it."""
    coded = exponents.encode(kv_like("bfloat16", 640), "bfloat16")
    for cut in (0, HEAD_BYTES - 1, HEAD_BYTES, len(coded) - 1):
        with pytest.raises(CorruptBlock):
            exponents.decode(coded[:cut], "bfloat16", 640)
