"""Batches that are written together: one sync and one transaction, and yet each ends as it would alone."""

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import pytest

from kvtier.testing.stores import StoreDriver, Told
from kvtier.testing.tiers import payload_of
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import Change, Index, IndexFull
from kvtier.types import Status

DONE, NO_ROOM, FAILED, MISSING = Status.DONE, Status.NO_ROOM, Status.FAILED, Status.MISSING
PAGE = 4096


class Disk(BlockFile):
    """A slab that notes what is done to it, and refuses blocks by their content, or to sync."""

    did: list[str | tuple[int, int]]  # "sync", "commit", "index sync", or the bounds of a write
    refused: dict[bytes, int]  # the first bytes of a block -> errno
    sync_errno = 0

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        type(self).did.append((offset, offset + sum(map(len, buffers))))
        for buffer in buffers:
            if code := type(self).refused.get(bytes(buffer[:16])):
                raise OSError(code, os.strerror(code))
        return super().write(buffers, offset)

    def sync(self) -> None:
        type(self).did.append("sync")
        if code := type(self).sync_errno:
            raise OSError(code, os.strerror(code))
        super().sync()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Disk]]:
    class Fresh(Disk):
        did = []
        refused = {}

    commit, sync = Index.commit, Index.sync
    monkeypatch.setattr(Index, "commit", lambda index, change: (Fresh.did.append("commit"), commit(index, change))[1])
    monkeypatch.setattr(Index, "sync", lambda index: (Fresh.did.append("index sync"), sync(index))[1])
    return Fresh


def opened(path: Path, disk: type[Disk], **options: object) -> StoreDriver:
    """A store whose disk has done nothing yet."""
    store = StoreDriver(path / "s", open_file=disk.open, **{"durability": "batch"} | options)
    disk.did.clear()
    return store


def refuse(disk: type[Disk], number: int, code: int, length_bytes: int = 5000) -> None:
    disk.refused[payload_of(number, length_bytes)[:16]] = code


@pytest.mark.parametrize(
    ("durability", "syncs"),
    [("none", ["commit"]), ("batch", ["sync", "commit", "index sync"]), ("strict", ["sync", "commit"])],
)
def test_one_sync_and_one_transaction_for_all(
    tmp_path: Path, disk: type[Disk], durability: str, syncs: list[str]
) -> None:
    """Each of the batches that wait would pay for flushes of its own; or, in mode `batch`, a crash could undo several
    that were acknowledged."""
    store = opened(tmp_path, disk, durability=durability)
    store.write([1, 2, 3])
    disk.did.clear()
    ends = store.write_together(
        Told([4, 5], evict=[1], sidecar={"a": b"old", "b": b"1"}),
        Told([], evict=[2]),
        Told([6], 9000, sidecar={"a": b"new"}),
        Told(),
    )
    assert ends == [[DONE] * 4, [DONE], [DONE] * 2, []]
    assert [what for what in disk.did if isinstance(what, str)] == syncs
    store.reopen()
    assert sorted(store.kept) == [3, 4, 5, 6]
    assert store.read([3, 4, 5, 6]) == [DONE] * 4
    assert dict(store.tier.sidecar()) == {b"a": b"new", b"b": b"1"}
    store.close()


def test_a_lone_batch_pays_what_it_always_paid(tmp_path: Path, disk: type[Disk]) -> None:
    """A third flush for everybody, for the sake of those that go together."""
    store = opened(tmp_path, disk)
    assert store.write_together(Told([1])) == [[DONE]]
    assert [what for what in disk.did if isinstance(what, str)] == ["sync", "commit"]
    store.close()


@pytest.mark.parametrize(
    ("code", "statuses"), [(errno.ENOSPC, [NO_ROOM, DONE, NO_ROOM]), (errno.EIO, [FAILED, DONE, DONE])]
)
def test_a_block_that_the_disk_refuses(tmp_path: Path, disk: type[Disk], code: int, statuses: list[Status]) -> None:
    """One batch's bad block keeps the blocks of others out, or their evictions."""
    store = opened(tmp_path, disk)
    store.write([1, 2])
    refuse(disk, 3, code)
    ends = store.write_together(Told([3, 4], evict=[1]), Told([5, 6], evict=[2]))
    assert ends == [statuses, [DONE] * 3]
    assert store.tier.check() == []
    store.reopen()
    assert sorted(store.kept) == [4, 5, 6] if code == errno.EIO else [1, 4, 5, 6]
    store.close()


