"""Packing of launches: what the kernels cannot do is refused on the host, with numbers."""

import ctypes
import re

import numpy as np
import pytest

from kvtier.errors import UsageError
from kvtier.kernels import launch_attention, launch_blocks
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.coded import coded_bytes_max, raw_head
from kvtier.kernels.launch import DeviceFragments, DevicePool, Launch, fragment_records
from kvtier.kernels.launch_attention import AttentionShape, BatchOnDevice, split_tokens_for
from kvtier.kernels.source import SOURCES, text_of, variant_of, variants

POOL = DevicePool(1 << 20, 4096)
FRAGMENTS = DeviceFragments(64, 2, 2048, 4096)


def refused(problem: str) -> "pytest.RaisesExc[UsageError]":
    return pytest.raises(UsageError, match=re.escape(problem))


def test_grid_is_what_a_device_takes() -> None:
    """A launch of nothing, or of too much, is an error of the driver, which may be sticky."""
    with refused("kv_gather: 0 thread blocks along x"):
        launch_blocks.gather(POOL, 0, FRAGMENTS, 0, 0)
    with refused("kv_checksum: 2147483648 thread blocks along x; launch 1 to 2147483647"):
        launch_blocks.checksum(0, POOL, 0, 0, 2**31, 1024)
    with refused("kv_gather: 65536 thread blocks along y"):
        launch_blocks.gather(DevicePool(0, 1 << 30), 0, DeviceFragments(0, 65536, 16, 1 << 20), 0, 1)


def test_blocks_must_fit_their_slots() -> None:
    """A kernel writes into the next slot."""
    with refused("blocks of 4128 bytes in slots of 4096"):
        launch_blocks.gather(POOL, 0, DeviceFragments(0, 2, 2048, 4128), 0, 1)
    with refused("blocks of 4112 bytes in slots of 4096"):
        launch_blocks.pack(POOL, 0, POOL, 0, 1, dtype="bfloat16", values=2048)
    with refused("blocks of 4112 bytes in slots of 4096"):
        launch_blocks.checksum(0, POOL, 0, 0, 1, 4112)
    room = coded_bytes_max("int8", "bfloat16", 2048, 64)
    launch_blocks.quantize(DevicePool(0, room), 0, FRAGMENTS, 0, 1, codec="int8", dtype="bfloat16", row_values=64)
    short = DevicePool(0, room - 16)
    with refused(f"blocks of {room} bytes in slots of {room - 16}"):
        launch_blocks.dequantize(0, short, 0, FRAGMENTS, 0, 1, codec="fp8", dtype="bfloat16", row_values=64)


def test_alignment_is_checked() -> None:
    """A device faults on a load of 16 bytes from elsewhere; the error is sticky and ends the engine."""
    with refused("stride_bytes 4100: kernels need a multiple of 16 bytes"):
        launch_blocks.gather(DevicePool(0, 4100), 0, FRAGMENTS, 0, 1)
    with refused("address 8"):
        launch_blocks.checksum(0, DevicePool(8, 4096), 0, 0, 1, 1024)
    with refused("fragment_bytes 2040"):
        launch_blocks.gather(POOL, 0, DeviceFragments(0, 2, 2040, 4080), 0, 1)
    with refused("length_bytes 1001"):
        launch_blocks.checksum(0, POOL, 0, 0, 1, 1001)
    with refused("block_bytes 200"):
        launch_blocks.pack(POOL, 0, POOL, 0, 1, dtype="float16", values=100)
    for name, numbers in (("address", (8, 16, 16)), ("stride_bytes", (16, 8, 16)), ("offset_bytes", (16, 16, 8))):
        with refused(f"{name} 8"):
            fragment_records(*([number] for number in numbers))


def test_what_has_no_kernel_is_refused() -> None:
    """The compiler's error, or a wrong result, instead of a sentence."""
    with refused("kernels for dtype 'float8_e4m3'"):
        variant_of("exponents", "float8_e4m3")
    with refused("attention for head_dim 80; there is one for 64, 96, 128, 192, 256"):
        variant_of("attention", "float16", 80)
    with refused("dtype 'int4' has no kernels"):
        item_bytes("int4")
    with refused("exp4 of fragments of 2048 bytes in rows of 128"):
        launch_blocks.quantize(POOL, 0, FRAGMENTS, 0, 1, codec="exp4", dtype="float16", row_values=64)
    with refused("int8 of fragments of 2048 bytes in rows of 120"):
        launch_blocks.quantize(POOL, 0, FRAGMENTS, 0, 1, codec="int8", dtype="float16", row_values=60)
    with refused("a checksum of 240 bytes; the device has it from 256 bytes on"):
        launch_blocks.checksum(0, POOL, 0, 0, 1, 240)
    with refused("a coded block of 4294967312 bytes"):
        raw_head("float32", 1 << 30).pack()


