"""Compiles kernels for a device with NVRTC, in memory.

Needs `cuda.bindings` and NVRTC (packages cuda-bindings and nvidia-cuda-nvrtc, or a CUDA toolkit), and no device.
Always: multiply-adds are contracted as usual, denormals are kept, divisions are exact: NVRTC's defaults, on which the
        equality of bytes with the reference rests.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError, CudaError
from kvtier.kernels.source import HEADERS, Variant, text_of

OPTIONS = ("--std=c++17",)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin of one variant, for one architecture. `warnings` is the compiler's log, empty at best."""

    variant: Variant
    architecture: str
    image: bytes
    warnings: str


@functools.cache
def compiled(variant: Variant, architecture: str) -> Compiled:
    """The variant's cubin for an architecture such as ``sm_90``. Takes 0.2 to 0.6 s; remembered by the process.

    Raises ConfigError if NVRTC cannot be loaded, and CudaError with the compiler's log if it refuses.
    """
    nvrtc = _nvrtc()
    names, headers = [name.encode() for name in HEADERS], [text_of(name).encode() for name in HEADERS]
    text = text_of(variant.file_name).encode()
    program = _call(nvrtc, "nvrtcCreateProgram", text, variant.name.encode(), len(names), headers, names)
    try:
        macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *macros)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _filled(nvrtc, "nvrtcGetProgramLog", program).rstrip(b"\0 \n").decode(errors="replace")
        if int(status):
            problem = f"{variant.name} for {architecture}: {log}"
            raise CudaError("nvrtcCompileProgram", int(status), status.name, problem)
        return Compiled(variant, architecture, _filled(nvrtc, "nvrtcGetCUBIN", program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "device", f"NVRTC cannot be loaded ({error})", "Install cuda-bindings and nvidia-cuda-nvrtc"
        ) from None
    return nvrtc


def _filled(nvrtc: Any, function: str, program: Any) -> bytes:
    """What the function writes into memory of the size that its sibling `...Size` tells."""
    content = bytes(_call(nvrtc, f"{function}Size", program))
    _call(nvrtc, function, program, content)
    return content


def _call(nvrtc: Any, function: str, *arguments: Any) -> Any:
    status, *results = getattr(nvrtc, function)(*arguments)
    if int(status):
        raise CudaError(function, int(status), status.name, "not expected of NVRTC")
    return results[0] if results else None
