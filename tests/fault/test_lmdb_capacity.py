"""The folder stays within its capacity at every instant, watched from another process while its writer is killed."""

import os
import random
import select
import subprocess
import sys
from pathlib import Path

from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

WRITER = """
import os, pathlib, random, sys
from kvtier.testing.stores import StoreDriver
from kvtier.types import WriteBatch

path, seed, capacity = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
store = StoreDriver(path, capacity_bytes=capacity, length_bytes_max=40_000)
print("open", flush=True)
store.rescan(range(1000 * seed))
for turn in range(1000):
    length = chance.choice((1, 4096, 9000, 40_000))
    evict = chance.sample(sorted(store.kept), min(len(store.kept), chance.choice((0, 10, 60))))
    rows = {f"row{turn % 8}": os.urandom(chance.choice((100, 60_000)))} if chance.random() < 0.5 else {}
    store.write(range(1000 * seed + 20 * turn, 1000 * seed + 20 * turn + 20), length, evict, **rows)
    if chance.random() < 0.03:
        store.tier.drop(store.namespace)
        store.kept = {}
        store.tier.write(WriteBatch(sidecar={f"row{row}".encode(): None for row in range(8)}))
    print("turn", flush=True)
"""


def disk_bytes(folder: Path) -> int:
    """What the folder takes: the larger of its disk and its files' lengths counts for the index, which is no hole."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in [".", *names]:
            try:
                found = (Path(root) / name).stat()
            except FileNotFoundError:
                continue
            length = found.st_size if name == "data.mdb" else 0
            total += max(found.st_blocks * 512, length)
    return total


def watched(path: Path, seed: int, capacity: int) -> tuple[int, int]:
    """The most that the folder took while it was opened, and after, of a writer that was killed somewhere."""
    command = [sys.executable, "-c", WRITER, str(path), str(seed), str(capacity)]
    most, turns = [0, 0], -1
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        os.set_blocking(writer.stdout.fileno(), False)
        turns_max = random.Random(seed).randint(15, 30)
        while turns < turns_max:
            select.select([writer.stdout], [], [], 0.001)  # the writer needs the processor too
            told = writer.stdout.read()
            phase = int(turns >= 0)
            most[phase] = max(most[phase], disk_bytes(path))
            turns += (told or b"").count(b"\n")
            assert writer.poll() is None, "the writer failed"
        writer.kill()
    return most[0], most[1]


def test_the_capacity_holds_at_every_instant(tmp_path: Path) -> None:
    """For a moment, such as a batch, a crash or a smaller capacity, the store would take more than it was given
    (LMCache#4664)."""
    path = tmp_path / "s"
    for seed, mib in enumerate((6, 4, 3, 6), start=1):
        before = disk_bytes(path) if path.exists() else 0
        opening, after = watched(path, seed, mib << 20)
        # What a killed writer left to the page cache gets its file map only when it reaches the disk: a few pages.
        assert opening <= max(before + (64 << 10), mib << 20), "it never grows before it is small enough"
        assert after <= mib << 20
    store = StoreDriver(path, capacity_bytes=6 << 20, length_bytes_max=40_000)
    store.rescan(range(10_000))
    assert set(store.read(sorted(store.kept))) <= {Status.DONE}
    assert store.tier.findings == []
    assert store.tier.check() == []
    store.close()
