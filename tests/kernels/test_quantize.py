"""int8 and fp8: within the stated error, the same bytes from the device, and honest about what they cannot hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES
from kvtier.errors import CorruptBlock, UsageError
from kvtier.kernels import quantize
from kvtier.kernels.arrays import FORMATS
from kvtier.kernels.floats import LARGEST, e4m3_to_float, float_to_e4m3, to_float
from kvtier.kernels.quantize import CODE_LARGEST
from kvtier.kernels.reference import ReferenceKernels
from tests.kernels.bit_patterns import DTYPES, bits_type, normal, specials
from tests.kernels.emulated import EmulatedKernels
from tests.kernels.guarded import guarded

CODECS = ("int8", "fp8")
LEAST_BFLOAT16 = 2.0**-133


def values_of(bits: NDArray, dtype: str) -> NDArray:
    """Bits as the numpy type that stands for the dtype."""
    return bits if dtype == "bfloat16" else bits.view(dtype)


def exact_values(rows: NDArray, dtype: str) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return to_float(rows, dtype).astype(np.float64)


def restored(rows: NDArray, dtype: str, codec: str) -> NDArray[np.float64]:
    coded = quantize.encode(rows, dtype, codec)
    return exact_values(quantize.decode(coded, dtype, *rows.shape, codec), dtype)


def error_bounds(rows: NDArray[np.float64], dtype: str, codec: str) -> NDArray[np.float64]:
    """What the module's docstring promises, rounding to the dtype included."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scale = (largest / CODE_LARGEST[codec] * (1 + 2.0**-7) + LEAST_BFLOAT16) * (largest > 0)
    bound = scale / 2 if codec == "int8" else np.maximum(np.abs(rows) / 16, scale / 1024)
    _, _, exponent_bits, mantissa_bits = FORMATS[dtype]
    least = 2.0 ** (2 - 2 ** (exponent_bits - 1) - mantissa_bits)
    return bound + np.maximum((np.abs(rows) + bound) * 2.0 ** -(mantissa_bits + 1), least / 2) + largest * 2.0**-22


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_error_is_bounded(dtype: str, codec: str, data: st.DataObject) -> None:
    """A restored value is further off than promised: tiny and huge rows, zeroes, and values near a format's end."""
    bits = data.draw(arrays(bits_type(dtype), st.tuples(st.integers(1, 3), st.just(8))))
    rows = values_of(bits, dtype)
    exact = exact_values(rows, dtype)
    finite = np.isfinite(exact).all(axis=1)
    back = restored(rows, dtype, codec)
    assert np.isnan(back[~finite]).all(), "a row with an infinity or NaN shows it"
    assert (np.abs(back - exact) <= error_bounds(exact, dtype, codec))[finite].all()
    assert (np.abs(back[finite]) <= LARGEST[dtype]).all()


