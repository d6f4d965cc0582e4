"""CudaDevice: one device as virtual memory management sees it.

Owns: a hold on the device's primary context (the one that torch, CuPy and the engine's own code use), and the
descriptions of memory and access that calls want. Asks the device what it can do, and never assumes it.
Always:  the thread that made it has the context current; others have to ask for it.
Units:   bytes.
"""

from contextlib import ExitStack
from typing import Any

from kvtier.allocator.cuda_calls import DEVICE, CudaCalls
from kvtier.errors import ConfigError, CudaError, DriverError

INVALID_VALUE, NOT_SUPPORTED = 1, 801
REMEDY = "Use another one, or device: host"


class CudaDevice:
    """Device number `number`. `share`: its memory can be handed to other processes."""

    def __init__(self, number: int, *, share: bool) -> None:
        """Take hold of it. Raises ConfigError if it is not there, or cannot do this."""
        self.number = number
        self.calls = CudaCalls()
        self._api = self.calls.driver
        with ExitStack() as undo:
            try:
                self._device = self.calls("cuDeviceGet", number)
                self._expect_abilities(share)
                self.context = self.calls("cuDevicePrimaryCtxRetain", self._device)
                undo.callback(self.release)
                self.calls("cuCtxSetCurrent", self.context)
            except CudaError as error:
                raise ConfigError(DEVICE, f"device {number}: {error}", REMEDY) from error
            self.fd_type = self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self.memory = self._describe_memory(share)
            smallest = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            self.granule_bytes = int(self.calls("cuMemGetAllocationGranularity", self.memory, smallest))
            flags = self._api.CUmemAccess_flags
            self.for_writing = [self._describe_access(flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)]
            self._for_reading = [self._describe_access(flags.CU_MEM_ACCESS_FLAGS_PROT_READ)]
            undo.pop_all()

    @property
    def architecture(self) -> str:
        """What kernels are compiled for, such as ``sm_90``."""
        kinds = self._api.CUdevice_attribute
        wanted = (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (int(self.calls("cuDeviceGetAttribute", kind, self._device)) for kind in wanted)
        return f"sm_{major}{minor}"

    @property
    def reads_host_addresses(self) -> bool:
        """Whether registered host memory has one address, for the device and for the CPU."""
        kind = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        return bool(self.calls("cuDeviceGetAttribute", kind, self._device))

    def granule_of(self, wanted_bytes: int | None) -> int:
        """The granule to use: the device's own, or what is wanted. Raises DriverError if it cannot be had."""
        if wanted_bytes is None:
            return self.granule_bytes
        times, rest = divmod(wanted_bytes, self.granule_bytes)
        if rest or times < 1 or times & (times - 1):  # addresses can be aligned to powers of two only
            raise DriverError(
                "granule", INVALID_VALUE, f"{wanted_bytes} is not {self.granule_bytes} times a power of two"
            )
        return wanted_bytes

    def makes_read_only(self, address: int, length_bytes: int) -> bool:
        """Make mapped memory read-only. False if the device knows no such thing."""
        try:
            self.calls("cuMemSetAccess", address, length_bytes, self._for_reading, 1)
        except CudaError as error:
            if error.code in (INVALID_VALUE, NOT_SUPPORTED):
                return False
            raise
        return True

    def release(self) -> None:
        """Let go of the context. Others who hold it keep it."""
        self.calls("cuDevicePrimaryCtxRelease", self._device)

    def _expect_abilities(self, share: bool) -> None:
        kinds = self._api.CUdevice_attribute
        wanted = {"virtual memory management": kinds.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED}
        if share:
            wanted["shared memory"] = kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        for name, kind in wanted.items():
            if not self.calls("cuDeviceGetAttribute", kind, self._device):
                raise ConfigError(DEVICE, f"device {self.number} has no {name}", REMEDY)

    def _describe_memory(self, share: bool) -> Any:
        described = self._api.CUmemAllocationProp()
        described.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        described.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        described.location.id = self.number
        if share:
            described.requestedHandleTypes = self.fd_type
        return described

    def _describe_access(self, flag: Any) -> Any:
        described = self._api.CUmemAccessDesc()
        described.location = self.memory.location
        described.flags = flag
        return described
