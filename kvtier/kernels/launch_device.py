"""DeviceLauncher: launches kernels on a device through its driver's calls.

Owns: the modules that it loaded, until `close`. Does not own the device: whoever makes it hands in the calls (anything
that takes a function's name and arguments, raises on failure and returns what the function gives out), so that nothing
of CUDA is imported before the first launch.
Always: a variant is loaded once, at its first launch or in `prepare`; compiling takes 0.2 to 0.6 s and loading waits
        for the device, so neither belongs into a hot path. The calling thread has the device's context current.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from kvtier.kernels.compiler import compiled
from kvtier.kernels.launch import Launch
from kvtier.kernels.source import Variant

Images = Callable[[Variant], bytes]


class Calls(Protocol):
    """The driver's functions by name."""

    def __call__(self, function: str, *arguments: Any) -> Any: ...


def images_for(architecture: str) -> Images:
    """Cubins for an architecture such as ``sm_90``, compiled when they are asked for; see `compiler.compiled`."""
    return partial(_image, architecture)


def _image(architecture: str, variant: Variant) -> bytes:
    return compiled(variant, architecture).image


class DeviceLauncher:
    """One caller at a time for variants that are not loaded yet; any number for the others."""

    def __init__(self, calls: Calls, images: Images) -> None:
        self._calls = calls
        self._images = images
        self._modules: dict[Variant, Any] = {}
        self._functions: dict[tuple[Variant, str], Any] = {}

    def prepare(self, variant: Variant) -> None:
        """Compile and load ahead of the first launch. Raises ConfigError without NVRTC, CudaError if it is refused."""
        if variant in self._modules:
            return
        with ExitStack() as undo:
            module = self._calls("cuModuleLoadData", self._images(variant))
            undo.callback(self._calls, "cuModuleUnload", module)
            for entry in variant.entries:
                self._functions[variant, entry] = self._calls("cuModuleGetFunction", module, entry.encode())
            undo.pop_all()
        self._modules[variant] = module

    def launch(self, launch: Launch, stream_key: int) -> None:
        """Give the launch to a stream; it has been copied when this returns, and is not over."""
        self.prepare(launch.variant)
        function = self._functions[launch.variant, launch.entry]
        pointers = launch.pointers()
        at = ctypes.addressof(pointers)
        self._calls("cuLaunchKernel", function, *launch.grid, *launch.block, 0, stream_key, at, 0)

    def close(self) -> None:
        """Unload the modules. Nothing of them may be running. Idempotent."""
        self._functions.clear()
        while self._modules:
            _, module = self._modules.popitem()
            self._calls("cuModuleUnload", module)
