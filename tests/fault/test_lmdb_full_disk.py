"""A full disk: what is stored can still be read, nothing is lost, and storing goes on when there is room again."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import StoreError, StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import blockfile, opening, settings
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES
from kvtier.tiers.lmdb.index import Index
from kvtier.tiers.lmdb.lock import StoreLock, WriterState, boot_id
from kvtier.types import Status

DONE, NO_ROOM, FAILED = Status.DONE, Status.NO_ROOM, Status.FAILED


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile(BlockFile):
    """A slab on a full disk."""

    def disk_free_bytes(self) -> int:
        return 0

    def allocate(self, offset: int, length: int) -> None:
        raise full()


def cut_short() -> lmdb.Error:
    """What LMDB says when the kernel took only a part of a page: EIO, whatever the reason."""
    error = lmdb.Error("mdb_txn_commit: Input/output error")
    error.code = errno.EIO
    return error


@pytest.mark.parametrize("where", ["the lock", "the commit", "a commit cut short"])
def test_a_store_opens_for_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With a full disk the server would not start, or start without the hits that it has."""
    store = StoreDriver(tmp_path / "s", durability="batch")
    store.write([1, 2, 3])
    store.close()
    lock = StoreLock.acquire(tmp_path / "s")
    lock.write_state(WriterState(1, boot_id(), "batch", clean=False))  # its last writer was killed
    lock.release()
    left = (tmp_path / "s" / "lock").read_bytes()
    with monkeypatch.context() as patch:

        def refuse(self: object, what: object) -> None:
            raise full() if where == "the lock" else lmdb.DiskError("no") if where == "the commit" else cut_short()

        patch.setattr(*((StoreLock, "write_state") if where == "the lock" else (Index, "commit")), refuse)
        store.options["open_file"] = FullFile.open
        store.tier = store._open()
        store.rescan([1, 2, 3])
        assert [note for note in store.tier.notes if "the disk is full: blocks can be read" in note]
        assert store.read([1, 2, 3]) == [DONE] * 3
        assert store.tier.room(5000) == 0
        assert store.write([4], evict=[1], note=b"x") == [NO_ROOM] * 3
        assert store.tier.drop(store.namespace).status is NO_ROOM
        store.close()
        assert (tmp_path / "s" / "lock").read_bytes() == left, "as clean as it was found"
        store.tier = store._open()
        assert store.read([1, 2, 3]) == [DONE] * 3
    assert store.write([], evict=[1]) == [DONE], "settled as soon as that can be"
    assert store.write([4]) == [DONE], "into the slot of another"
    store.options["open_file"] = BlockFile.open
    store.reopen()
    assert sorted(store.kept) == [2, 3, 4]
    assert store.tier.findings == []
    store.close()


def test_nothing_is_written_before_it_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a smaller capacity evicts would still be named by records while others are written over them."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 << 20)
    store.write(range(300), 16_384)
    store.close()
    kept = set(store.kept)
    commit = Index.commit
    with monkeypatch.context() as patch:

        def refuse(self: object, change: object) -> None:
            raise lmdb.DiskError("no")

        patch.setattr(Index, "commit", refuse)
        store.options["capacity_bytes"] = 4 << 20
        store.tier = store._open()
        store.rescan(kept)
        assert 0 < len(store.kept) < 300
        assert set(store.read(sorted(store.kept))) == {DONE}
        assert set(store.write(range(400, 500), 16_384)) == {NO_ROOM}
        patch.setattr(Index, "commit", commit)
        assert DONE in store.write(range(400, 500), 16_384, evict=sorted(store.kept)[:50])
    store.reopen()
    assert set(store.read(sorted(store.kept))) == {DONE}
    assert store.tier.findings == []
    assert store.tier.check() == []
    store.close()


