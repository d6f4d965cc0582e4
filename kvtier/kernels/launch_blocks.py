"""How the kernels on whole blocks are launched: gather, scatter, quantise, exp4, checksum.

One function per kernel. `slots`, `blocks`, `coded_slots` and `status` are addresses of arrays of `count` numbers on the
device (int32, status uint32); what they mean is said in `base`, what the kernels do in src/.
Units: bytes, values, counts of blocks; device addresses as integers.
"""

import ctypes

from kvtier.errors import UsageError
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.checksum import BLOCK_BYTES_LEAST
from kvtier.kernels.coded import CODECS, quantized_head, raw_head
from kvtier.kernels.launch import Arguments, DeviceFragments, DevicePool, Launch, address_of, expect_aligned
from kvtier.kernels.source import Variant, variant_of

COPY_THREADS = 128
QUANTIZE_THREADS = 128
EXPONENT_THREADS = 256
CHECKSUM_THREADS = 256


def gather(pool: DevicePool, slots: int, fragments: DeviceFragments, blocks: int, count: int) -> Launch:
    """Foreign blocks into slots. Raises UsageError where alignment or the slots' room forbid it."""
    return _copy("kv_gather", (*_place(pool, slots), *_foreign(fragments, blocks)), pool, fragments, count)


def scatter(pool: DevicePool, slots: int, fragments: DeviceFragments, blocks: int, count: int) -> Launch:
    """Slots into foreign blocks."""
    return _copy("kv_scatter", (*_foreign(fragments, blocks), *_place(pool, slots)), pool, fragments, count)


def quantize(
    coded: DevicePool,
    coded_slots: int,
    fragments: DeviceFragments,
    blocks: int,
    count: int,
    *,
    codec: str,
    dtype: str,
    row_values: int,
) -> Launch:
    """Foreign blocks as int8 or fp8 into coded slots."""
    rows = _fragment_rows(coded, fragments, codec, dtype, row_values)
    arguments: Arguments = [*_place(coded, coded_slots), *_foreign(fragments, blocks), *_numbers(rows, row_values)]
    return _by_fragment(f"kv_quantize_{codec}", dtype, count, fragments, arguments)


def dequantize(
    status: int,
    coded: DevicePool,
    coded_slots: int,
    fragments: DeviceFragments,
    blocks: int,
    count: int,
    *,
    codec: str,
    dtype: str,
    row_values: int,
) -> Launch:
    """Coded slots into foreign blocks; status [count] becomes 0 where the head was sound, else 1."""
    rows = _fragment_rows(coded, fragments, codec, dtype, row_values)
    places = (*_foreign(fragments, blocks), *_place(coded, coded_slots))
    arguments: Arguments = [address_of(status), *places, *_numbers(rows, row_values)]
    return _by_fragment(f"kv_dequantize_{codec}", dtype, count, fragments, arguments)


def _by_fragment(entry: str, dtype: str, count: int, fragments: DeviceFragments, arguments: Arguments) -> Launch:
    """A thread block for each fragment of each block."""
    grid = (count, fragments.count, 1)
    return Launch(variant_of("quantize", dtype), entry, grid, (QUANTIZE_THREADS, 1, 1), arguments)


def pack(
    coded: DevicePool, coded_slots: int, pool: DevicePool, slots: int, count: int, *, dtype: str, values: int
) -> Launch:
    """Slots, losslessly, into coded slots."""
    variant = _exponents(coded, pool, dtype, values)
    arguments: Arguments = [*_place(coded, coded_slots), *_place(pool, slots), *_numbers(values)]
    return Launch(variant, "kv_exp4_encode", (count, 1, 1), (EXPONENT_THREADS, 1, 1), arguments)


def unpack(
    status: int,
    coded: DevicePool,
    coded_slots: int,
    pool: DevicePool,
    slots: int,
    count: int,
    *,
    dtype: str,
    values: int,
) -> Launch:
    """Coded slots back into slots; status [count] becomes 0 where the block was sound, else 1."""
    variant = _exponents(coded, pool, dtype, values)
    places = (*_place(pool, slots), *_place(coded, coded_slots))
    arguments: Arguments = [address_of(status), *places, *_numbers(values)]
    return Launch(variant, "kv_exp4_decode", (count, 1, 1), (EXPONENT_THREADS, 1, 1), arguments)


def checksum(sums: int, pool: DevicePool, slots: int, seeds: int, count: int, length_bytes: int) -> Launch:
    """xxh3_64 of the first `length_bytes` of each slot: sums [count] from seeds [count], both uint64."""
    pool.expect_room(length_bytes)
    expect_aligned(length_bytes=length_bytes)
    if length_bytes < BLOCK_BYTES_LEAST:
        raise UsageError(f"a checksum of {length_bytes} bytes; the device has it from {BLOCK_BYTES_LEAST} bytes on")
    arguments = (address_of(sums), *_place(pool, slots), address_of(seeds), address_of(length_bytes))
    return Launch(variant_of("checksum"), "kv_checksum", (count, 1, 1), (CHECKSUM_THREADS, 1, 1), arguments)


def _copy(
    entry: str, places: tuple[ctypes.c_uint64, ...], pool: DevicePool, fragments: DeviceFragments, count: int
) -> Launch:
    pool.expect_room(fragments.slot_bytes)
    expect_aligned(fragment_bytes=fragments.fragment_bytes)
    arguments = (*places, address_of(fragments.fragment_bytes))
    return Launch(variant_of("fragments"), entry, (count, fragments.count, 1), (COPY_THREADS, 1, 1), arguments)


def _fragment_rows(coded: DevicePool, fragments: DeviceFragments, codec: str, dtype: str, row_values: int) -> int:
    row_bytes = row_values * item_bytes(dtype)
    if codec not in ("int8", "fp8") or fragments.fragment_bytes % row_bytes:
        raise UsageError(f"{codec} of fragments of {fragments.fragment_bytes} bytes in rows of {row_bytes}")
    rows = fragments.fragment_bytes // row_bytes
    head = quantized_head(CODECS[codec], dtype, rows * fragments.count, row_values)
    head.pack()  # refuses what is too long
    coded.expect_room(head.length_bytes)
    return rows


def _exponents(coded: DevicePool, pool: DevicePool, dtype: str, values: int) -> Variant:
    block_bytes = values * item_bytes(dtype)
    head = raw_head(dtype, values)
    head.pack()
    pool.expect_room(block_bytes)
    coded.expect_room(head.length_bytes)
    expect_aligned(block_bytes=block_bytes)
    return variant_of("exponents", dtype)


def _place(pool: DevicePool, slots: int) -> tuple[ctypes.c_uint64, ...]:
    return address_of(pool.address), address_of(pool.stride_bytes), address_of(slots)


def _foreign(fragments: DeviceFragments, blocks: int) -> tuple[ctypes.c_uint64, ...]:
    return address_of(fragments.records_address), address_of(blocks)


def _numbers(*counts: int) -> list[ctypes.c_uint32]:
    return [ctypes.c_uint32(count) for count in counts]
