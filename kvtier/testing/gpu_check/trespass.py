"""Writes once where writing is forbidden, and tells what happened: ``python -m ...trespass DEVICE copy|kernel``.

A program of its own, because the answer may be an error that ends the device's context for the whole process.
JSON on stdout: refused (true, false, or null if it could not be tried), error (or null).
"""

import json
import sys
from typing import Any

import numpy as np

from kvtier.allocator.driver import Range
from kvtier.errors import KvtierError
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch import DeviceFragments, DevicePool, fragment_records
from kvtier.kernels.source import variant_of
from kvtier.testing.gpu_check.card import Card, Desk
from kvtier.testing.gpu_check.scale import QUICK

BEFORE, AFTER = 7, 9
LENGTH_BYTES = 4096


def trespass(card: Card, way: str) -> dict[str, Any]:
    """Map memory twice, once read-only, and write through that. Afterwards the context may be lost."""
    driver, size = card.driver, card.driver.granule_bytes
    handle = driver.create(size)
    open_to_all, closed = driver.reserve(size), driver.reserve(size)
    for addresses, write in ((open_to_all, True), (closed, False)):
        driver.map(addresses, 0, handle)
        driver.set_access(addresses, 0, size, write=write)
    card.fill(open_to_all.address, BEFORE, size)
    desk_address = driver.reserve(size)
    driver.map(desk_address, 0, driver.create(size))
    driver.set_access(desk_address, 0, size, write=True)
    desk = Desk(card, desk_address.address, size)
    if way == "kernel":
        try:
            card.launcher.prepare(variant_of("fragments"))
        except KvtierError as error:
            return {"refused": None, "error": str(error)}
    try:
        _write(card, desk, closed, way)
        card.streams.finish(card.stream)
    except KvtierError as error:
        return {"refused": True, "error": str(error)}
    found = np.empty(LENGTH_BYTES, np.uint8)
    card.get(open_to_all.address, found)
    return {"refused": bool((found == BEFORE).all()), "error": None}


def _write(card: Card, desk: Desk, closed: Range, way: str) -> None:
    payload = desk.put(np.full(LENGTH_BYTES, AFTER, np.uint8))
    if way == "copy":
        card.calls("cuMemcpyAsync", closed.address, payload, LENGTH_BYTES, card.stream.key)
        return
    zero = desk.put(np.zeros(1, np.int32))
    records = desk.put(fragment_records([payload], [LENGTH_BYTES], [0]))
    fragments = DeviceFragments(records, 1, LENGTH_BYTES, LENGTH_BYTES)
    pool = DevicePool(closed.address, LENGTH_BYTES)
    card.launcher.launch(launch_blocks.gather(pool, zero, fragments, zero, 1), card.stream.key)


def main(arguments: list[str]) -> int:
    number, way = arguments
    try:
        told = trespass(Card(int(number), QUICK), way)
    except KvtierError as error:
        told = {"refused": None, "error": str(error)}
    sys.stdout.write("\n" + json.dumps(told))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
