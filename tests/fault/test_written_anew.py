"""A file of LMDB's that is written anew while a look that began beside an earlier writer still has its reader table."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cli.cmd_gc import gc
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.index import Index
from kvtier.types import Status

LOOK = """
import lmdb, sys
held = [lmdb.open(folder, readonly=True, max_dbs=8) for folder in sys.argv[2:]]
views = [env.begin() for env in held]
if sys.argv[1] == "still":
    print("in", flush=True)
    sys.stdin.readline()
for view in views:
    view.abort()
print("out", flush=True)
sys.stdin.read()
"""


@contextmanager
def looking(folder: Path, stands: str = "out") -> Iterator[None]:
    """Another process has the tables of a store open, as `kvtier inspect` has them beside a live writer; still: and
    stands still in a transaction."""
    tables = [str(path) for name in ("index", "payload") if (path := folder / name).is_dir()]
    with subprocess.Popen(
        [sys.executable, "-c", LOOK, stands, *tables], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as look:
        assert look.stdout is not None
        assert look.stdout.readline() == {"still": "in\n", "out": "out\n"}[stands]
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


def stand_in_the_way(folder: Path) -> StoreDriver:
    """A store whose index a look has let grow into what no extent uses, until nothing was stored any more."""
    store = StoreDriver(folder, durability="batch", capacity_bytes=8 << 20)
    store.write(range(200), 16_384)
    with looking(folder, "still"):
        for row in range(400):
            if store.write([], **{f"row{row % 4}": os.urandom(60_000)}) != [Status.DONE]:
                break
        else:
            raise AssertionError("the index never became full")
    return store


def test_what_a_look_that_stood_still_took_comes_back(tmp_path: Path) -> None:
    """A debugger at a look beside a busy cache would cost the store's room until somebody runs gc, and maybe blocks."""
    store = stand_in_the_way(tmp_path / "s")
    kept, before = set(store.kept), store.tier.traits.capacity_bytes
    store.reopen()
    assert store.tier._store.index.file_bytes() < 2 << 20
    assert store.tier.traits.capacity_bytes >= before + (2 << 20)
    assert set(store.kept) == kept
    assert set(store.read(sorted(kept))) == {Status.DONE}
    assert dict(store.tier.sidecar()).keys() == {b"row0", b"row1", b"row2", b"row3"}
    assert (store.tier.check(), store.tier.findings) == ([], [])
    inode = (tmp_path / "s" / "index" / "data.mdb").stat().st_ino
    store.reopen()
    assert (tmp_path / "s" / "index" / "data.mdb").stat().st_ino == inode, "once is enough"
    store.close()


def test_an_index_that_cannot_be_written_anew_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store on a full disk would not open for want of the room for a second index."""
    store = stand_in_the_way(tmp_path / "s")
    kept = set(store.kept)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "copy_to", lambda index, fd: no_room())
        with caplog.at_level(logging.WARNING):
            store.reopen()
    assert "its index stays larger than it need be" in caplog.text
    assert not (tmp_path / "s" / "index" / "data.mdb.new").exists()
    assert store.kept
    assert set(store.kept) <= kept
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    store.close()


def no_room() -> None:
    raise OSError(28, os.strerror(28))
