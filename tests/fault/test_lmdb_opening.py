"""Opening where the filesystem is not what a store needs: a clear refusal that changes nothing, or a note."""

import errno
import fcntl
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from kvtier.cli.cmd_fsck import fsck
from kvtier.cli.cmd_inspect import inspect
from kvtier.errors import ConfigError, StoreError, StoreFormatError, StoreLocked
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import committing
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.foreign import header_of
from kvtier.tiers.lmdb.lock import StoreLock
from kvtier.types import Status

DONE = Status.DONE


def refusing(call: Callable[..., object], code: int, name: str) -> Callable[..., object]:
    """A call of `os` that the kernel refuses for the store's file of this name, whoever runs the test."""

    def refused(path: object, *args: object, **options: object) -> object:
        if Path(str(path)).name == name:
            raise OSError(code, os.strerror(code), str(path))
        return call(path, *args, **options)

    return refused


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EACCES, "Give this user the folder"),
        (errno.EPERM, "Give this user the folder"),
        (errno.EROFS, "Mount it for writing"),
        (errno.EIO, "The disk fails"),
        (errno.EBADMSG, "The filesystem finds itself damaged"),
        (errno.EUCLEAN, "The filesystem finds itself damaged"),
        (errno.EMFILE, r"raise the limit \(ulimit -n\)"),
        (errno.ENXIO, "The device is not there"),
        (errno.ENOSPC, r"iB free, a store without blocks takes 256KiB\. Make room on the disk"),
    ],
)
@pytest.mark.parametrize("name", ["lock", "slab", "data.mdb"])
def test_what_the_kernel_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str, name: str
) -> None:
    """The user would get a traceback, or be told to delete a store that is sound."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing(os.open, code, name))
        with pytest.raises(StoreError, match=says) as caught:
            store._open()
        assert not isinstance(caught.value, StoreFormatError)
    store.tier = store._open()
    assert store.read([1]) == [DONE]
    store.close()


def test_an_index_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would be told to delete a store of which one read failed."""
    store = StoreDriver(tmp_path / "s")
    store.close()

    def refused(*args: object, **options: object) -> None:
        error = lmdb.Error("Input/output error")
        error.code = errno.EIO
        raise error

    monkeypatch.setattr(lmdb, "open", refused)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        store._open()
    assert not isinstance(caught.value, StoreFormatError)


def test_a_parent_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would not learn which folder it is about."""
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, errno.EACCES, "s"))
    with pytest.raises(StoreError, match=r"Permission denied: '.*/s'\. Give this user the folder"):
        StoreDriver(tmp_path / "s")


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers would ruin a store on a network filesystem; or its user be told that another has it open."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"cannot lock files.*use a local disk") as caught:
        StoreDriver(tmp_path / "s")
    assert not isinstance(caught.value, StoreLocked)


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    """A slip in the YAML would end in a traceback."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, says in [
        ("file", "is not a store"),
        ("file/below", "Part of the path is a file"),
        ("nowhere", "A link there leads nowhere"),
        ("circle", "lead back to themselves|leads nowhere"),
        ("n" * 300, "shorter path"),
    ]:
        with pytest.raises(StoreError, match=says):
            StoreDriver(tmp_path / name)
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "file").read_text() == "x"


PLACES = ["lock", "slab", "index", "index/data.mdb", "index/lock.mdb", "payload", "payload/data.mdb"]


@pytest.mark.parametrize("place", [*PLACES, "payload/lock.mdb"])
def test_what_is_no_plain_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    """A verb would wait for a pipe for ever, or the user read of illegal seeks and be sent to look at permissions."""
    folder = tmp_path / "s"
    store = StoreDriver(folder, payload="inline" if place.startswith("payload") else "slab")
    store.write([1])
    store.close()
    kind = "folder" if place in ("index", "payload") else "file"
    (folder / place).rename(tmp_path / "away")
    os.mkfifo(folder / place)
    says = rf"{folder}: its {place} is no {kind}\. Move that away"
    for verb in (store._open, lambda: fsck(folder), lambda: fsck(folder, mend=True), lambda: header_of(folder)):
        with pytest.raises(StoreError, match=says) as caught:
            verb()
        assert not isinstance(caught.value, StoreFormatError)
    assert inspect(folder) == 2
    assert f"its {place} is no {kind}" in capsys.readouterr().err
    (folder / place).unlink()
    (tmp_path / "away").rename(folder / place)
    store.tier = store._open()
    assert store.read([1]) == [DONE]
    store.close()


