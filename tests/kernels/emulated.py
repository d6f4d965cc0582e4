"""The device's kernels on the CPU: built with the emulation header, launched with arguments packed as for a device."""

import ctypes
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.kernels import launch_attention, launch_blocks
from kvtier.kernels import source as sources
from kvtier.kernels.arrays import kv_values
from kvtier.kernels.attention import Batch, PagedKv
from kvtier.kernels.fragments import Fragments
from kvtier.kernels.launch import DeviceFragments, DevicePool, Launch, fragment_records
from kvtier.kernels.launch_attention import AttentionShape, BatchOnDevice
from kvtier.kernels.source import Variant

EMULATION = pathlib.Path(__file__).parents[1] / "fakecuda"
SOURCES = pathlib.Path(sources.__file__).parent / "src"
COMPILER = ("g++", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function")


class Emulator:
    """Builds each variant once, into `folder`, and launches it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._libraries: dict[Variant, ctypes.CDLL] = {}

    def path(self, variant: Variant) -> pathlib.Path:
        """The variant's shared library."""
        path = self._folder / f"{variant.name}.so"
        if not path.exists():
            macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
            build(SOURCES / variant.file_name, path, *macros)
        return path

    def address(self, array: NDArray[Any]) -> int:
        """Where the kernels find the array: it may be used in launches while the caller keeps it."""
        return array.ctypes.data

    def run(self, launch: Launch) -> None:
        if launch.variant not in self._libraries:
            self._libraries[launch.variant] = ctypes.CDLL(str(self.path(launch.variant)))
        library = self._libraries[launch.variant]
        count = ctypes.c_int.in_dll(library, f"emu_{launch.entry}_nargs").value
        sizes = ctypes.POINTER(ctypes.c_int).in_dll(library, f"emu_{launch.entry}_sizes_p")
        assert [ctypes.sizeof(argument) for argument in launch.arguments] == sizes[:count], launch.entry
        three = ctypes.c_uint * 3
        getattr(library, f"emu_{launch.entry}")(three(*launch.grid), three(*launch.block), 0, launch.pointers())


def build(source: pathlib.Path, library: pathlib.Path, *options: str) -> None:
    done = subprocess.run(
        [*COMPILER, "-I", str(EMULATION), "-I", str(SOURCES), *options, str(source), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


class Device(Protocol):
    """Something that runs launches on numpy arrays, as `Emulator` does."""

    def address(self, array: NDArray[Any]) -> int: ...
    def run(self, launch: Launch) -> None: ...


class EmulatedKernels:
    """`kvtier.kernels.base.Kernels` through such a device."""

    def __init__(self, device: Device) -> None:
        self._at = device.address
        self._run = device.run

    def gather(self, fragments: Fragments, blocks: Any, pool: Any, slots: Any) -> None:
        table, records = self._table_of(fragments.arrays, fragments.offsets_bytes)
        self._run(launch_blocks.gather(self._pool_of(pool), self._at(slots), table, self._at(blocks), len(slots)))
        del records

    def scatter(self, pool: Any, slots: Any, fragments: Fragments, blocks: Any) -> None:
        table, records = self._table_of(fragments.arrays, fragments.offsets_bytes)
        self._run(launch_blocks.scatter(self._pool_of(pool), self._at(slots), table, self._at(blocks), len(slots)))
        del records

    def quantize(self, arrays: Sequence[Any], blocks: Any, coded_pool: Any, coded_slots: Any, codec: str) -> None:
        table, records = self._table_of(arrays, [0] * len(arrays))
        coded, places, named = self._pool_of(coded_pool), self._at(coded_slots), self._at(blocks)
        rows = {"codec": codec, "dtype": kv_values(arrays[0])[1], "row_values": arrays[0].shape[2]}
        self._run(launch_blocks.quantize(coded, places, table, named, len(blocks), **rows))
        del records

    def dequantize(
        self, coded_pool: Any, coded_slots: Any, arrays: Sequence[Any], blocks: Any, codec: str
    ) -> list[bool]:
        table, records = self._table_of(arrays, [0] * len(arrays))
        status = np.full(len(blocks), 99, np.uint32)
        coded, places, named = self._pool_of(coded_pool), self._at(coded_slots), self._at(blocks)
        rows = {"codec": codec, "dtype": kv_values(arrays[0])[1], "row_values": arrays[0].shape[2]}
        self._run(launch_blocks.dequantize(self._at(status), coded, places, table, named, len(blocks), **rows))
        del records
        return sound(status)

    def pack(self, pool: Any, slots: Any, coded_pool: Any, coded_slots: Any, dtype: str, values: int) -> None:
        places = (self._pool_of(coded_pool), self._at(coded_slots), self._pool_of(pool), self._at(slots))
        self._run(launch_blocks.pack(*places, len(slots), dtype=dtype, values=values))

    def unpack(self, coded_pool: Any, coded_slots: Any, pool: Any, slots: Any, dtype: str, values: int) -> list[bool]:
        status = np.full(len(slots), 99, np.uint32)
        places = (self._pool_of(coded_pool), self._at(coded_slots), self._pool_of(pool), self._at(slots))
        self._run(launch_blocks.unpack(self._at(status), *places, len(slots), dtype=dtype, values=values))
        return sound(status)

    def checksums(self, pool: Any, slots: Any, seeds: Any, length_bytes: int) -> NDArray[np.uint64]:
        sums = np.zeros(len(slots), np.uint64)
        pool_of, named, seeded = self._pool_of(pool), self._at(slots), self._at(seeds)
        self._run(launch_blocks.checksum(self._at(sums), pool_of, named, seeded, len(slots), length_bytes))
        return sums

    def attend(
        self, queries: Any, kv: PagedKv, batch: Batch, scale: float | None = None, split_tokens: int = 1 << 20
    ) -> tuple[Any, Any]:
        """Results of all splits, merged by the device's own kernel in float32."""
        parts, log_sums = self.attend_parts(queries, kv, batch, scale, split_tokens)
        return self.merge(parts, log_sums, "float32")

    def attend_parts(
        self, queries: Any, kv: PagedKv, batch: Batch, scale: float | None, split_tokens: int
    ) -> tuple[Any, Any]:
        dtype, (count, heads, head_dim) = kv_values(queries)[1], queries.shape
        shape = self._shape_of(kv, heads, batch, split_tokens, head_dim**-0.5 if scale is None else scale)
        here = BatchOnDevice(
            self._at(batch.query_starts),
            self._at(batch.positions),
            self._at(batch.kv_tokens),
            self._at(batch.tables),
            sequences=len(batch.positions),
            queries=count,
            queries_max=int(np.diff(batch.query_starts).max()),
            kv_tokens_max=int(batch.kv_tokens.max()),
        )
        splits = launch_attention.attend(0, 0, 0, here, shape, dtype=dtype, head_dim=head_dim).grid[2]
        out = np.full((splits, count, heads, head_dim), np.nan, np.float32)
        log_sums = np.full((splits, count, heads), np.nan, np.float32)
        self._run(
            launch_attention.attend(
                self._at(out), self._at(log_sums), self._at(queries), here, shape, dtype=dtype, head_dim=head_dim
            )
        )
        return out, log_sums

    def merge(self, parts: Any, log_sums: Any, dtype: str) -> tuple[Any, Any]:
        out = np.zeros(parts.shape[1:], "uint16" if dtype == "bfloat16" else dtype)
        merged = np.zeros(log_sums.shape[1:], np.float32)
        arrays = map(self._at, (out, merged, parts, log_sums))
        sizes = {"parts": len(parts), "rows": merged.size, "head_dim": parts.shape[-1]}
        self._run(launch_attention.merge(*arrays, **sizes, dtype=dtype))
        return out, merged

    def _pool_of(self, pool: NDArray[np.uint8]) -> DevicePool:
        return DevicePool(self._at(pool), pool.strides[0])

    def _table_of(
        self, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]
    ) -> tuple[DeviceFragments, NDArray[np.uint64]]:
        """The table, and the records that must live as long as it is used."""
        records = fragment_records(
            [self._at(array) for array in arrays], [array.strides[0] for array in arrays], offsets
        )
        fragment_bytes = arrays[0][0].nbytes
        slot_bytes = max(offsets) + fragment_bytes
        return DeviceFragments(self._at(records), len(arrays), fragment_bytes, slot_bytes), records

    def _shape_of(self, kv: PagedKv, heads: int, batch: Batch, split_tokens: int, scale: float) -> AttentionShape:
        assert kv.keys.strides == kv.values.strides
        _, block_tokens, kv_heads, _ = kv.keys.shape
        return AttentionShape(
            device_keys=self._at(kv.keys),
            host_keys=0 if kv.host_keys is None else self._at(kv.host_keys),
            keys_to_values=self._at(kv.values) - self._at(kv.keys),
            device_stride=kv.keys.strides[0],
            host_stride=0 if kv.host_keys is None else kv.host_keys.strides[0],
            token_stride=kv.keys.strides[1],
            head_stride=kv.keys.strides[2],
            table_width=batch.tables.shape[1],
            block_tokens=block_tokens,
            heads=heads,
            kv_heads=kv_heads,
            window=batch.window or 0,
            split_tokens=split_tokens,
            scale=scale,
        )


def sound(status: NDArray[np.uint32]) -> list[bool]:
    assert set(status.tolist()) <= {0, 1}
    return [bad == 0 for bad in status.tolist()]