@pytest.mark.parametrize(("codec", "error_max"), [("int8", 0.0045), ("fp8", 0.032)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_kv_is_small(dtype: str, codec: str, error_max: float) -> None:
    """The scale is wrong by a factor that the bound of one value hides: root mean square error, relative."""
    rows = values_of(normal(np.random.default_rng(0), dtype, 200, 64), dtype)
    exact = exact_values(rows, dtype)
    error = np.sqrt(np.mean((restored(rows, dtype, codec) - exact) ** 2) / np.mean(exact**2))
    assert error_max / 5 < error < error_max * 2.5


@pytest.mark.parametrize(("codec", "ratio"), [("int8", 1.93), ("fp8", 1.93)])
def test_a_block_halves(codec: str, ratio: float) -> None:
    """The codec costs exactness and saves less than said: 1.94x for bfloat16 with heads of 64."""
    rows = normal(np.random.default_rng(0), "bfloat16", 1024, 64)
    assert rows.nbytes / len(quantize.encode(rows, "bfloat16", codec)) > ratio


def test_e4m3_is_torch_float8_e4m3fn() -> None:
    """fp8 codes mean something else to every other program."""
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    ours, theirs = e4m3_to_float(codes), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(ours[codes & 0x7F != 0x7F], theirs[codes & 0x7F != 0x7F])
    assert np.array_equal(np.signbit(ours), np.signbit(theirs))
    rng = np.random.default_rng(0)
    values = (rng.uniform(-448, 448, 20000) * 2.0 ** rng.integers(-20, 1, 20000)).astype(np.float32)
    values = np.concatenate([values, ours[codes & 0x7F != 0x7F], np.float32([447.9, 2**-9, 2**-10, 1.5 * 2**-9, -0.0])])
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(float_to_e4m3(values), wanted)


# ---------------------------------------------------------------- on the device


def hostile_rows(dtype: str, rows: int, row_values: int, seed: int) -> NDArray:
    """Rows of all scales, of specials, of ties between codes, of zeroes."""
    rng = np.random.default_rng(seed)
    bits = normal(rng, dtype, rows, row_values)
    strange = specials(dtype)
    finite = strange[np.isfinite(to_float(values_of(strange, dtype), dtype))]
    bits[1] = rng.choice(finite, row_values)
    bits[2, 3] = strange[6]
    bits[3, 5] = strange[8]
    bits[4] = 0
    bits[5] = rng.choice(strange[:2], row_values)
    values = values_of(bits, dtype)
    if dtype != "bfloat16":
        values[0] = np.arange(row_values) % 255 - 127 + 0.5 * (np.arange(row_values) % 2)  # the scale is near 1
    return values


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fragments", "rows", "row_values"), [(1, 6, 64), (3, 12, 96), (2, 8, 34), (1, 9, 256)])
def test_device_writes_the_same_bytes(
    device: EmulatedKernels, dtype: str, codec: str, fragments: int, rows: int, row_values: int
) -> None:
    """A block quantised on the device differs from the host's: the checksum of one would condemn the other."""
    arrays_of = [
        np.stack([hostile_rows(dtype, rows, row_values, 8 * fragment + block) for block in range(8)])
        for fragment in range(fragments)
    ]
    views = [guarded(np.zeros((8, 2 * rows, row_values), array.dtype))[:, rows:] for array in arrays_of]  # with gaps
    for view, array in zip(views, arrays_of, strict=True):
        view[:] = array
    blocks, places = np.array([7, 1, 3], np.int32), np.array([2, 0, 3], np.int32)
    room = -(-(HEAD_BYTES + fragments * rows * (row_values + 2)) // 16) * 16
    ours, theirs = np.full((4, room), 0xA5, np.uint8), guarded(np.full((4, room), 0xA5, np.uint8))
    ReferenceKernels().quantize(views, blocks, ours, places, codec)
    device.quantize(views, blocks, theirs, places, codec)
    assert np.array_equal(ours, theirs)

    results = []
    for kernels in (ReferenceKernels(), device):
        targets = [guarded(np.zeros_like(array)) for array in arrays_of]
        assert kernels.dequantize(ours, places, targets, blocks, codec) == [True] * 3
        results.append(np.stack(targets).view(bits_type(dtype)))
    assert np.array_equal(*results)
    assert results[0].any()


@pytest.mark.parametrize("codec", CODECS)
def test_foreign_heads_are_refused(device: EmulatedKernels, codec: str) -> None:
    """A block of another codec, dtype or shape is decoded as if it were ours."""
    rows = values_of(normal(np.random.default_rng(0), "float16", 6, 64), "float16")
    good = quantize.encode(rows, "float16", codec)
    coded = np.tile(np.concatenate([good, np.zeros(-len(good) % 16, np.uint8)]), (8, 1))
    for row, field in zip(coded[1:], (0, 1, 2, 4, 8, 12, 15), strict=True):
        row[field] ^= 0x1
    with pytest.raises(CorruptBlock):
        quantize.decode(coded[1], "float16", 6, 64, codec)
    everyone = np.arange(8, dtype=np.int32)
    for kernels in (ReferenceKernels(), device):
        targets = np.full((8, 6, 64), 7, np.float16)
        assert kernels.dequantize(coded, everyone, [targets], everyone, codec) == [True] + [False] * 7
        assert (targets[1:] == 7).all()


def test_rows_that_misalign_scales_are_refused() -> None:
    """Scales of two bytes would lie at odd addresses, where a device faults."""
    with pytest.raises(UsageError, match="even head_dim"):
        quantize.encode(np.zeros((4, 63), np.float32), "float32", "int8")
