"""Payloads as values of LMDB: what differs from a slab."""

import os
import random
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.errors import ConfigError, StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.types import Status

INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 10 << 20}


def frames(store: StoreDriver) -> lmdb.Environment:
    """The table of payloads of a store that is closed."""
    return lmdb.open(str(store.path / "payload"), map_size=64 << 20)


def key_of_row(store: StoreDriver, number: int) -> bytes:
    return store.offset_of(number).to_bytes(8, "big")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("position", [0, 45, 50, 70, 5000])
def test_a_damaged_frame_is_corrupt(tmp_path: Path, position: int, verify: bool) -> None:
    """A rotten disk's bytes would reach attention."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1, 2, 3])
    store.close()
    with frames(store) as env, env.begin(write=True) as txn:
        row = bytearray(txn.get(key_of_row(store, 2)))
        row[position] ^= 1
        txn.put(key_of_row(store, 2), bytes(row))
    store.reopen(verify=verify)
    assert store.read([1, 2, 3]) == [Status.DONE, Status.CORRUPT, Status.DONE]
    assert store.write([], evict=[2]) == [Status.DONE]
    assert store.write([4]) == [Status.DONE]
    assert store.read([4]) == [Status.DONE]
    store.close()


@pytest.mark.parametrize("verify", [True, False])
def test_a_frame_of_another_block_is_not_served(tmp_path: Path, verify: bool) -> None:
    """An intact frame that came to another slot's row would pass for the block that belongs there."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1, 2, 3])
    store.close()
    with frames(store) as env, env.begin(write=True) as txn:
        txn.put(key_of_row(store, 1), txn.get(key_of_row(store, 2)))
        txn.delete(key_of_row(store, 3))
    store.reopen(verify=verify)
    assert store.read([1, 2, 3]) == [Status.CORRUPT, Status.DONE, Status.CORRUPT]
    store.close()


@pytest.mark.parametrize(("first", "second"), [("slab", "inline"), ("inline", "slab")])
def test_a_store_keeps_its_kind(tmp_path: Path, first: str, second: str) -> None:
    """A store would look empty after a change of the configuration, and be written over."""
    store = StoreDriver(tmp_path / "s", **INLINE | {"payload": first})
    store.write([1])
    store.close()
    with pytest.raises(ConfigError, match=rf"payload.*made with payload: {first}.*Use {first}"):
        StoreDriver(tmp_path / "s", **INLINE | {"payload": second})
    store.reopen()
    assert store.read([1]) == [Status.DONE]
    store.close()


def test_the_capacity_holds_and_a_full_table_is_a_value(tmp_path: Path) -> None:
    """A table that is full of holes would fail the batch with an error, or outgrow the capacity."""
    capacity_bytes = 6 << 20
    store = StoreDriver(tmp_path / "s", **INLINE | {"capacity_bytes": capacity_bytes})
    rng = random.Random(0)
    start, seen = 0, set()
    for _ in range(150):
        numbers = range(start, start + 8)
        start += 8
        room = store.tier.room(16_384)
        leaving = sorted(store.kept)[: max(0, 10 - room)]
        seen |= set(store.write(numbers, rng.choice([100, 4096, 9000, 16_384]), evict=leaving))
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").rglob("*") if path.is_file())
        assert used <= capacity_bytes
    assert seen <= {Status.DONE, Status.NO_ROOM}
    assert store.read(sorted(store.kept)) == [Status.DONE] * len(store.kept)
    assert len(store.kept) > 50
    assert store.tier.check() == []
    store.reopen()
    assert store.read(sorted(store.kept)) == [Status.DONE] * len(store.kept)
    store.close()


def test_errors_of_lmdb_hit_the_batch_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or failing disk would be an exception on the writer's thread."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1])
    table = store.tier._store.slab.table
    env = table._env
    for error, status in ((lmdb.MapFullError("x"), Status.NO_ROOM), (lmdb.Error("x"), Status.FAILED)):

        class Refusing:
            def begin(self, write: bool = False, **options: object) -> object:
                raise error  # noqa: B023

            def __getattr__(self, name: str) -> object:
                return getattr(env, name)

        with monkeypatch.context() as patch:
            patch.setattr(table, "_env", Refusing())
            assert store.write([2, 3]) == [status] * 2
            assert store.read([1]) == [Status.FAILED]
    assert store.read([1]) == [Status.DONE]
    assert store.tier.check() == []
    store.close()


def test_others_on_the_disk_cost_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB gives nothing back: a store that gives way would lose all its blocks for nothing."""
    store = StoreDriver(tmp_path / "s", **INLINE | {"min_free_bytes": 1 << 20})
    store.write([1])
    monkeypatch.setattr(type(store.tier._store.slab.file), "disk_free_bytes", lambda self: 0)
    store.write([])
    assert store.tier.excess_bytes() == 0
    assert store.read([1]) == [Status.DONE]
    store.close()


def test_a_truncated_table_does_not_end_the_process(tmp_path: Path) -> None:
    """LMDB would follow a page number out of its map: SIGBUS."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(30), 16_384)
    store.close()
    data = tmp_path / "s" / "payload" / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(StoreFormatError, match=r"payloads cannot be read.*Delete the folder"):
        store._open()


def test_a_capacity_that_is_too_small_is_refused_with_one_that_does(tmp_path: Path) -> None:
    """The size that the refusal names would be refused again."""
    with pytest.raises(ConfigError, match=r"2/5 of the capacity") as refused:
        StoreDriver(tmp_path / "s", **INLINE | {"capacity_bytes": 1 << 20})
    needed_bytes = int(refused.value.remedy.split()[3])
    assert needed_bytes > 1 << 20
    StoreDriver(tmp_path / "s", **INLINE | {"capacity_bytes": needed_bytes}).close()
