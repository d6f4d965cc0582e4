"""Fills a store and lets blocks go, for a recorder, and notes in a file of the same disk how far it has come.

A line of the journal is JSON: `opening`; `begun`, with the blocks that come and those that leave; `done`, with all
that are kept after it, oldest first; `closed`. With each batch its number goes into the sidecar.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from kvtier.testing.stores import StoreDriver, Told

BATCH_ROW = b"batch"
KEPT_MAX = 30
GROUP_MAX = 3  # batches that are written together
LENGTHS = (4096, 5000, 13_000)


def options(durability: str, payload: str) -> dict[str, Any]:
    capacity_bytes = 3 << 20 if payload == "slab" else 7 << 20
    return {"capacity_bytes": capacity_bytes, "durability": durability, "payload": payload, "io_threads": 1}


def write(root: Path, durability: str, payload: str, batches: int, seed: int) -> None:
    """Two lives of one store."""
    journal = os.open(root / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(**line: Any) -> None:
        os.write(journal, json.dumps(line).encode() + b"\n")

    chance = random.Random(seed)
    number = batch = 0
    for _ in range(2):
        tell(opening=True)
        store = StoreDriver(root / "s", **options(durability, payload))
        store.rescan(range(number))
        last = batch + batches // 2
        while batch < last:
            group, left = [], list(store.kept)
            for _ in range(min(chance.randint(1, GROUP_MAX), last - batch)):
                batch += 1
                items = range(number, number + chance.randint(1, 6))
                number = items.stop
                over = max(0, len(store.kept) + sum(len(told.numbers) for told in group) + len(items) - KEPT_MAX)
                leaving = chance.sample(left, min(len(left), over + chance.randint(0, 3)))
                left = [kept for kept in left if kept not in leaving]
                tell(begun=batch, items=list(items), leaving=leaving)
                group.append(Told(items, chance.choice(LENGTHS), leaving, {BATCH_ROW.decode(): b"%d" % batch}))
            store.write_together(*group)
            tell(done=batch, kept=list(store.kept))
        store.close()
        tell(closed=batch)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