def test_a_sync_that_fails_ends_all_that_was_written(tmp_path: Path, disk: type[Disk]) -> None:
    """A page that the kernel dropped is called durable; or a batch that wrote nothing has to suffer for it."""
    store = opened(tmp_path, disk)
    store.write([1, 2])
    disk.sync_errno = errno.EIO
    ends = store.write_together(Told([3], evict=[1]), Told([], evict=[2], sidecar={"a": b"1"}), Told([4]))
    disk.sync_errno = 0
    assert ends == [[FAILED] * 2, [DONE] * 2, [FAILED]]
    assert len(store.tier.findings) == 1
    store.reopen()
    assert sorted(store.kept) == [1]
    assert dict(store.tier.sidecar()) == {b"a": b"1"}
    store.close()


def refusing(monkeypatch: pytest.MonkeyPatch, hopeless: Callable[[Change], bool], error: Exception) -> None:
    """Transactions with certain rows do not happen."""
    commit = Index.commit

    def tried(index: Index, change: Change) -> None:
        if hopeless(change):
            raise error
        commit(index, change)

    monkeypatch.setattr(Index, "commit", tried)


@pytest.mark.parametrize(
    ("error", "status"), [(lmdb.DiskError("no space"), NO_ROOM), (lmdb.Error("input/output"), FAILED)]
)
def test_a_transaction_that_fails_is_tried_without_the_others(
    tmp_path: Path, disk: type[Disk], monkeypatch: pytest.MonkeyPatch, error: lmdb.Error, status: Status
) -> None:
    """What the index has no room for in one batch is lost for all that went with it."""
    store = opened(tmp_path, disk)
    store.write([1, 2, 3])
    room = store.tier.room(5000)
    with monkeypatch.context() as patch:
        refusing(patch, lambda change: b"bad" in change.sidecar, error)
        ends = store.write_together(
            Told([4], evict=[1]), Told([5, 6], evict=[2], sidecar={"bad": b"x"}), Told([7], evict=[3])
        )
    assert ends == [[DONE] * 2, [status] * 4, [DONE] * 2]
    assert store.tier.check() == []
    assert store.tier.room(5000) == room, "two for two: the slots of those that failed are free again"
    store.reopen()
    assert sorted(store.kept) == [2, 4, 7]
    store.close()


