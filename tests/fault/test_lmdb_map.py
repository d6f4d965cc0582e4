"""A map that the kernel refuses: LMDB has let go of the old one by then, and py-lmdb of the environment."""

from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.cli.bench import world
from kvtier.config import load_config
from kvtier.engine.sync import open_sync
from kvtier.errors import StoreError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import opening
from kvtier.tiers.lmdb.environment import Opening
from kvtier.tiers.lmdb.index import Index
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.types import Status
from tests.fault.test_live_capacity import blocks, serve

MIB = 1 << 20
TOO_MUCH = 300 << 40  # of address space, on every machine that there is
DONE, NO_ROOM, FAILED = Status.DONE, Status.NO_ROOM, Status.FAILED
INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 12 * MIB}
both_payloads = pytest.mark.parametrize("payload", ["slab", "inline"])


class Unmappable:
    """An environment whose next map the kernel refuses."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def set_mapsize(self, map_bytes: int) -> None:
        self._env.set_mapsize(TOO_MUCH)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened again has as little address space as before."""
    again = Opening.again
    monkeypatch.setattr(Opening, "again", lambda *args: Unmappable(again(*args)))


def goes_on(store: StoreDriver) -> None:
    """What was stored can be read, more is stored, and a restart has all of it."""
    numbers = sorted(store.kept)
    assert numbers
    assert store.read(numbers) == [DONE] * len(numbers)
    assert set(store.write(range(5000, 5005), evict=numbers[:5])) == {DONE}
    assert store.tier.check() == []
    kept = sorted(store.kept)
    store.reopen()
    assert sorted(store.kept) == kept
    assert store.read(kept) == [DONE] * len(kept)
    store.close()


def test_a_capacity_that_cannot_be_mapped_changes_nothing(tmp_path: Path) -> None:
    """A typing error in a resize closes the store under a server that uses it, and is called done."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(50))
    room, table = store.tier.room(16_384), store.tier._store.slab.table
    table._env = Unmappable(table._env)
    refused = store.tier.change_capacity(30 * MIB)
    assert (refused.status, "Cannot allocate memory" in refused.detail) == (FAILED, True)
    assert (store.tier.capacity_bytes, store.tier.room(16_384)) == (12 * MIB, room)
    assert store.tier.change_capacity(30 * MIB).done
    assert store.tier.room(16_384) > room
    store.options["capacity_bytes"] = 30 * MIB
    goes_on(store)


def test_a_header_that_cannot_be_written_gives_the_map_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may grow beyond the capacity that the header still says."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    map_bytes = store.tier._store.slab.table.map_bytes()

    def fail(index: Index, change: object) -> None:
        raise lmdb.DiskError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", fail)
        assert store.tier.change_capacity(30 * MIB).status is NO_ROOM
    assert (store.tier.capacity_bytes, store.tier._store.slab.table.map_bytes()) == (12 * MIB, map_bytes)
    store.close()


def test_a_cache_outlives_a_capacity_that_cannot_be_mapped(tmp_path: Path) -> None:
    """The cache stops with a bug of its own, and serves nothing more, memory tiers neither."""
    path = tmp_path / "s"
    gpu, disk = {"type": "gpu", "capacity": "400KiB", "device": "host"}, {"type": "lmdb", "path": str(path)}
    model = {"name": "map", "weights_epoch": "v1", "dtype": "float32", "block_tokens": world.BLOCK_TOKENS}
    document = {"model": model | world.SMALL, "tiers": [gpu, disk | {"capacity": "6MiB", "payload": "inline"}]}
    with open_sync(load_config(document, environ={})) as cache:
        serve(cache, path, 10, seed=0)
        before = blocks(cache)
        table = cache._engine._tiers[1]._store.slab.table
        table._env = Unmappable(table._env)
        assert cache.resize("lmdb", 8 * MIB) == 6 * MIB
        serve(cache, path, 10, seed=1)
        assert blocks(cache) > before
        assert cache.stats()["tiers"]["lmdb"]["read_failed"] == 0
        assert cache.resize("lmdb", 8 * MIB) == 8 * MIB


@pytest.mark.usefixtures("scarce")
def test_an_index_that_cannot_be_mapped_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every batch ends in an exception until the restart, and the notes blame a disk that has room."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=16 * MIB)
    store.write(range(50))
    index = store.tier._store.index
    index._env, before = Unmappable(index._env), (index.map_bytes(), index.disk_bytes())
    ends = [store.write([100 + row], **{f"row{row}": bytes(30_000)}) for row in range(20)]
    assert {status for statuses in ends for status in statuses} == {DONE, NO_ROOM}
    assert (index.map_bytes(), index.disk_bytes()) == before, "no disk is claimed for what cannot be mapped"
    assert any("can be mapped: mdb_env_set_mapsize: Cannot allocate memory" in note for note in store.tier.notes)
    assert "free, of which min_free keeps" not in caplog.text
    goes_on(store)


@both_payloads
def test_an_environment_that_stays_closed_costs_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str
) -> None:
    """Where there is no address space left at all, the engine's thread ends in an exception of a tier."""
    store = StoreDriver(tmp_path / "s", payload=payload, capacity_bytes=12 * MIB)
    store.write(range(50))
    kept = sorted(store.kept)

    def refuse(opened: Opening, *args: object) -> None:
        raise lmdb.MemoryError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Opening, "again", refuse)
        if payload == "inline":
            table = store.tier._store.slab.table
            table._env = Unmappable(table._env)
            assert store.tier.change_capacity(30 * MIB).status is FAILED
        else:
            with pytest.raises(lmdb.Error):
                store.tier._store.index.grow(TOO_MUCH)
    assert set(store.write([100, 101])) <= {NO_ROOM, FAILED}
    assert FAILED in store.write([102])
    assert payload == "inline" or store.tier.change_capacity(16 * MIB).status is FAILED
    assert set(store.read(kept)) <= {FAILED, Status.MISSING}
    assert store.tier.room(5000) >= 0
    assert store.tier.excess_bytes() == 0
    store.reopen()
    assert sorted(store.kept) == kept
    assert store.read(kept) == [DONE] * len(kept)
    store.close()


