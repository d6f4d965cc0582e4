"""How copies for foreign caches on a device are made ready: memory registered, kernels loaded, ways measured.

The order is visible here and nowhere else. Always: what was opened goes with the `ExitStack` that is given; what can be
had only in part is in `notes`, and said once.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.lending import lent_pinned
from kvtier.clock import Clock
from kvtier.errors import DriverError, UsageError
from kvtier.kernels.launch_device import Images
from kvtier.notices import say_once
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.calibration import WAYS
from kvtier.tiers.foreign.copies import NAME, ForeignCopies
from kvtier.tiers.foreign.kernel_kit import KernelKit
from kvtier.tiers.foreign.places import HostPlaces

log = logging.getLogger("kvtier")
ALREADY_REGISTERED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: somebody else's registration serves as well


def opened_on(
    driver: CudaDriver,
    caches: Sequence[ForeignCache],
    host: HostPlaces,
    *,
    clock: Clock,
    images: Images | None,
    undo: ExitStack,
    notes: list[str],
) -> ForeignCopies:
    """Copies between caches on the driver's device and the host's places, calibrated.

    images: the kernels' machine code; by default compiled for the device. Raises UsageError for caches elsewhere or
    blocks that do not fit, and DeviceLost.
    """
    for number, cache in enumerate(caches):
        if not cache.on_device:
            raise UsageError(f"cache {number} lies in the host's memory; copies on a device want one on it")
    host = _registered(driver, host, undo, notes)
    copies = ForeignCopies(driver.streams, caches, host)
    kit = KernelKit.opened(driver, caches, copies.streams[WAYS[0]], images, undo, notes)
    undo.callback(copies.close)
    if kit is not None:
        for direction, way in enumerate(WAYS):
            for number, cache in enumerate(caches):
                copies.add(way, number, kit.methods(number, cache, direction, host), kit.sheets)
        copies.calibrate(clock, partial(lent_pinned, driver), partial(_seen_at, driver), notes)
    for note in notes:
        say_once(log, NAME, note, note)
    for (_, number), choice in copies.choices.items():
        log.info("%s %d: %s", NAME, number, choice)
    return copies


def _registered(driver: CudaDriver, host: HostPlaces, undo: ExitStack, notes: list[str]) -> HostPlaces:
    """The places, as the device sees them if it does."""
    try:
        driver.register(host.address, host.length_bytes)
        undo.callback(driver.unregister, host.address)
    except DriverError as error:
        if error.code != ALREADY_REGISTERED:
            notes.append(f"the host's memory is not registered, and copied more slowly: {error}")
            return host
    return replace(host, seen_at=_seen_at(driver, host.address))


def _seen_at(driver: CudaDriver, address: int) -> int:
    return int(driver.calls("cuMemHostGetDevicePointer", address, 0))