def test_a_sidecar_for_which_there_is_no_room_is_given_up_alone(
    tmp_path: Path, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch's long row costs all others theirs."""
    store = opened(tmp_path, disk)
    monkeypatch.setattr(store.tier._room, "grow_index", lambda evicting: False)
    refusing(monkeypatch, lambda change: b"long" in change.sidecar, IndexFull("no"))
    ends = store.write_together(Told([1], sidecar={"a": b"1"}), Told([2], sidecar={"long": b"x"}))
    assert ends == [[DONE, DONE], [DONE, NO_ROOM]]
    assert dict(store.tier.sidecar()) == {b"a": b"1"}
    store.close()


def test_an_index_that_stopped_takes_nothing_more(
    tmp_path: Path, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches behind the one that broke it are called done."""
    store = opened(tmp_path, disk)
    monkeypatch.setattr(Index, "is_writable", lambda index: False)
    refusing(monkeypatch, lambda change: True, lmdb.Error("half a page"))
    assert store.write_together(Told([1]), Told([2], sidecar={"a": b"1"})) == [[FAILED], [FAILED] * 2]
    assert store.write([3]) == [FAILED]
    store.close()


def test_a_head_that_cannot_be_synced_stops_the_index(
    tmp_path: Path, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several batches are called done that one crash may undo, and more follow."""

    def fail(index: Index) -> None:
        raise lmdb.Error("input/output")

    store = opened(tmp_path, disk)
    store.write([1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(Index, "sync", fail)
        ends = store.write_together(Told([3], evict=[1]), Told([4], sidecar={"a": b"1"}), Told([], evict=[2]))
        assert ends == [[FAILED] * 2, [FAILED] * 2, [FAILED]]
    written = (tmp_path / "s" / "slab").read_bytes()
    assert store.write([5], evict=[1]) == [FAILED] * 2, "also once the disk is well again"
    assert (tmp_path / "s" / "slab").read_bytes() == written
    assert set(store.read([1, 2])) == {Status.MISSING}
    assert store.tier.room(5000) == 0
    store.tier.close()
    store = opened(tmp_path, disk)
    store.rescan(range(10))
    assert sorted(store.kept) in ([1, 2], [3, 4]), "before or after, and nothing between"
    assert store.read(sorted(store.kept)) == [DONE] * 2
    assert store.tier.check() == []
    store.close()


def test_who_needs_the_room_of_another_waits_for_its_commit(tmp_path: Path, disk: type[Disk]) -> None:
    """A full store refuses blocks for whom others leave; or a slot is written over whose record still counts."""
    store = opened(tmp_path, disk)
    number = 0
    while store.write([number]) == [DONE]:
        number += 1
    freed = {store.offset_of(n) for n in (0, 1)}
    disk.did.clear()
    ends = store.write_together(Told([], evict=[0, 1]), Told([number, number + 1]), Told([number + 2]))
    assert ends == [[DONE] * 2, [DONE] * 2, [NO_ROOM]]
    written = {start for start, _ in (what for what in disk.did if not isinstance(what, str))}
    assert min(written) in freed
    assert disk.did.index("commit") < min(i for i, what in enumerate(disk.did) if not isinstance(what, str))
    assert store.tier.check() == []
    store.close()


def test_a_block_leaves_once(tmp_path: Path, disk: type[Disk]) -> None:
    """Two batches that evict one block count its slot as free twice."""
    store = opened(tmp_path, disk)
    store.write([1, 2])
    told = Told([], evict=[1])
    batches = [store.batch(told), store.batch(Told([3], evict=[1])), store.batch(told)]
    ends = [[outcome.status for outcome in outcomes] for outcomes in store.tier.write_together(batches)]
    assert ends == [[DONE], [DONE, MISSING], [MISSING]]
    assert store.tier.check() == []
    store.close()


@pytest.mark.parametrize("payload", ["slab", "inline"])
@pytest.mark.parametrize("seed", range(3))
def test_together_as_one_after_the_other(tmp_path: Path, seed: int, payload: str) -> None:
    """A batch ends otherwise because others wait behind or before it."""
    chance = random.Random(seed)
    stores = [StoreDriver(tmp_path / name, payload=payload, capacity_bytes=3 << 20) for name in ("group", "single")]
    number = refused = 0
    for _ in range(12):
        batches = []
        left = list(stores[0].kept)
        for _ in range(chance.randint(1, 5)):
            numbers = range(number, number + chance.randint(0, 60))
            number = numbers.stop
            evict = chance.sample(left, chance.randint(0, len(left) // 3))
            left = [n for n in left if n not in evict]
            rows = {f"row {chance.randrange(4)}": bytes([chance.randrange(256)])} if chance.random() < 0.5 else {}
            batches.append(Told(numbers, 16_000, evict, rows))
        together = stores[0].write_together(*batches)
        assert together == [
            stores[1].write(told.numbers, told.length_bytes, told.evict, **told.sidecar) for told in batches
        ]
        refused += sum(statuses.count(NO_ROOM) for statuses in together)
    assert refused
    for store in stores:
        store.reopen()
    sidecars = [dict(store.tier.sidecar()) for store in stores]
    assert sidecars[0] == sidecars[1]
    assert stores[0].read(list(stores[0].kept)) == [DONE] * len(stores[0].kept)
    assert stores[0].tier.check() == []
    for store in stores:
        store.close()
