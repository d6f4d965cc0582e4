"""A file of LMDB's that is written anew while a look that began beside an earlier writer still has its reader table."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cli.cmd_gc import gc
from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

LOOK = """
import lmdb, sys
held = [lmdb.open(folder, readonly=True, max_dbs=8) for folder in sys.argv[1:]]
for env in held:
    env.begin().abort()
print("in", flush=True)
sys.stdin.read()
"""


@contextmanager
def looking(folder: Path) -> Iterator[None]:
    """Another process has the tables of a store open, as `kvtier inspect` has them beside a live writer."""
    tables = [str(path) for name in ("index", "payload") if (path := folder / name).is_dir()]
    with subprocess.Popen(
        [sys.executable, "-c", LOOK, *tables], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as look:
        assert look.stdout is not None
        assert look.stdout.readline() == "in\n"
        try:
            yield
        finally:
            look.communicate()


def bloat(store: StoreDriver) -> None:
    """Much of index and payloads is free pages."""
    for row in range(30):
        store.write([100 + row], 16_384, **{f"row{row}": bytes(60_000)})
    everyone = [number for number in store.kept if number >= 100]
    store.write([], evict=everyone)
    store.write([], **{f"row{row}": b"" for row in range(30)})


@pytest.mark.parametrize("payload", ["slab", "inline"])
@pytest.mark.parametrize("commits", [0, 1])
def test_a_look_that_outlives_its_writer(tmp_path: Path, payload: str, commits: int) -> None:
    """LMDB would take how far the old file was from the reader table, and find the new one empty: every block is gone,
    and whoever opens it is told to delete the folder. Every other commit, for it chooses between two heads."""
    folder = tmp_path / "s"
    store = StoreDriver(folder, durability="batch", payload=payload, capacity_bytes=16 << 20)
    store.write(range(10))
    bloat(store)
    for number in range(commits):
        store.write([20 + number])
    kept = set(store.kept)
    with looking(folder):
        store.close()
        before = (folder / "index" / "data.mdb").stat().st_ino
        assert gc(folder) == 0
        assert (folder / "index" / "data.mdb").stat().st_ino != before, "it was worth writing anew"
        store.tier = store._open()
        store.rescan(range(200))
        assert set(store.kept) == kept
        assert set(store.read(sorted(kept))) == {Status.DONE}
        store.write([30])
        store.close()
    store.tier = store._open()
    store.rescan(range(200))
    assert set(store.kept) == kept | {30}
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    store.close()