def test_a_new_store_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would be told that the store is damaged, and a half-made folder be left behind."""
    monkeypatch.setattr(opening, "free_bytes", lambda folder: 200_000)
    with pytest.raises(StoreError, match=r"No space left.*iB free, a store without blocks takes 256KiB.*Make room"):
        StoreDriver(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_new_store_below_min_free_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is short of disk for a moment would come up without a disk tier for good."""

    class Disk(BlockFile):
        free = 3 << 20

        def disk_free_bytes(self) -> int:
            return self.free

    monkeypatch.setattr(opening, "free_bytes", lambda folder: Disk.free)
    store = StoreDriver(tmp_path / "s", min_free_bytes=4 << 20, open_file=Disk.open)
    assert store.tier.room(5000) == 0
    assert any("has 3MiB free, of which min_free keeps 4MiB" in note for note in store.tier.notes)
    assert store.write([1]) == [NO_ROOM]
    taken = sum(path.stat().st_blocks * 512 for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")])
    assert taken <= 256 << 10
    Disk.free = 8 << 20
    assert store.write([1]) == [DONE]
    store.close()


class SmallDisk(BlockFile):
    """A filesystem of 96 MiB of our own, scripted."""

    total = 96 << 20

    def disk_free_bytes(self) -> int:
        return self.total - self.disk_bytes()


@pytest.mark.parametrize("free_mib", [96, 40, 35])
def test_a_capacity_beyond_the_disk_stores_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int
) -> None:
    """On a small disk one extent would be more than it has, and no block ever be stored."""

    class Disk(SmallDisk):
        total = free_mib << 20

    monkeypatch.setattr(opening, "free_bytes", lambda folder: Disk.total)
    store = StoreDriver(tmp_path / "s", capacity_bytes=1 << 30, min_free_bytes=32 << 20, open_file=Disk.open)
    extent_bytes = store.tier._store.header.extent_bytes
    assert extent_bytes == (free_mib - 32) << 17, "an eighth of what the disk can give"
    assert store.tier.room(16_384) >= 5 * extent_bytes // 16_384
    assert set(store.write(range(32), 16_384)) == {DONE}
    assert not any("min_free keeps 32MiB" in note and "an extent" in note for note in store.tier.notes)
    Disk.total = 1 << 40
    store.reopen()
    assert store.tier._store.header.extent_bytes == extent_bytes
    assert sorted(store.kept) == list(range(32))
    store.close()


def test_a_disk_that_is_full_for_now_does_not_size_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without room would leave a large store with extents of one block for ever."""

    class Disk(SmallDisk):
        total = 33 << 20

    monkeypatch.setattr(opening, "free_bytes", lambda folder: Disk.total)
    monkeypatch.setattr(settings, "filesystem_bytes", lambda folder: 96 << 20)
    options = {"capacity_bytes": 1 << 30, "min_free_bytes": 32 << 20, "length_bytes_max": 1 << 20}
    store = StoreDriver(tmp_path / "s", open_file=Disk.open, **options)
    assert store.tier._store.header.extent_bytes == 8 << 20
    assert store.write([1]) == [NO_ROOM]
    [note] = [note for note in store.tier.notes if "no block can be stored until" in note]
    assert "free, of which min_free keeps 32MiB" in note
    assert "an extent takes 8MiB" in note
    Disk.total = 96 << 20
    assert store.write([1]) == [DONE]
    store.close()


@pytest.mark.parametrize(
    ("error", "free_bytes", "status"),
    [
        (lmdb.DiskError("no"), 1 << 30, NO_ROOM),
        (cut_short(), 0, NO_ROOM),
        (cut_short(), 1 << 30, FAILED),
    ],
)
def test_a_commit_without_room(tmp_path: Path, error: lmdb.Error, free_bytes: int, status: Status) -> None:
    """A full disk would count as a broken one, and the tier be left alone instead of evicting."""

    class Disk(BlockFile):
        free = 1 << 30

        def disk_free_bytes(self) -> int:
            return self.free

    store = StoreDriver(tmp_path / "s", open_file=Disk.open)
    store.write([1])
    Disk.free = free_bytes
    index = store.tier._store.index
    commit = index.commit

    def refuse(change: object) -> None:
        raise error

    index.commit = refuse
    assert store.write([2], evict=[1]) == [status] * 2
    index.commit = commit
    assert store.write([3], evict=[1]) == [DONE] * 2
    assert store.tier.check() == []
    store.close()


def test_a_filesystem_that_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fallocate a full disk could stop the evictions that would empty it."""
    calls = []

    def unsupported(fd: int, mode: int, offset: int, length: int) -> int:
        calls.append(mode)
        return errno.EOPNOTSUPP

    monkeypatch.setattr(blockfile, "_fallocate", unsupported)
    store = StoreDriver(tmp_path / "s", capacity_bytes=2 << 20)
    data = tmp_path / "s" / "index" / "data.mdb"
    for turn in range(8):
        store.write(range(turn * 30, turn * 30 + 30), 4096, evict=sorted(store.kept)[:10], row=os.urandom(50_000))
        index = store.tier._store.index
        assert index.map_bytes() + EVICT_RESERVE_BYTES <= index.disk_bytes()
        assert index.file_bytes() <= data.stat().st_size
    assert calls
    assert set(store.read(sorted(store.kept))) == {DONE}
    kept = set(store.kept)
    store.reopen(capacity_bytes=(2 << 20) - 4096)
    assert set(store.kept) == kept
    assert store.tier.findings == []
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").rglob("*")) <= 2 << 20
    store.close()


