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

from kvtier.testing.stores import StoreDriver

BATCH_ROW = b"batch"
KEPT_MAX = 30
LENGTHS = (4096, 5000, 13_000)


def options(durability: str, payload: str) -> dict[str, Any]:
    capacity_bytes = 2 << 20 if payload == "slab" else 5 << 20
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
        for _ in range(batches // 2):
            batch += 1
            items = range(number, number + chance.randint(1, 6))
            number = items.stop
            over = max(0, len(store.kept) + len(items) - KEPT_MAX)
            leaving = chance.sample(list(store.kept), min(len(store.kept), over + chance.randint(0, 3)))
            tell(begun=batch, items=list(items), leaving=leaving)
            store.write(items, chance.choice(LENGTHS), leaving, **{BATCH_ROW.decode(): b"%d" % batch})
            tell(done=batch, kept=list(store.kept))
        store.close()
        tell(closed=batch)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
