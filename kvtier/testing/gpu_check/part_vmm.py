"""Part `vmm`: what virtual memory management costs, on an idle device and beside a kernel that never pauses.

Owns no state. Finds: a reader that saw wrong bytes, or memory that is not given back. Times are the calling thread's,
through `CudaDriver`, which is what an arena pays. Units: microseconds.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from kvtier.allocator.driver import Handle
from kvtier.kernels.launch import DevicePool
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.reader import QUEUED, Reader
from kvtier.testing.gpu_check.record import Record

Item = TypeVar("Item")

BIG_GRANULES = 8  # of the larger handles: does the cost follow the handles or the bytes?


def measure(card: Card, record: Record) -> None:
    used_bytes = card.driver.used_bytes
    granule_bytes, granules = card.driver.granule_bytes, card.scale.vmm_granules
    card.expect_room(granules * granule_bytes)
    _latencies(card, record, "idle", granule_bytes, granules)
    _latencies(card, record, "idle, large handles", BIG_GRANULES * granule_bytes, max(2, granules // BIG_GRANULES))
    _beside_a_reader(card, record)
    record.expect(card.driver.used_bytes == used_bytes, "memory that was released is still taken")


def _beside_a_reader(card: Card, record: Record) -> None:
    granule_bytes = card.driver.granule_bytes
    contents = np.random.default_rng(0).integers(0, 256, (card.scale.reader_slots, granule_bytes), np.uint8)
    with card.memory(contents.nbytes) as address:
        card.put(address, contents)
        with Reader(card, DevicePool(address, granule_bytes), range(len(contents)), contents) as reader:
            before = reader.steps
            _latencies(card, record, "beside a reader", granule_bytes, max(2, card.scale.vmm_granules // 4))
            meanwhile = reader.steps - before
            reader.await_steps(QUEUED + 1)  # the last of these was begun when all was over
            running = reader.is_running
    record.measured("reader: steps meanwhile", meanwhile)
    record.measured("reader: median step", statistics.median(reader.gaps_ms) * 1e3, "us")
    record.measured("reader: longest step", max(reader.gaps_ms) * 1e3, "us")
    record.expect(running, "the reader stopped while memory was mapped and unmapped elsewhere")
    record.expect(
        reader.steps_wrong == 0, f"{reader.steps_wrong} of the reader's {reader.steps} steps read wrong bytes"
    )


def _latencies(card: Card, record: Record, when: str, length_bytes: int, count: int) -> None:
    """Each verb on `count` handles of `length_bytes`; at the end all is given back."""
    driver, places = card.driver, range(0, count * length_bytes, length_bytes)
    with ExitStack() as undo:
        addresses = driver.reserve(count * length_bytes)
        undo.callback(driver.free_range, addresses)
        handles: list[Handle] = []
        release = undo.enter_context(ExitStack())

        def release_all() -> None:
            for handle in handles:
                driver.release(handle)

        def open_from(place: int, length: int = length_bytes) -> None:
            driver.set_access(addresses, place, length, write=True)

        def close_from(place: int, length: int = length_bytes) -> None:
            driver.unmap(addresses, place, length)

        def put(pair: tuple[int, Handle]) -> None:
            driver.map(addresses, *pair)

        release.callback(release_all)
        create = _times(lambda _: handles.append(driver.create(length_bytes)), places)
        pairs = list(zip(places, handles, strict=True))
        mapping, access, unmap = _times(put, pairs), _times(open_from, places), _times(close_from, places)
        _times(put, pairs)
        whole = count * length_bytes
        access_all = _times(lambda place: open_from(place, whole), [0])
        unmap_all = _times(lambda place: close_from(place, whole), [0])
        release.pop_all()
        given_back = _times(driver.release, handles)
    for verb, times in (
        ("create", create),
        ("map", mapping),
        ("access", access),
        ("unmap", unmap),
        ("release", given_back),
    ):
        record.measured(f"{when}: {verb}", statistics.median(times), "us")
        record.measured(f"{when}: {verb}, p99", sorted(times)[int(len(times) * 0.99)], "us")
    record.measured(f"{when}: access per handle, {count} in one call", access_all[0] / count, "us")
    record.measured(f"{when}: unmap per handle, {count} in one call", unmap_all[0] / count, "us")
    record.measured(f"{when}: length of a handle", length_bytes, "B")


def _times(step: Callable[[Item], object], items: Iterable[Item]) -> list[float]:
    """Microseconds of the step, for each item."""
    times = []
    for item in items:
        start = time.perf_counter()
        step(item)
        times.append((time.perf_counter() - start) * 1e6)
    return times