def test_another_folder_is_not_taken_for_the_one_that_was_open(tmp_path: Path) -> None:
    """A store whose folder was moved goes on in the one that came to lie there."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(50))
    other = StoreDriver(tmp_path / "other", **INLINE)
    other.close()
    (tmp_path / "s").rename(tmp_path / "moved")
    (tmp_path / "other").rename(tmp_path / "s")
    table = store.tier._store.slab.table
    table._env = Unmappable(table._env)
    assert store.tier.change_capacity(30 * MIB).status is FAILED
    assert FAILED in store.write([100])
    store.close()
    moved = StoreDriver(tmp_path / "moved", **INLINE)
    moved.rescan(range(50))
    assert moved.read(sorted(moved.kept)) == [DONE] * 50
    moved.close()


def test_a_store_that_cannot_be_mapped_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens it with too little address space is told to delete it."""
    StoreDriver(tmp_path / "s").close()

    def refuse(*args: object) -> None:
        raise lmdb.MemoryError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "upgrade", refuse)
        with pytest.raises(StoreError, match=r"cannot be opened: Cannot allocate memory\. Mend that"):
            StoreDriver(tmp_path / "s")
    StoreDriver(tmp_path / "s").close()


def test_a_look_that_cannot_map_finds_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at a store that grows meanwhile, with too little address space, is told to delete it."""
    StoreDriver(tmp_path / "s").close()
    reader = StoreReader.open(tmp_path / "s")

    def refuse(index: Index, table: str) -> int:
        raise lmdb.MemoryError("Cannot allocate memory")

    monkeypatch.setattr(Index, "count", refuse)
    with pytest.raises(StoreError, match="cannot be opened: Cannot allocate memory"):
        reader._index.count("blocks")
    reader.close()
