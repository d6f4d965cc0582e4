"""What others do to a store: rows that lie, another store's slab, a reader that stays."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import layout
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.types import Status, WriteBatch

BLOCKS = range(20)
Row = tuple[str, bytes, bytes | None]  # table, key, value; None deletes


def filled(folder: Path, blocks: range = BLOCKS) -> StoreDriver:
    """Blocks of two sizes, one of which was evicted."""
    store = StoreDriver(folder, durability="batch")
    store.write(blocks[:10], 5000, order=b"rows of a policy")
    store.write(blocks[10:], 9000, evict=[blocks[4]])
    return store


# ---------------------------------------------------------------- rows of the index


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store, to be copied."""
    folder = tmp_path_factory.mktemp("sound") / "s"
    filled(folder).close()
    return folder


@pytest.fixture(scope="module")
def rows(sound: Path) -> list[Row]:
    with opened(sound) as env, env.begin() as txn:
        tables = {name: env.open_db(name.encode(), txn=txn, create=False) for name in layout.TABLES}
        return [(name, key, row) for name, table in tables.items() for key, row in txn.cursor(table)]


def opened(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder / layout.INDEX_NAME), max_dbs=len(layout.TABLES), map_size=8 << 20)


@st.composite
def lies(draw: st.DrawFn, rows: list[Row]) -> Row:
    """A row that was changed, moved or made up; often with a check that is right."""
    table, key, row = draw(st.sampled_from(rows))
    assert row is not None
    kind = draw(st.sampled_from(["gone", "changed", "moved", "made up"]))
    if kind == "gone":
        return table, key, None
    if kind == "made up":
        row = draw(st.binary(max_size=120))
    if kind in ("moved", "made up"):
        table = draw(st.sampled_from(layout.TABLES))
        key = draw(
            st.sampled_from([key for name, key, _ in rows if name == table]) | st.binary(min_size=1, max_size=40)
        )
    body = bytearray(row[: -layout.CHECK_BYTES] or b"\0")
    for _ in range(draw(st.integers(1, 3)) if kind == "changed" else 0):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.sampled_from([0, 1, 2, 127, 255]) | st.integers(0, 255))
    if draw(st.integers(0, 3)):
        return table, key, layout._sealed(key, bytes(body))
    return table, key, bytes(body) + row[-layout.CHECK_BYTES :]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_rows_that_lie(tmp_path: Path, sound: Path, rows: list[Row], data: st.DataObject) -> None:
    """A row with a right check would be believed whatever it says: a wrong block is served, or the server dies."""
    folder = tmp_path / "s"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    with opened(folder) as env, env.begin(write=True) as txn:
        for table, key, row in data.draw(st.lists(lies(rows), min_size=1, max_size=4)):
            db = env.open_db(table.encode(), txn=txn)
            if row is None:
                txn.delete(key, db=db)
            else:
                txn.put(key, row, db=db)
    try:
        store = StoreDriver(folder, durability="batch")
    except StoreFormatError:
        return
    store.rescan(BLOCKS)
    statuses = store.read(list(store.kept))
    bad = [number for number, status in zip(store.kept, statuses, strict=True) if status is not Status.DONE]
    assert len(bad) <= 4
    store.write([], evict=bad)
    new = store.write([100, 101], 6000)
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert store.tier.check() == []
    store.reopen()
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    assert {100, 101} <= set(store.kept) or new != [Status.DONE] * 2
    store.close()


# ---------------------------------------------------------------- files of another store


def test_a_slab_of_another_store(tmp_path: Path) -> None:
    """Blocks of another model lie where the index says that ours are, intact in themselves."""
    store = filled(tmp_path / "s")
    store.close()
    filled(tmp_path / "other", range(500, 520)).close()
    shutil.copy(tmp_path / "other" / "slab", tmp_path / "s" / "slab")
    store.reopen()
    kept = list(store.kept)
    assert store.read(kept) == [Status.CORRUPT] * len(kept)
    assert store.write([900], 5000, evict=kept) == [Status.DONE] * (len(kept) + 1)
    assert store.read([900]) == [Status.DONE]
    assert store.tier.check() == []
    store.close()


