"""CudaCalls: the CUDA driver's functions, and what their results mean to us.

Owns: the loaded bindings, the names of errors, and pointers to functions that are called with arrays. Nothing is loaded
before the first `CudaCalls()`; without the package or the driver it raises ConfigError.
Always:  every CUresult but success raises a CudaError with call, code and name; or, with that as its cause, OutOfMemory
         for the lack of it, and DeviceLost for an error after which the context serves nobody any more.

The bindings take 0.2 us a call, but 460 us to turn 1024 Python integers into the arrays of one batch, against 23 us by
a function pointer and numpy arrays: hence `pointer`.
"""

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from kvtier.errors import ConfigError, CudaError, DeviceLost, KvtierError, OutOfMemory

OUT_OF_MEMORY = 2
NOT_READY = 600
# cuda.h says of each: "the context cannot be used", or "the process must be terminated and relaunched".
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721})
DEVICE = "device"  # where a configuration asks for CUDA


class CudaCalls:
    """Functions by name: ``calls("cuMemUnmap", address, length)`` returns what the function gives out, or raises."""

    def __init__(self) -> None:
        """Load the bindings and initialise the driver."""
        self.driver = _bindings()
        try:
            self("cuInit", 0)
        except RuntimeError as error:  # the bindings find no libcuda.so.1
            raise ConfigError(DEVICE, f"no CUDA driver ({error})", "Install one, or use device: host") from None

    def __call__(self, function: str, *arguments: Any) -> Any:
        """The function's value, a tuple if there are several, None if there is none."""
        code, *values = getattr(self.driver, function)(*arguments)
        self.expect_success(function, int(code))
        if len(values) == 1:
            return values[0]
        return tuple(values) if values else None

    def is_ready(self, function: str, *arguments: Any) -> bool:
        """Of a query: False while it says "not ready"."""
        code = int(getattr(self.driver, function)(*arguments)[0])
        if code == NOT_READY:
            return False
        self.expect_success(function, code)
        return True

    def expect_success(self, function: str, code: int) -> None:
        """Raises what the result means."""
        if code:
            raise self.error(function, code)

    def error(self, function: str, code: int) -> KvtierError:
        """The typed error for a result that is not success."""
        cause = CudaError(function, code, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))
        typed: KvtierError = cause
        if code == OUT_OF_MEMORY:
            typed = OutOfMemory(str(cause))
        elif code in STICKY:
            typed = DeviceLost(f"{cause}; every CUDA user of this process has to start anew")
        if typed is not cause:
            typed.__cause__ = cause
        return typed

    def pointer(self, function: str, version: int, *argument_types: Any) -> Callable[..., int] | None:
        """The function as of a CUDA version, called with plain memory and returning its CUresult; None if absent."""
        code, address, _ = self.driver.cuGetProcAddress(function.encode(), version, 0)
        if int(code) or not address:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(address))

    def _text(self, function: str, code: int) -> str:
        """What CUDA calls an error. A code that the bindings don't know has no name."""
        try:
            found, text = getattr(self.driver, function)(self.driver.CUresult(code))
        except ValueError:
            return "unknown"
        return "unknown" if int(found) or not text else text.decode()


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            DEVICE, f"CUDA needs the package cuda-bindings ({error})", "Install kvtier[gpu], or use device: host"
        ) from None
