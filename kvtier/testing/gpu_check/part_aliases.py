"""Part `aliases`: one physical block in several sequences' ranges, read through all, written through one.

Owns no state. Finds: a range that shows other bytes than the memory behind it, to copies or to kernels; a device that
says it makes mappings read-only and lets a write through. Writing where it is forbidden may end the context, so that is
tried in processes of their own (`trespass`), by a copy and by a kernel.
"""

import json
import subprocess
import sys
from contextlib import ExitStack

import numpy as np

from kvtier.allocator.driver import Handle, Range
from kvtier.kernels import checksum, launch_blocks
from kvtier.kernels.launch import DevicePool
from kvtier.testing.gpu_check.card import Bytes, Card, Desk
from kvtier.testing.gpu_check.record import Record

SEQUENCES = 3
TRESPASS_S = 60
DESK_BYTES = 1 << 16


def measure(card: Card, record: Record) -> None:
    size = card.driver.granule_bytes
    rng = np.random.default_rng(8)
    shared, own = rng.integers(0, 256, size, np.uint8), rng.integers(0, 256, (SEQUENCES, size), np.uint8)
    with ExitStack() as undo:
        prefix = _created(card, undo)
        first = _sequence(card, undo, prefix, write=True)
        others = [_sequence(card, undo, prefix, write=False) for _ in range(SEQUENCES - 1)]
        ranges = [first, *others]
        for addresses, content in zip(ranges, own, strict=True):
            card.put(addresses.address + size, content)
        card.put(first.address, shared)
        for number, (addresses, content) in enumerate(zip(ranges, own, strict=True)):
            wanted = np.concatenate([shared, content])
            found = np.empty_like(wanted)
            card.get(addresses.address, found)
            record.expect(np.array_equal(found, wanted), f"sequence {number}: a copy reads other bytes")
            record.expect(_sums_agree(card, addresses, wanted), f"sequence {number}: a kernel reads other bytes")
        _expect_access(card, record, [addresses.address for addresses in others])
        record.measured("sequences that share a block", len(ranges))
        record.measured("physical memory", card.driver.used_bytes, "B")
    record.measured("read-only mappings", card.driver.has_read_only)
    _trespasses(card, record)


def _created(card: Card, undo: ExitStack) -> Handle:
    handle = card.driver.create(card.driver.granule_bytes)
    undo.callback(card.driver.release, handle)
    return handle


def _sequence(card: Card, undo: ExitStack, prefix: Handle, *, write: bool) -> Range:
    """A range of the shared granule and one of its own."""
    driver, size = card.driver, card.driver.granule_bytes
    addresses = driver.reserve(2 * size)
    undo.callback(driver.free_range, addresses)
    for place, handle in ((0, prefix), (size, _created(card, undo))):
        driver.map(addresses, place, handle)
        undo.callback(driver.unmap, addresses, place, size)
    driver.set_access(addresses, size, size, write=True)
    driver.set_access(addresses, 0, size, write=write)
    undo.callback(card.streams.finish, card.stream)
    return addresses


def _expect_access(card: Card, record: Record, addresses: list[int]) -> None:
    """Ask the device what it grants at the aliases, where it has read-only mappings at all."""
    api = card.calls.driver
    place = api.CUmemLocation()
    place.type, place.id = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, card.number
    wanted = int(api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
    if card.driver.has_read_only:
        granted = [int(card.calls("cuMemGetAccess", place, address)) for address in addresses]
        record.expect(set(granted) == {wanted}, f"aliases asked for as read-only grant the access {granted}")


def _sums_agree(card: Card, addresses: Range, wanted: Bytes) -> bool:
    """One block over both granules, summed by a kernel where it lies."""
    seeds = np.array([9], np.uint64)
    with card.memory(DESK_BYTES) as memory:
        desk = Desk(card, memory, DESK_BYTES)
        slots, at_seeds, sums = desk.put(np.zeros(1, np.int32)), desk.put(seeds), desk.room(8)
        pool = DevicePool(addresses.address, addresses.length_bytes)
        card.launcher.launch(launch_blocks.checksum(sums, pool, slots, at_seeds, 1, wanted.nbytes), card.stream.key)
        found = np.empty(1, np.uint64)
        card.get(sums, found)
    return np.array_equal(found, checksum.checksums(wanted[None], np.zeros(1, np.int32), seeds, wanted.nbytes))


def _trespasses(card: Card, record: Record) -> None:
    if not card.driver.has_read_only:
        record.notes.append("this device has no read-only mappings: aliases are writable through every range")
        return
    for way in ("copy", "kernel"):
        told = _trespass(card.number, way)
        if told.get("refused") is None:
            record.notes.append(f"writing through a read-only alias by a {way} was not tried: {told.get('error')}")
            continue
        record.measured(f"a {way} through a read-only alias", str(told.get("error") or "went through"))
        record.expect(bool(told["refused"]), f"a {way} wrote through a mapping that is read-only")


def _trespass(device: int, way: str) -> dict[str, object]:
    command = [sys.executable, "-m", "kvtier.testing.gpu_check.trespass", str(device), way]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRESPASS_S)  # noqa: S603
        told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"refused": None, "error": f"it took more than {TRESPASS_S} s"}
    except (ValueError, LookupError):
        return {"refused": None, "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return told
