"""What a store with `payload: inline` takes of its disk, and gives back."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.cmd_gc import gc
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import inline_file, upkeep
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.inline_file import InlineFile
from kvtier.tiers.lmdb.payload_table import DELETE_RESERVE_BYTES, PayloadTable
from kvtier.types import PAGE_BYTES, Status

DONE, NO_ROOM = Status.DONE, Status.NO_ROOM
MIB = 1 << 20
INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 30 * MIB, "durability": "batch"}


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def gone(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert gc(folder, json_output=True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_min_free_holds_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB takes half as much again as the blocks: the disk that was to stay free is what it takes it from."""
    folder, disk_bytes, min_free_bytes = tmp_path / "s", 16 * MIB, 4 * MIB
    monkeypatch.setattr(InlineFile, "disk_free_bytes", lambda file: disk_bytes - taken_bytes(folder))
    store = StoreDriver(folder, **INLINE | {"capacity_bytes": 60 * MIB, "min_free_bytes": min_free_bytes})
    for batch in range(60):  # a page more for the frame of each: LMDB takes 1.5 or 1.25 times what a slot takes
        length_bytes = (8192, 16_384)[batch // 10 % 2]
        leaving = list(store.kept)[: max(0, 40 - store.tier.room(length_bytes))]
        store.write(range(batch * 20, batch * 20 + 20), length_bytes, leaving)
        assert taken_bytes(folder) <= disk_bytes - min_free_bytes
    assert taken_bytes(folder) > (disk_bytes - min_free_bytes) * 2 // 3, "and yet it is used"
    assert store.read(list(store.kept)) == [DONE] * len(store.kept)
    store.close()


def test_pages_are_used_again(tmp_path: Path) -> None:
    """A store that is full grows with all that comes and goes, up to its capacity."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    numbers, at = range(500), 0
    room = store.tier.room(16_384)
    store.write(range(room // 2), 16_384)
    data = tmp_path / "s" / "payload" / "data.mdb"
    for _ in range(4):  # the first rounds find its size
        numbers = range(10_000 + at, 10_000 + at + 32)
        at += 32
        store.write(numbers, 16_384, list(store.kept)[:32])
    before = data.stat().st_size
    for _ in range(40):
        numbers = range(10_000 + at, 10_000 + at + 32)
        at += 32
        assert set(store.write(numbers, 16_384, list(store.kept)[:32])) == {DONE}
    assert data.stat().st_size <= before * 11 // 10
    store.close()


def test_what_cannot_be_claimed_is_not_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has no room fails in the middle of LMDB's commit; or what was claimed in vain stays taken."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1], 16_384)
    file, claim = store.tier._store.slab.file, inline_file.claim
    before, limit = file.disk_bytes(), file.takes_bytes(file.length_bytes())

    def claim_a_part(fd: int, length: int) -> None:
        claim(fd, (limit + length) // 2 if length > limit else length)
        if length > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    slots = store.tier._store.header.extent_bytes // 16_384
    with monkeypatch.context() as patch:
        patch.setattr(inline_file, "claim", claim_a_part)
        assert store.write(range(2, 2 + slots), 16_384) == [DONE] * (slots - 1) + [NO_ROOM]
        assert file.disk_bytes() <= before
    assert store.write([999], 16_384) == [DONE], "as soon as there is room"
    assert store.read(list(store.kept)) == [DONE] * (slots + 1)
    assert store.tier.check() == []
    store.close()


def test_gc_gives_the_disk_of_what_left_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that was full once takes its disk for ever."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(400), 16_384)
    store.write([], evict=range(10, 400))
    store.close()
    data = tmp_path / "s" / "payload" / "data.mdb"
    assert data.stat().st_blocks * 512 > 6 * MIB
    found = gone(capsys, tmp_path / "s")
    assert found["compacted"]
    assert found["disk_bytes"]["slab"] > 5 * MIB
    assert data.stat().st_blocks * 512 < 1 * MIB
    assert not gone(capsys, tmp_path / "s")["compacted"], "once is enough"
    store.tier = store._open()
    assert store.read(list(store.kept)) == [DONE] * 10
    assert store.write(range(500, 800), 16_384) == [DONE] * 300
    assert store.read(list(store.kept)) == [DONE] * 310
    assert store.tier.check() == []
    store.close()


def test_gc_gives_no_negative_disk_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deleting takes a few pages at first: who adds up what gc gives back would be told less than nothing."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(400), 5000)
    store.write([], evict=range(100, 400))
    store.close()
    assert gone(capsys, tmp_path / "s")["compacted"], "there are no free pages"
    store.tier = store._open()
    store.write([], evict=range(20))
    store.close()
    assert gone(capsys, tmp_path / "s")["disk_bytes"] == {"slab": 0, "index": 0}


def test_a_full_disk_leaves_the_table_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for a second table, gc fails with all that it could do, or leaves a half one."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write(range(400), 16_384)
    store.write([], evict=range(10, 400))
    store.close()

    def refuse(slab: InlineSlab, fd: int) -> None:
        os.write(fd, bytes(PAGE_BYTES))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(upkeep.InlineSlab, "copy_to", refuse)
        assert gone(capsys, tmp_path / "s")["disk_bytes"]["slab"] >= 0
    assert sorted(path.name for path in (tmp_path / "s" / "payload").iterdir()) == ["data.mdb", "lock.mdb"]
    store.tier = store._open()
    assert store.read(list(store.kept)) == [DONE] * 10
    store.close()


@pytest.mark.parametrize("table", ["index", "payload"])
def test_an_interrupted_copy_goes_when_the_store_is_opened(tmp_path: Path, table: str) -> None:
    """Half a copy takes disk beyond the capacity until somebody runs gc again."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    store.write([1])
    store.close()
    fresh = tmp_path / "s" / table / "data.mdb.new"
    fresh.write_bytes(bytes(MIB))
    store.reopen()
    assert not fresh.exists()
    assert store.read([1]) == [DONE]
    store.close()


def test_the_capacity_changes_while_the_store_is_open(tmp_path: Path) -> None:
    """A server has to be stopped to give its store more, or less, of the disk; or it takes more than that."""
    store = StoreDriver(tmp_path / "s", **INLINE | {"capacity_bytes": 12 * MIB})
    room = store.tier.room(16_384)
    assert set(store.write(range(room), 16_384)) == {DONE}
    assert store.write([998], 16_384) == [NO_ROOM]
    assert store.tier.change_capacity(30 * MIB).done
    assert store.tier._store.slab.table.map_bytes() == 18 * MIB - DELETE_RESERVE_BYTES
    more = store.tier.room(16_384)
    assert more > room
    assert set(store.write(range(room, room + more), 16_384)) == {DONE}
    assert taken_bytes(tmp_path / "s") <= 30 * MIB
    assert store.tier.change_capacity(12 * MIB).done
    assert store.tier.capacity_bytes == 12 * MIB
    assert store.write([999], 16_384) == [NO_ROOM]
    while store.tier.excess_bytes():
        store.write([], evict=sorted(store.kept)[:10])
    before = taken_bytes(tmp_path / "s")
    numbers = iter(range(1000, 3000))
    for _ in range(20):
        assert set(store.write([], evict=sorted(store.kept)[:10])) == {DONE}
        assert set(store.write([next(numbers) for _ in range(10)], 16_384)) == {DONE}
    assert taken_bytes(tmp_path / "s") <= before, "the table has long been as long as it may be"
    assert 0 < len(store.kept) <= room
    assert store.tier.check() == []
    kept = set(store.kept)
    store.reopen(capacity_bytes=12 * MIB)
    assert set(store.kept) == kept
    assert store.read(sorted(kept)) == [DONE] * len(kept)
    store.close()


def test_a_full_table_can_be_made_smaller(tmp_path: Path) -> None:
    """LMDB needs pages to delete: a store that was full would store nothing any more under a smaller capacity."""
    store = StoreDriver(tmp_path / "s", **INLINE)
    room = store.tier.room(16_384)
    assert set(store.write(range(room), 16_384)) == {DONE}
    store.reopen(capacity_bytes=12 * MIB)
    assert 0 < len(store.kept) < room
    for number in range(5):
        assert set(store.write(range(1000 + 20 * number, 1010 + 20 * number), 16_384)) <= {DONE, NO_ROOM}
        assert set(store.write([], evict=sorted(store.kept)[:10])) == {DONE}
    assert set(store.write(range(2000, 2010), 16_384)) == {DONE}
    assert store.read(sorted(store.kept)) == [DONE] * len(store.kept)
    store.close()


def test_a_table_that_cannot_be_limited_gets_its_limit_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resize to less ends in an exception, after its commit."""
    store = StoreDriver(tmp_path / "s", **INLINE)

    def refuse(table: PayloadTable, map_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(PayloadTable, "limit", refuse)
        assert store.tier.change_capacity(12 * MIB).done
    room = store.tier.room(16_384)
    assert set(store.write(range(room), 16_384)) == {DONE}
    assert store.write([500], 16_384) == [NO_ROOM], "the slots hold the capacity"
    store.reopen(capacity_bytes=12 * MIB)
    assert store.tier._store.slab.table.map_bytes() <= 12 * MIB
    assert len(store.kept) == room
    store.close()


def test_the_map_does_not_change_under_a_reader(tmp_path: Path) -> None:
    """LMDB unmaps the pages that somebody copies a block out of: the process ends."""
    table = PayloadTable.open(tmp_path, "none", MIB)
    order, ready = [], threading.Event()

    def change() -> None:
        ready.set()
        table.limit(2 * MIB)
        order.append("changed")

    with table.reading() as txn:
        other = threading.Thread(target=change)
        other.start()
        ready.wait()
        for _ in range(10_000):
            txn.get(b"x")
        order.append("read")
    other.join()
    assert order == ["read", "changed"]
    assert table.map_bytes() == 2 * MIB
    table.close()