def test_an_address_space_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would be told to mend that, and not what."""

    def refused(*args: object, **options: object) -> None:
        error = lmdb.MemoryError("Cannot allocate memory")
        error.code = errno.ENOMEM
        raise error

    StoreDriver(tmp_path / "s").close()
    monkeypatch.setattr(lmdb, "open", refused)
    with pytest.raises(StoreError, match=r"the index cannot be opened: .*allow this process more addresses"):
        StoreDriver(tmp_path / "s")


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    """The first start on a new machine would fail."""
    store = StoreDriver(tmp_path / "a" / "b" / "s")
    assert store.write([1]) == [DONE]
    store.close()


def test_a_symlinked_store(tmp_path: Path) -> None:
    """One store under two names would get two writers, or not open under its second name."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(StoreLocked):
        StoreDriver(tmp_path / "link")
    store.close()
    store.path = tmp_path / "link"
    store.tier = store._open()
    assert store.read([1]) == [DONE]
    store.close()


def test_a_folder_moved_while_open(tmp_path: Path) -> None:
    """Moving a running cache's folder would lose blocks, or start a second store at the old place."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 << 20)
    store.write([1])
    (tmp_path / "s").rename(tmp_path / "moved")
    for row in range(20):
        assert store.write([10 + row], 16_384, **{f"row{row}": os.urandom(60_000)}) == [DONE] * 2, "index and slab grow"
    assert set(store.read(sorted(store.kept))) == {DONE}
    store.close()
    assert not (tmp_path / "s").exists()
    kept = set(store.kept)
    store.path = tmp_path / "moved"
    store.tier = store._open()
    store.rescan(kept)
    assert set(store.kept) == kept
    assert set(store.read(sorted(kept))) == {DONE}
    store.close()


# ---------------------------------------------------------------- sizes


def filesystem(monkeypatch: pytest.MonkeyPatch, total_bytes: int) -> None:
    """Every filesystem is of this size."""
    statvfs = os.statvfs

    def sized(path: object) -> object:
        real = statvfs(path)
        blocks = total_bytes // real.f_frsize
        return SimpleNamespace(f_blocks=blocks, f_frsize=real.f_frsize, f_bavail=blocks)

    monkeypatch.setattr(os, "statvfs", sized)


def test_min_free_of_the_whole_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache would start that can never store a block (sglang PR#26449)."""
    filesystem(monkeypatch, 64 << 20)
    with pytest.raises(
        ConfigError, match=r"has 64MiB in all, and 64MiB of them are to stay free.*less than 64MiB"
    ) as caught:
        StoreDriver(tmp_path / "s", min_free_bytes=64 << 20)
    assert caught.value.path == "tier disk.min_free"
    assert not (tmp_path / "s").exists()
    StoreDriver(tmp_path / "s", min_free_bytes=(64 << 20) - 4096).close()


def test_a_capacity_beyond_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator would plan with a capacity that cannot be reached; or the cache not start on a smaller disk."""
    filesystem(monkeypatch, 64 << 20)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            store = StoreDriver(tmp_path / "s", capacity_bytes=64 << 20, min_free_bytes=16 << 20)
            [note] = [note for note in store.tier.notes if note.startswith("capacity: 64MiB will never be reached")]
            assert "64MiB in all and min_free keeps 16MiB: 48MiB at most" in note
            store.close()
    assert len([record for record in caplog.records if "never be reached" in record.getMessage()]) == 1


def test_direct_io_is_refused_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each reopening would say it again; or nobody learn why the disk is slow."""

    class Buffered(BlockFile):
        def _takes_direct(self) -> bool:
            return False

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store = StoreDriver(tmp_path / "s", open_file=Buffered.open)
            assert any("O_DIRECT" in note for note in store.tier.notes)
            store.close()
    assert len([record for record in caplog.records if "O_DIRECT" in record.getMessage()]) == 1


# ---------------------------------------------------------------- time and torn pages