def test_reader_slots_have_their_disk(tmp_path: Path) -> None:
    """LMDB maps its table of readers: touching a page of it for the first time on a full disk kills the process."""
    store = StoreDriver(tmp_path / "s", payload="inline", capacity_bytes=10 << 20)
    for part in ("index", "payload"):
        table = tmp_path / "s" / part / "lock.mdb"
        assert table.stat().st_blocks * 512 >= table.stat().st_size > 0
    store.close()


# ---------------------------------------------------------------- for real


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB of our own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True).returncode
    ):
        pytest.xfail("this user may not mount a filesystem")  # and no environment could give it the right
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Another's file takes all that is left."""
    other = folder / "other"
    with other.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    assert os.statvfs(folder).f_bavail == 0
    return other


@pytest.mark.filterwarnings("ignore")
def test_a_really_full_disk(small_disk: Path) -> None:
    """What the kernel and LMDB do on a full disk would not be what the other tests say."""
    store = StoreDriver(small_disk / "s", capacity_bytes=8 << 20, durability="batch")
    assert set(store.write(range(200), 16_384)) == {DONE}
    store.write([], evict=range(0, 200, 7))
    store.close()
    other = fill(small_disk)
    with pytest.raises(StoreError, match="No space left"):
        StoreDriver(small_disk / "new")
    assert not (small_disk / "new").exists()
    store.tier = store._open()
    store.rescan(range(200))
    assert len(store.kept) == 171
    assert set(store.read(sorted(store.kept))) == {DONE}
    assert set(store.write(range(300, 329), 16_384)) == {DONE}, "the slots that were evicted have their disk"
    assert NO_ROOM in store.write(range(400, 480), 16_384)
    assert NO_ROOM in {store.write([], **{f"row{row}": os.urandom(50_000)})[0] for row in range(10)}
    assert set(store.write([], evict=sorted(store.kept))) == {DONE}, "evictions are never refused"
    assert store.tier.used_bytes() == 0
    assert DONE in store.write(range(500, 550), 16_384), "into the disk that they gave back"
    assert store.tier.check() == []
    other.unlink()
    store.reopen()
    assert set(store.read(sorted(store.kept))) == {DONE}
    assert set(store.write(range(600, 700), 16_384)) == {DONE}
    store.close()


def test_a_readonly_disk(small_disk: Path) -> None:
    """A disk that the kernel has made readonly after an error ends in a traceback, or its store is called damaged."""
    store = StoreDriver(small_disk / "s")
    store.write([1])
    store.close()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    try:
        for folder in ("s", "new"):
            with pytest.raises(StoreError, match="Mount it for writing") as caught:
                StoreDriver(small_disk / folder)
            assert not isinstance(caught.value, StoreFormatError)
    finally:
        subprocess.run([*remount[:2], "remount,rw", str(small_disk)], check=True)
    assert not (small_disk / "new").exists()
    store.tier = store._open()
    assert store.read([1]) == [Status.DONE]
    store.close()
