"""Part `resize`: the tier grows and shrinks while a kernel reads leased slots without pause.

Owns no state. Finds: a reader that stops or sees a wrong byte, an address that changes, a size that was not achieved,
memory that is not given back. The reader's longest step tells whether it was held up; if it ran on, that is no longer
than a few of its own. Also measured, without a reader: the arena alone, its memory made ahead.
Units: seconds, microseconds of the device's time.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from kvtier.allocator.vmm import Arena
from kvtier.config import load_config
from kvtier.kernels.launch import DevicePool
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.reader import QUEUED, Reader
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.scale import GIB
from kvtier.testing.gpu_check.serving import Serving, model_of

AIMED_BYTES = 8 * GIB
GRANULES_SPARE = 4
TOLERANCE = 0.1  # of the memory that comes and goes


def measure(card: Card, record: Record) -> None:
    _tier(card, record)
    _arena_alone(card, record)


def _tier(card: Card, record: Record) -> None:
    scale, granule_bytes = card.scale, card.driver.granule_bytes
    model = model_of(card, 1)
    layer_bytes = 2 * model["block_tokens"] * model["kv_heads"] * model["head_dim"] * 2
    model["layers"] = max(1, scale.reader_bytes // layer_bytes)
    stride_bytes = model["layers"] * layer_bytes
    small = (-(-(scale.reader_slots + 2) * stride_bytes // granule_bytes) + GRANULES_SPARE) * granule_bytes
    large = small + scale.resize_bytes
    card.expect_room(large)
    tier = {"type": "gpu", "device": f"cuda:{card.number}", "capacity": small, "capacity_max": large}
    config = load_config({"model": model, "tiers": [tier]}, environ={})
    with Serving(card, config) as serving:
        keys = serving.prompt(1, scale.reader_slots)
        with serving.leased(keys) as lease:
            serving.compute(lease, keys)
            contents = np.stack([serving.content(key).view(np.uint8) for key in keys.groups[0]])
            pool = DevicePool(serving.address, serving.stride_bytes)
            with Reader(card, pool, lease.slots(), contents) as reader:
                time.sleep(scale.settle_s)
                alone = list(reader.gaps_ms)
                free_bytes = [card.free_bytes()]
                grow_s, grown = _timed(lambda: serving.cache.resize("gpu", large))
                free_bytes.append(card.free_bytes())
                shrink_s, shrunk = _timed(lambda: serving.cache.resize("gpu", small))
                free_bytes.append(card.free_bytes())
                reader.await_steps(QUEUED + 1)  # the last of these was begun when all was over
                meanwhile, running = reader.gaps_ms[len(alone) :], reader.is_running
            address = serving.address_now()
    record.expect(address == serving.address, "the slots' address changed")
    record.expect(grown == large, f"asked for {large} bytes, got {grown}")
    record.expect(shrunk == small, f"asked to shrink to {small} bytes, got {shrunk}")
    record.expect(running and len(meanwhile) > 0, "the reader stopped while the tier was resized")
    record.expect(reader.steps_wrong == 0, f"{reader.steps_wrong} of {reader.steps} steps read wrong bytes")
    taken, given_back = ((free_bytes[i] - free_bytes[1]) / scale.resize_bytes for i in (0, 2))
    near = f"of {scale.resize_bytes} bytes, as the device counts its free memory (others may be using it, too)"
    record.expect(abs(taken - 1) < TOLERANCE, f"growing took {taken:.0%} {near}")
    record.expect(abs(given_back - 1) < TOLERANCE, f"shrinking gave back {given_back:.0%} {near}")
    record.measured("resized by", scale.resize_bytes, "B")
    record.measured("grow", grow_s, "s")
    record.measured("shrink", shrink_s, "s")
    for when, gaps in (("alone", alone), ("meanwhile", meanwhile)):
        if gaps:
            record.measured(f"reader's step {when}: median", statistics.median(gaps) * 1e3, "us")
            record.measured(f"reader's step {when}: longest", max(gaps) * 1e3, "us")
    if scale.resize_bytes == AIMED_BYTES:
        record.aims["resize_8GiB"] = max(grow_s, shrink_s)
    else:
        record.notes.append(f"resized by {scale.resize_bytes} bytes, not by 8 GiB")


def _arena_alone(card: Card, record: Record) -> None:
    granule_bytes = card.driver.granule_bytes
    granules = card.scale.resize_bytes // granule_bytes
    card.expect_room(granules * granule_bytes)
    used_bytes = card.driver.used_bytes
    with closing(Arena(card.driver, stride_bytes=granule_bytes, slots_reserved=granules + 1)) as arena:
        arena.grow(granule_bytes)
        made = _timed(lambda: arena.fill(granules))[0]
        grown = _timed(lambda: arena.grow(granules * granule_bytes))[0]
        shrunk = _timed(lambda: arena.shrink(range(1, granules + 1), lambda slot: True))[0]
        given_back = _timed(arena.trim)[0]
    for what, took_s in (("make memory ahead", made), ("map and zero it", grown), ("unmap", shrunk)):
        record.measured(f"arena alone: {what}", took_s, "s")
    record.measured("arena alone: give it back", given_back, "s")
    record.expect(card.driver.used_bytes == used_bytes, "an arena that was closed still holds memory")


def _timed(work: Callable[[], int | list[int]]) -> tuple[float, int | list[int]]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