def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a correction of the clock the older of two blocks would win, or the order of eviction be turned round."""
    now_ns = [2_000_000 * 10**9]
    monkeypatch.setattr(committing.time, "time_ns", lambda: now_ns[0])
    store = StoreDriver(tmp_path / "s")
    for number in (1, 2, 3, 1):
        store.write([number], 5000 if number != 1 else 6000)
        now_ns[0] -= 3600 * 10**9
        store.reopen()
    newest = store.kept[1]
    assert [block.generation for block in store.tier.scan()] == sorted(s.generation for _, s in store.kept.values())
    assert max(store.kept, key=lambda number: store.kept[number][1].generation) == 1
    now_ns[0] = 0
    store.write([4])
    store.reopen()
    assert sorted(store.kept) == [1, 2, 3, 4]
    assert store.kept[1] == newest
    assert store.tier.findings == []
    store.close()


@pytest.mark.parametrize("torn", [[0], [1], [0, 1]])
@pytest.mark.parametrize("seed", range(3))
def test_torn_meta_pages(tmp_path: Path, torn: list[int], seed: int) -> None:
    """Half a page of the last commit's root would crash the process, or be believed."""
    store = StoreDriver(tmp_path / "s")
    for number in range(6):
        store.write([number])
    store.close()
    data = tmp_path / "s" / "index" / "data.mdb"
    whole = data.read_bytes()
    damaged = bytearray(whole)
    for page in torn:
        start = page * 4096 + 16  # behind the page's own head; the meta's fields follow
        end = start + random.Random(seed).choice((8, 64, 500))
        damaged[start:end] = random.Random(seed + page).randbytes(end - start)
    data.write_bytes(damaged)
    if len(torn) == 2:
        with pytest.raises(StoreFormatError, match="Delete the folder to start with an empty store"):
            store._open()
        data.write_bytes(whole)
        store.tier = store._open()
        assert store.read(range(6)) == [DONE] * 6
        store.close()
        return
    try:
        store.tier = store._open()
    except StoreFormatError:
        return  # the torn head looks like the newer one, and what it names is no tree
    store.rescan(range(6))
    assert set(store.read(sorted(store.kept))) <= {DONE}
    store.close()


@pytest.mark.parametrize("payload", ["slab", "inline"])
@pytest.mark.parametrize("part", ["", "slab or payload/data.mdb", "index/data.mdb"])
def test_a_store_that_vanishes_while_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, payload: str, part: str
) -> None:
    """Deleting a running cache's folder would take the server with it; or everybody believe that what is stored since
    is kept."""
    store = StoreDriver(tmp_path / "s", payload=payload)
    store.write([1])
    assert store.tier.notes == []
    if part:
        (tmp_path / "s" / part.split(" or ")[payload == "inline" and " or " in part]).unlink()
    else:
        shutil.rmtree(tmp_path / "s")
    assert store.read([1]) == [DONE]
    for number in (2, 3):
        assert store.write([number]) == [DONE]
        assert [note.partition(" while")[0] for note in store.tier.notes] == ["its files were deleted"]
    store.close()
    assert [record.levelname for record in caplog.records if "were deleted" in record.getMessage()] == ["ERROR"]
    assert (tmp_path / "s").exists() == bool(part)


def test_a_store_that_vanishes_while_nothing_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An idle cache whose folder was deleted would close as if its blocks were kept."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    shutil.rmtree(tmp_path / "s")
    store.close()
    assert "its files were deleted" in caplog.text


def test_a_moved_store_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who moves a folder would read that its blocks are lost."""
    store = StoreDriver(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "moved")
    store.write([1])
    store.close()
    assert "deleted" not in caplog.text


def test_the_slab_is_on_the_disk_before_the_lock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer in mode `none` left to the page cache is called durable, and a power loss changes it."""
    store = StoreDriver(tmp_path / "s", durability="none")
    store.write([1, 2])
    store.close()
    did: list[str] = []
    sync, write_state = BlockFile.sync, StoreLock.write_state
    monkeypatch.setattr(BlockFile, "sync", lambda file: (did.append("sync"), sync(file))[1])
    monkeypatch.setattr(StoreLock, "write_state", lambda *args: (did.append("state"), write_state(*args))[1])
    store = StoreDriver(tmp_path / "s", durability="batch")
    assert did[:2] == ["sync", "state"]
    store.close()