def test_pointers_lead_to_the_arguments() -> None:
    """A driver reads other numbers than were packed."""
    launch = launch_blocks.checksum(11, POOL, 22, 33, 5, 1024)
    found = [ctypes.c_uint64.from_address(pointer or 0).value for pointer in launch.pointers()]
    assert found == [11, POOL.address, POOL.stride_bytes, 22, 33, 1024]


def test_records_are_rows() -> None:
    """Kernels read an address where the table has a stride."""
    records = fragment_records([16, 32], [48, 64], [0, 80])
    assert records.tolist() == [[16, 48, 0], [32, 64, 80]]
    assert records.flags.c_contiguous
    assert records.dtype == np.uint64


# ---------------------------------------------------------------- attention


def shape(**changes: int) -> AttentionShape:
    numbers = {"device_stride": 4096, "token_stride": 256, "head_stride": 128, "heads": 8, "kv_heads": 2}
    return AttentionShape(**{**numbers, "keys_to_values": 2048, "split_tokens": 256, **changes})


def batch(**changes: int) -> BatchOnDevice:
    numbers = {"query_starts": 1, "positions": 2, "kv_tokens": 3, "tables": 4, "sequences": 3, "queries": 5}
    return BatchOnDevice(**{**numbers, "queries_max": 3, "kv_tokens_max": 1000, **changes})


def attend(of: BatchOnDevice, to: AttentionShape) -> Launch:
    return launch_attention.attend(0, 0, 0, of, to, dtype="bfloat16", head_dim=64)


def test_grid_covers_rows_and_splits() -> None:
    """Rows or tokens beyond the grid are silently left out."""
    assert attend(batch(), shape()).grid == (2, 6, 4)  # 3 queries * 4 grouped heads in tiles of 8; 1000 tokens by 256
    assert attend(batch(queries_max=2), shape()).grid == (1, 6, 4)
    assert attend(batch(), shape(window=250)).grid == (2, 6, 2)  # eight rows may start at eight queries: 257 tokens
    assert attend(batch(), shape(window=249)).grid == (2, 6, 1)
    assert attend(batch(kv_tokens_max=0), shape()).grid == (2, 6, 1)  # writes "saw nothing"


def test_splits_keep_a_device_busy() -> None:
    """One long sequence runs on a handful of multiprocessors, or short ones are cut to crumbs."""
    long = batch(sequences=1, queries_max=1, kv_tokens_max=131072)
    tokens = split_tokens_for(long, shape(), multiprocessors=132)
    assert tokens % launch_attention.TILE_TOKENS == 0
    assert 240 <= attend(long, shape(split_tokens=tokens)).grid[2] * 2 <= 264
    assert split_tokens_for(batch(sequences=512), shape(), multiprocessors=132) >= 1000
    assert split_tokens_for(batch(sequences=1), shape(), 132) == launch_attention.SPLIT_TOKENS_LEAST


def test_shapes_that_cannot_be_are_refused() -> None:
    """A head without KV, or a split that cuts a tile, reads out of bounds."""
    with refused("8 heads over 3 KV heads"):
        attend(batch(), shape(kv_heads=3))
    with refused("0 heads over 2 KV heads"):
        attend(batch(), shape(heads=0))
    with refused("8 heads over 0 KV heads"):
        attend(batch(), shape(kv_heads=0))
    for tokens in (0, 100):
        with refused(f"splits of {tokens} tokens; use a multiple of 32"):
            attend(batch(), shape(split_tokens=tokens))
    for name in (
        "device_keys",
        "host_keys",
        "keys_to_values",
        "device_stride",
        "host_stride",
        "token_stride",
        "head_stride",
    ):
        with refused(f"{name} 24"):
            attend(batch(), shape(**{name: 24}))


def constant(source: str, name: str) -> int:
    found = re.search(rf"^#define {name} (\d+)", text_of(source), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_constants_agree_with_the_sources() -> None:
    """Grid and kernel count rows, tiles or threads differently."""
    assert constant("attention.cu", "ROWS") == launch_attention.ROWS
    assert constant("attention.cu", "TILE_TOKENS") == launch_attention.TILE_TOKENS
    assert constant("attention.cu", "WARPS") * 32 == launch_attention.THREADS
    assert constant("quantize.cu", "WARPS") * 32 == launch_blocks.QUANTIZE_THREADS
    assert constant("exponents.cu", "WARPS") * 32 == launch_blocks.EXPONENT_THREADS
    assert constant("checksum.cu", "LANES") * constant("checksum.cu", "TILE_CHUNKS") == launch_blocks.CHECKSUM_THREADS


def test_sources_and_table_agree() -> None:
    """A kernel in the sources that the table leaves out cannot be loaded, or the other way round."""
    for source, (entries, *_) in SOURCES.items():
        exported = re.findall(r"^CUDA_EMU_EXPORT\((\w+)\)", text_of(f"{source}.cu"), re.MULTILINE)
        assert tuple(exported) == entries
    assert len({variant.name for variant in variants()}) == len(variants()) == 23
