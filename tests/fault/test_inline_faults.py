"""Inline payloads on a disk that fails: after a commit nothing raises, and what was told is there after a restart."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.cli.cmd_gc import gc
from kvtier.errors import StoreError, StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.inline_file import InlineFile
from kvtier.tiers.lmdb.layout import ID_KEY, encode_extent
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.upkeep import Upkeep
from kvtier.types import Status

DONE, NO_ROOM, FAILED = Status.DONE, Status.NO_ROOM, Status.FAILED
MIB = 1 << 20
LENGTH = 16_384
INLINE: dict[str, Any] = {"payload": "inline", "capacity_bytes": 10 * MIB, "durability": "strict"}


def with_code(code: int) -> lmdb.Error:
    error = lmdb.Error(os.strerror(code))
    error.code = code
    return error


ERRORS = {
    "map full": (lmdb.MapFullError("full"), NO_ROOM),
    "disk full": (lmdb.DiskError("full"), NO_ROOM),
    "broken": (with_code(errno.EIO), FAILED),
}
every_error = pytest.mark.parametrize("name", ERRORS)


class FailingEnv:
    """The table of payloads of an open store; after so many more of its write transactions all of them fail."""

    def __init__(self, store: StoreDriver) -> None:
        table = store.tier._store.slab.table
        self._env = table._env
        self._error: lmdb.Error | None = None
        self._passing = 0
        table._env = self

    def fail(self, error: lmdb.Error | None, passing: int = 0) -> None:
        self._error, self._passing = error, passing

    def begin(self, write: bool = False, **options: Any) -> Any:
        if write and self._error is not None:
            self._passing -= 1
            if self._passing < 0:
                raise self._error
        return self._env.begin(write=write, **options)

    def rows(self) -> int:
        with self._env.begin() as txn:
            return sum(len(key) == 8 for key, _ in txn.cursor())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def filled(folder: Path, **options: Any) -> StoreDriver:
    """Several extents."""
    store = StoreDriver(folder, **INLINE | options)
    assert set(store.write(range(100), LENGTH)) == {DONE}
    assert store.tier._store.allocator.lent_extents >= 2
    return store


def lasts(store: StoreDriver, numbers: range) -> None:
    """Blocks that are written now are all there after a clean restart."""
    assert set(store.write(numbers, LENGTH)) == {DONE}
    assert store.tier.check() == []
    told = set(store.kept)
    assert set(numbers) <= told
    store.reopen()
    assert set(store.kept) == told
    assert store.tier.findings == []
    assert set(store.read(sorted(told))) == {DONE}
    store.close()


# ---------------------------------------------------------------- where extents become empty


@every_error
@pytest.mark.parametrize("passing", [0, 1, 2])
@pytest.mark.parametrize("verb", ["evict", "drop"])
def test_rows_that_cannot_be_deleted_cost_no_block(tmp_path: Path, name: str, passing: int, verb: str) -> None:
    """What is stored next in an emptied extent would be told as kept, and be gone after a clean restart."""
    store = filled(tmp_path / "s")
    if passing:
        store.reopen()  # what an extent was lent to is known from its row then
    env = FailingEnv(store)
    env.fail(ERRORS[name][0], passing)
    if verb == "evict":
        assert set(store.write([], evict=range(100))) == {DONE}
    else:
        assert store.tier.drop(store.namespace).done
        store.kept.clear()
    assert store.tier.check() == []
    env.fail(None)
    lasts(store, range(200, 260))


@every_error
def test_rows_are_deleted_as_soon_as_that_can_be(tmp_path: Path, name: str) -> None:
    """The table would be full of payloads that nobody finds, until the store is opened anew."""
    store = filled(tmp_path / "s")
    env = FailingEnv(store)
    env.fail(ERRORS[name][0])
    store.write([], evict=range(50, 100))
    assert env.rows() == 100
    lent = store.tier._store.allocator.lent_extents
    assert store.tier._store.occupied_extents() > lent
    store.write([])
    assert env.rows() == 100
    env.fail(None)
    store.write([])
    extent_slots = store.tier._store.header.extent_bytes // LENGTH
    assert env.rows() <= 50 + extent_slots
    assert store.tier._store.occupied_extents() == lent
    lasts(store, range(200, 240))


def refuse_deleting(code: int) -> Callable[[InlineFile, int, int], None]:
    def refuse(file: InlineFile, start: int, end: int) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_an_extent_that_is_lent_again_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting late what an extent held would take what it holds now."""
    store = filled(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(InlineFile, "_delete", refuse_deleting(errno.ENOSPC))
        store.write([], evict=range(100))
        assert set(store.write(range(200, 250), LENGTH)) == {DONE}
    for _ in range(10):
        store.write([])
    assert set(store.read(range(200, 250))) == {DONE}
    assert FailingEnv(store).rows() < 100, "those of extents that nobody has are gone"
    lasts(store, range(300, 310))


@every_error
def test_a_refused_payload_leaves_its_extent(tmp_path: Path, name: str) -> None:
    """The slots of a batch that failed would be lost, or the batch end in an exception."""
    store = filled(tmp_path / "s")
    error, status = ERRORS[name]
    env = FailingEnv(store)
    store.tier._store.slab.file._end_at = lambda length, change: None  # lending is not what fails
    env.fail(error)
    assert set(store.write(range(200, 240), 9000)) == {status}
    del store.tier._store.slab.file._end_at
    assert store.tier.check() == []
    env.fail(None)
    assert set(store.read(range(100))) == {DONE}
    lasts(store, range(300, 340))


@every_error
def test_an_extent_that_cannot_be_lent(tmp_path: Path, name: str) -> None:
    """A batch would end in an exception, and its slots stay taken."""
    store = filled(tmp_path / "s")
    env = FailingEnv(store)
    before = store.tier._store.slab.file.disk_bytes()
    env.fail(ERRORS[name][0])
    assert set(store.write(range(200, 210), 9000)) == {NO_ROOM}
    assert store.tier._store.slab.file.disk_bytes() <= before
    assert store.tier.check() == []
    env.fail(None)
    lasts(store, range(300, 340))


@every_error
def test_an_index_that_fails_with_the_payloads(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving the slots of a failed commit back would raise in place of the outcomes."""
    store = filled(tmp_path / "s")
    env = FailingEnv(store)

    def refuse(change: Change) -> None:
        env.fail(ERRORS[name][0])
        raise lmdb.Error("no")

    with monkeypatch.context() as patch:
        patch.setattr(store.tier._store.index, "commit", refuse)
        assert set(store.write(range(200, 230), 9000, evict=[1])) == {FAILED}
    assert store.tier.check() == []
    env.fail(None)
    lasts(store, range(300, 340))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_opening_goes_on_without_what_cannot_be_deleted(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is to be smaller on a failing disk would not open, and all of it be lost."""
    store = filled(tmp_path / "s")

    with monkeypatch.context() as patch:
        patch.setattr(InlineFile, "_delete", refuse_deleting(code))
        store.reopen(capacity_bytes=6 * MIB)
        assert store.tier._store.settled
        assert 0 < len(store.kept) < 100
        assert set(store.read(sorted(store.kept))) == {DONE}
    store.write([])
    assert FailingEnv(store).rows() == len(store.kept)
    lasts(store, range(200, 210))


def test_gc_says_that_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk would end gc in a traceback."""
    store = filled(tmp_path / "s")
    monkeypatch.setattr(InlineFile, "_delete", refuse_deleting(errno.EIO))
    store.write([], evict=range(10, 100))
    store.close()
    with pytest.raises(StoreError, match="could not be cut"):
        gc(tmp_path / "s")


# ---------------------------------------------------------------- what a check sees


@pytest.mark.parametrize("payload", ["slab", "inline"])
def test_a_check_misses_rows_of_extents(tmp_path: Path, payload: str) -> None:
    """Blocks that no opening will believe would pass for stored as long as the cache runs."""
    store = filled(tmp_path / "s", payload=payload)
    assert store.tier.check() == []
    index = store.tier._store.index
    index.commit(Change(extents={ID_KEY.pack(1): None}))
    assert store.tier.check() == ["extent 1: lent to slots of 4 pages, and there is no row of it"]
    index.commit(Change(extents={ID_KEY.pack(1): encode_extent(1, 3)}))
    assert store.tier.check() == ["extent 1: lent to slots of 4 pages, and its row says 3"]
    store.close()


# ---------------------------------------------------------------- the same for a slab


class FailingSlab(BlockFile):
    """A slab of which the disk takes nothing back, or says nothing, while it is told to."""

    broken = False

    def punch(self, offset: int, length: int) -> bool:
        return not type(self).broken and super().punch(offset, length)

    def length_bytes(self) -> int:
        if type(self).broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().length_bytes()


class FailingCut(FailingSlab):
    """The same on a filesystem that cannot punch at all."""

    def punch(self, offset: int, length: int) -> bool:
        return False


@pytest.mark.parametrize("base", [FailingSlab, FailingCut])
def test_a_slab_whose_disk_cannot_be_given_back(tmp_path: Path, base: type[FailingSlab]) -> None:
    """A batch would end in an exception after its commit, or the disk of what left never be given back."""

    class Disk(base):  # type: ignore[misc, valid-type]
        pass

    store = filled(tmp_path / "s", payload="slab", open_file=Disk.open)
    before = store.tier._store.slab.file.disk_bytes()
    Disk.broken = True
    assert set(store.write([], evict=range(100))) == {DONE}
    assert store.tier._store.slab.file.disk_bytes() == before
    Disk.broken = False
    store.write([200], LENGTH)
    store.write([], evict=[200])
    assert store.tier._store.slab.file.disk_bytes() < before // 10
    lasts(store, range(300, 340))


@pytest.mark.parametrize("payload", ["slab", "inline"])
def test_readers_that_cannot_be_looked_at(tmp_path: Path, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What LMDB says about its table of readers would be an exception after a commit."""
    store = filled(tmp_path / "s", payload=payload)

    def broken() -> int:
        raise with_code(errno.EIO)

    monkeypatch.setattr(store.tier._store.index, "release_dead_readers", broken)
    if payload == "inline":
        FailingEnv(store).reader_check = broken  # type: ignore[attr-defined]
    store.tier._room._readers_due_s = 0.0
    lasts(store, range(200, 210))


# ---------------------------------------------------------------- what counts as full


@pytest.mark.parametrize(("free_bytes", "status"), [(0, NO_ROOM), (1 << 30, FAILED)])
def test_a_write_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: Status
) -> None:
    """A full disk would count as a broken one, and the tier be left alone instead of evicting."""
    store = filled(tmp_path / "s")
    env = FailingEnv(store)
    env.fail(with_code(errno.EIO))
    with monkeypatch.context() as patch:
        patch.setattr(type(store.tier._store.slab.table), "disk_free_bytes", lambda table: free_bytes)
        slots = store.tier._store.allocator.free_slots(LENGTH // 4096)
        assert store.write(range(200, 200 + slots), LENGTH) == [status] * slots
    env.fail(None)
    lasts(store, range(300, 310))


# ---------------------------------------------------------------- opening


def test_payloads_that_this_process_cannot_open_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user would be told to delete a store of which one read failed."""
    store = filled(tmp_path / "s")
    store.close()
    opened = lmdb.open

    def refuse(path: str, **options: Any) -> Any:
        if path.endswith("payload"):
            raise with_code(errno.EIO)
        return opened(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", refuse)
        for call in (store._open, lambda: StoreReader.open(tmp_path / "s"), lambda: Upkeep.open(tmp_path / "s")):
            with pytest.raises(StoreError, match="the payloads cannot be opened") as caught:
                call()
            assert not isinstance(caught.value, StoreFormatError)
    store.tier = store._open()
    assert set(store.read(range(100))) == {DONE}
    store.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_payloads_in_the_hands_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whoever may not enter the table of readers would be told that the store is broken."""
    store = filled(tmp_path / "s")
    store.close()
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(str(path)) == tmp_path / "s" / "payload" / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        StoreReader.open(tmp_path / "s", live=True)
