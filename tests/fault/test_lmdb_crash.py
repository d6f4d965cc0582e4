"""kill -9 in the middle of writing: what was acknowledged is there, and nothing wrong is."""

import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

OPTIONS = {"capacity_bytes": 4 << 20, "length_bytes_max": 40_000}

WRITER = """
import pathlib, random, sys
from kvtier.testing.stores import StoreDriver, Told

path, start, seed, durability, payload = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
store = StoreDriver(path, capacity_bytes=4 << 20, length_bytes_max=40_000, durability=durability, payload=payload)
store.rescan(range(start))
chance = random.Random(seed)
while True:
    numbers = range(start, start + 8)
    start += 8
    length = chance.choice((4096, 9000, 40_000))
    evict = sorted(store.kept)[: max(0, len(store.kept) - 40)]
    print("evicting", *evict, flush=True)
    before = set(store.kept)
    halves = [Told(numbers[i::2], length, evict[i::2]) for i in (0, 1)]  # together, as if they had waited
    store.write_together(*(halves if chance.random() < 0.5 else [Told(numbers, length, evict)]))
    print("done", *sorted(set(store.kept) - before), flush=True)
"""


def run_and_kill(
    path: Path, start: int, seed: int, durability: str, payload: str = "slab"
) -> tuple[set[int], set[int], int]:
    """Numbers acknowledged, numbers whose eviction was at least begun, and the next free number."""
    command = [sys.executable, "-c", WRITER, str(path), str(start), str(seed), durability, payload]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(random.Random(seed).randint(5, 40))]
        select.select([], [], [], random.Random(seed).random() / 200)  # anywhere inside a batch, not only after one
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    whole = [line.split() for line in lines if line.endswith("\n")]
    done = {int(word) for line in whole if line[0] == "done" for word in line[1:]}
    evicted = {int(word) for line in whole if line[0] == "evicting" for word in line[1:]}
    return done, evicted, start + 8 * (len(whole) + 1)


@pytest.mark.parametrize(
    ("durability", "payload"), [("none", "slab"), ("batch", "slab"), ("strict", "slab"), ("batch", "inline")]
)
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_kill_nine(tmp_path: Path, durability: str, payload: str, kills: int) -> None:
    """A crash would lose acknowledged blocks, or serve torn ones (11 in 8 runs when slots were reused early)."""
    kept: set[int] = set()
    start = 0
    for seed in range(kills):
        done, evicted, start = run_and_kill(tmp_path / "s", start, seed, durability, payload)
        must = (kept | done) - evicted
        store = StoreDriver(tmp_path / "s", durability=durability, payload=payload, **OPTIONS)
        store.rescan(range(start))
        assert must <= set(store.kept), "an acknowledged block is gone"
        assert store.read(sorted(store.kept)) == [Status.DONE] * len(store.kept)
        assert store.tier.findings == []
        assert store.tier.check() == []
        kept = set(store.kept)
        store.close()
    assert kept


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """After a crash the store could not be opened until someone deleted a file."""
    run_and_kill(tmp_path / "s", 0, 1, "none")
    StoreDriver(tmp_path / "s", **OPTIONS).close()


def test_a_crash_while_creating(tmp_path: Path) -> None:
    """A store whose creation was cut off could never be opened."""
    for stage in ("lock", "folder", "index"):
        folder = tmp_path / stage
        store = StoreDriver(folder)
        store.close()
        (folder / "slab").unlink()
        if stage != "index":
            for path in (folder / "index").iterdir():
                path.unlink()
        if stage == "lock":
            (folder / "index").rmdir()
        store.tier = store._open()
        assert store.write([1]) == [Status.DONE]
        store.close()


@pytest.mark.parametrize("first_bytes", [b"", bytes(4096)])
def test_a_crash_in_the_first_bytes_of_the_index(tmp_path: Path, first_bytes: bytes) -> None:
    """A store that has never had a block would be called damaged until someone deleted it."""
    folder = tmp_path / "s"
    (folder / "index").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "index" / "data.mdb").write_bytes(first_bytes)
    store = StoreDriver(folder)
    assert store.write([1]) == [Status.DONE]
    store.close()
