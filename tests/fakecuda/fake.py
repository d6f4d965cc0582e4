"""The fake libcuda: built once per session with gcc, loaded in front of the bindings, and steered by tests.

A test takes the fixture `fake_cuda` (import it) and makes drivers as on a machine with a device. What streams do is
ordered by vector clocks, so a breach of order fails in the call that makes it, whatever the threads happen to do:
DeviceLost is raised, and `report` names the breach.
"""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent
GRANULE_BYTES = 64 << 10
CAPACITY_GRANULES = 16

_SIGNATURES = {
    "calls": (ctypes.c_long, [ctypes.c_char_p]),
    "fault": (None, [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]),
    "stick": (None, [ctypes.c_int]),
    "copy_model": (None, [ctypes.c_double, ctypes.c_long]),
    "configure": (None, [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]),
    "hide": (None, [ctypes.c_char_p]),
    "attribute": (None, [ctypes.c_int, ctypes.c_int]),
    "reset": (None, []),
    "report": (ctypes.c_char_p, []),
    "host_access": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]),
    "hold": (None, [ctypes.c_void_p, ctypes.c_int]),
    "touch": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]),
    "launch_touches": (None, [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]),
    "context_owners": (ctypes.c_int, []),
    "used": (ctypes.c_size_t, []),
}


class FakeCuda:
    """What tests ask of the library and do to it. Lengths in bytes; streams by their key, 0 for all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"fakecu_{name}")
            function.restype, function.argtypes = result, arguments

    def reset(self) -> None:
        """No faults, delays, holds, streams; everything that was done is known to be over."""
        self._library.fakecu_reset()

    def configure(
        self, capacity_bytes: int, granule_bytes: int, *, strict: bool = False, read_only: bool = True
    ) -> None:
        """Another device. strict: device memory faults when the CPU touches it. Nothing may be in use."""
        assert self.used_bytes == 0
        self._library.fakecu_configure(capacity_bytes, granule_bytes, strict, read_only)

    def calls(self, function: str) -> int:
        """How often the library's function was called since the reset."""
        return int(self._library.fakecu_calls(function.encode()))

    def fault(self, function: str, code: int, *, nth: int = 1) -> None:
        """The n-th call from now on fails with a CUresult, once; with 0 every call does."""
        self._library.fakecu_fault(function.encode(), nth, code)

    def lose(self, code: int = 700) -> None:
        """A sticky error, as after a kernel that went astray."""
        self._library.fakecu_stick(code)

    def slow_copies(self, gigabytes_per_s: float, latency_us: int = 0) -> None:
        self._library.fakecu_copy_model(gigabytes_per_s, latency_us)

    def hide(self, function: str) -> None:
        """A driver that lacks a function."""
        self._library.fakecu_hide(function.encode())

    def set_attribute(self, attribute: int, value: int) -> None:
        """A device that answers otherwise to `cuDeviceGetAttribute`."""
        self._library.fakecu_attribute(attribute, value)

    def hold(self, stream_key: int = 0) -> None:
        """Carry nothing out for now: what is given to the stream stays pending. No waiting for it, or it hangs."""
        self._library.fakecu_hold(stream_key, 1)

    def go_on(self, stream_key: int = 0) -> None:
        """The end of `hold`."""
        self._library.fakecu_hold(stream_key, 0)

    def kernel(self, stream_key: int, address: int, length_bytes: int, *, writes: bool) -> int:
        """A kernel that uses this memory; no bytes move. Returns its CUresult."""
        return int(self._library.fakecu_touch(stream_key, address, length_bytes, writes))

    def host_access(self, address: int, length_bytes: int, *, writes: bool) -> int:
        """State that the CPU uses this memory now. Returns a CUresult: not 0 if a stream may be at it."""
        return int(self._library.fakecu_host_access(address, length_bytes, writes))

    def launch_touches(self, address: int, length_bytes: int, *, writes: bool) -> None:
        """State what the next launch is going to use."""
        self._library.fakecu_launch_touches(address, length_bytes, writes)

    @property
    def report(self) -> str:
        """The first breach of order since the reset, or an empty text."""
        return str(self._library.fakecu_report().decode())

    @property
    def used_bytes(self) -> int:
        """Physical memory that exists."""
        return int(self._library.fakecu_used())

    @property
    def context_owners(self) -> int:
        """How often the primary context is held."""
        return int(self._library.fakecu_context_owners())


def build(folder: Path) -> Path:
    """The library, made by gcc; under 2 s."""
    library = folder / "libcuda.so.1"
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    subprocess.run(["gcc", *flags, "-Wl,-soname,libcuda.so.1", "-o", str(library), *sources, "-ldl"], check=True)
    return library


@functools.cache
def load() -> FakeCuda | str:
    """The library of this session, or why there is none."""
    if shutil.which("gcc") is None:
        return "the fake libcuda is built by gcc, which is not here"
    folder = Path(tempfile.mkdtemp(prefix="kvtier-fakecuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fake = FakeCuda(build(folder))
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings is not installed"
    driver.cuInit(0)
    return fake if fake.calls("cuInit") else "a real CUDA driver was loaded before the fake one"


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """A small device of its own for each test; afterwards nothing may be left on it."""
    fake = load()
    if isinstance(fake, str):
        pytest.skip(fake)
    fake.reset()
    fake.configure(CAPACITY_GRANULES * GRANULE_BYTES, GRANULE_BYTES)
    context_owners = fake.context_owners
    yield fake
    assert fake.context_owners == context_owners, "a driver was not closed"
    fake.reset()
    assert fake.used_bytes == 0, "memory was not given back"
