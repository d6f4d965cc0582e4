"""The emulation itself: it stops at what a device would hang on, shows races, and rounds halves as the device does."""

import ctypes
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.kernels.emulated import Emulator, build

KERNEL = """
#include "cuda_emu.h"
extern "C" __global__ void probe(int* out) {{
    int me = threadIdx.x;
    out[me] = 0;
    {body}
}}
CUDA_EMU_EXPORT(probe)
extern "C" float to_float(unsigned short half) {{ return emu_half_to_float(half); }}
extern "C" unsigned short to_half(float value) {{ return emu_float_to_half(value); }}
"""

RUN = """
import ctypes, sys
out, three = (ctypes.c_int * 64)(), ctypes.c_uint * 3
argument = ctypes.c_uint64(ctypes.addressof(out))
arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
ctypes.CDLL(sys.argv[1]).emu_probe(three(1, 1, 1), three(64, 1, 1), 0, arguments)
print(*out)
"""


def run(folder: pathlib.Path, body: str, reverse: str = "0") -> subprocess.CompletedProcess[str]:
    """In a process of its own: what the emulation refuses ends it."""
    source, library = folder / "probe.cu", folder / "probe.so"
    source.write_text(KERNEL.format(body=body))
    build(source, library)
    return subprocess.run(
        [sys.executable, "-c", RUN, str(library)], capture_output=True, text=True, env={"EMU_REVERSE": reverse}
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("if (me < 32) __syncthreads(); else __syncwarp();", "a barrier of the thread block that some threads"),
        ("if (me == 3) { return; } __syncthreads();", "a barrier of the thread block that some threads"),
        ("if (me == 3) { __syncthreads(); } __syncwarp();", "a barrier that not all threads reach"),
        ("if (me % 2) __syncwarp(); else out[me] = __shfl_xor_sync(~0u, me, 1);", "lanes of a warp at different"),
    ],
)
def test_divergence_is_fatal(emulator: Emulator, tmp_path: pathlib.Path, body: str, problem: str) -> None:
    """A kernel that would hang a device passes all tests."""
    done = run(tmp_path, body)
    assert done.returncode == -6
    assert f"cuda_emu: {problem}" in done.stderr


def test_a_missing_barrier_shows(emulator: Emulator, tmp_path: pathlib.Path) -> None:
    """A race passes in both orders."""
    write, read = "__shared__ int shared[64]; shared[me] = me;", "out[me] = shared[(me + 1) % 64];"
    right = [(me + 1) % 64 for me in range(64)]

    def results(body: str) -> list[bool]:
        return [[int(word) for word in run(tmp_path, body, order).stdout.split()] == right for order in "01"]

    assert results(f"{write} __syncthreads(); {read}") == [True, True]
    assert False in results(f"{write} {read}")


def test_warp_operations(emulator: Emulator, tmp_path: pathlib.Path) -> None:
    """A shuffle or ballot reads another lane than the device's, or another warp."""
    body = """
    int low = __shfl_sync(~0u, me, 5), across = __shfl_xor_sync(~0u, me, 3), down = __shfl_down_sync(~0u, me, 4);
    int up = __shfl_up_sync(~0u, me, 2);
    unsigned odd = __ballot_sync(~0u, me % 2 && me != 33);
    out[me] = low + 100 * (across ^ me) + 1000 * (down - me) + 10000 * (me - up) + 1000000 * __popc(odd);
    """
    words = [int(word) for word in run(tmp_path, body).stdout.split()]
    for me, word in enumerate(words):
        lane, warp = me % 32, me // 32
        expected = 32 * warp + 5 + 300 + 1000 * (4 if lane < 28 else 0) + 10000 * (2 if lane >= 2 else 0)
        assert word == expected + 1000000 * (16 - warp)


def test_halves_are_ieee(emulator: Emulator, tmp_path: pathlib.Path) -> None:
    """float16 kernels are tested against a float16 of the emulation's own."""
    run(tmp_path, "")
    library = ctypes.CDLL(str(tmp_path / "probe.so"))
    library.to_float.restype, library.to_half.restype = ctypes.c_float, ctypes.c_ushort
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        exact = halves.view(np.float16).astype(np.float32)
    ours = np.array([library.to_float(int(half)) for half in halves], np.float32)
    assert np.array_equal(ours, exact, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(exact))

    between = exact[np.isfinite(exact)]
    values = np.concatenate(
        [between, between * np.float32(1 + 2**-11), between * np.float32(1 + 2**-12), [65519.9, 65520]]
    )
    values = np.concatenate([values, between + np.float32(2**-25), np.float32([1e-8, 1e9, np.inf, -np.inf])])
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float32).astype(np.float16)
    narrow = np.array([library.to_half(ctypes.c_float(value)) for value in values.astype(np.float32)], np.uint16)
    assert np.array_equal(narrow, wanted.view(np.uint16))
    assert library.to_half(ctypes.c_float(np.nan)) & 0x7FFF > 0x7C00