# ---------------------------------------------------------------- readers

READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=5)
with env.begin():
    print("reading", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def stale_reader(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that looks at a store as it was, and does not stop."""
    filled(tmp_path / "s").close()
    command = [sys.executable, "-c", READER, str(tmp_path / "s" / layout.INDEX_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        yield reader
        reader.kill()


def test_a_reader_that_stays(tmp_path: Path, stale_reader: "subprocess.Popen[str]") -> None:
    """No page of the index is used again while somebody reads an old one: the writer would fail for good."""
    store = StoreDriver(tmp_path / "s", durability="none")
    assert stale_reader.stdout is not None
    assert stale_reader.stdout.readline() == "reading\n"
    store.rescan(BLOCKS)
    seen: list[Status] = []
    for turn in range(200):
        store.write([], order=bytes(30_000))
        seen += store.write([1000 + turn], 5000, evict=sorted(store.kept)[:1])
        if Status.NO_ROOM in seen:
            break
    assert set(seen) == {Status.DONE, Status.NO_ROOM}, "full, and no error"
    assert store.read(list(store.kept)) == [Status.DONE] * len(store.kept)
    stale_reader.send_signal(signal.SIGKILL)
    stale_reader.wait()
    assert store.write([5000], 5000, evict=sorted(store.kept)[:1]) == [Status.DONE] * 2
    assert store.tier.write(WriteBatch(sidecar={b"order": bytes(30_000)}))[0].status is Status.DONE
    assert store.tier.check() == []
    store.close()


KILLED_READER = """
import lmdb, os, signal, sys
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=5)
txn = env.begin()
txn.get(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""
INLINE = {"payload": "inline", "capacity_bytes": 10 << 20, "durability": "none"}


def look_and_die(table: Path) -> None:
    """A reader in a process of its own that is killed in the middle of its transaction."""
    assert subprocess.run([sys.executable, "-c", KILLED_READER, str(table)]).returncode == -signal.SIGKILL


@pytest.mark.parametrize("table", [layout.INDEX_NAME, layout.PAYLOAD_NAME])
def test_a_reader_that_was_killed(tmp_path: Path, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `inspect --verify` that is killed would stop the writer for good: no page that it saw is used again."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(100), 16_384)
    look_and_die(tmp_path / "s" / table)
    if table == layout.PAYLOAD_NAME:  # neither the timer nor a full index helps
        monkeypatch.setattr(OpenStore, "release_dead_readers", lambda store: 0)
    for turn in range(100):
        batch = range(1000 + 20 * turn, 1020 + 20 * turn)
        assert set(store.write(batch, 16_384, sorted(store.kept)[:20])) == {Status.DONE}
    assert store.read(sorted(store.kept)) == [Status.DONE] * 100
    assert store.tier.check() == []
    store.close()


def test_a_killed_reader_of_payloads_is_let_go_in_time(tmp_path: Path) -> None:
    """The file would grow to its limit for a reader that is long gone."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1])
    look_and_die(tmp_path / "s" / "payload")
    table = store.tier._store.slab.table
    assert "no active readers" not in table._env.readers()
    store.tier._room._readers_due_s = 0.0
    store.write([])
    assert "no active readers" in table._env.readers()
    store.close()


def test_the_next_look_lets_a_killed_one_go(tmp_path: Path) -> None:
    """A look at a store in use would leave what an earlier one left; a full table of readers refuse all looks."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1])
    look_and_die(tmp_path / "s" / "payload")
    command = "import sys; from kvtier.cli.main import app; app(['inspect', sys.argv[1], '--json'])"
    looked = subprocess.run([sys.executable, "-c", command, str(tmp_path / "s")], capture_output=True)
    assert looked.returncode == 0
    assert "no active readers" in store.tier._store.slab.table._env.readers()
    store.close()
