"""Room: what a store takes of a disk that others use too, and when it gives way to them."""

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest

from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.room import Room
from kvtier.types import Status

MIN_FREE = 1 << 20
EXTENT = 4 << 17  # of a store of 4 MiB
LENGTH = 16_384
PER_EXTENT = EXTENT // LENGTH


class SharedDisk(BlockFile):
    """A filesystem of `total` bytes on which others hold `others`; what it shows as free follows from both."""

    total = 64 << 20
    others = 0
    between: Callable[[], None] = staticmethod(lambda: None)  # what others do right after we claimed an extent
    claims = True
    punching = True

    def disk_free_bytes(self) -> int:
        return self.total - self.others - self.disk_bytes()

    def allocate(self, offset: int, length: int) -> None:
        if self.claims:
            super().allocate(offset, length)
        else:
            os.truncate(self._fd, max(self.length_bytes(), offset + length))
        type(self).between()

    def punch(self, offset: int, length: int) -> bool:
        return self.punching and super().punch(offset, length)


@pytest.fixture
def disk() -> type[SharedDisk]:
    class Fresh(SharedDisk):
        pass

    return Fresh


def opened(tmp_path: Path, disk: type[SharedDisk], **options: object) -> StoreDriver:
    return StoreDriver(tmp_path / "s", **({"min_free_bytes": MIN_FREE, "open_file": disk.open} | options))


def free(store: StoreDriver) -> int:
    return store.tier._store.slab.file.disk_free_bytes()


def leave_free(store: StoreDriver, disk: type[SharedDisk], free_bytes: int) -> None:
    """Others take what is needed for this much to be left."""
    disk.others = disk.total - free_bytes - store.tier._store.slab.file.disk_bytes()


def extents_of(store: StoreDriver) -> list[list[int]]:
    """The numbers of kept blocks by extent, those first whose extent has the oldest block."""
    found: dict[int, list[int]] = {}
    for number, (_, stored) in sorted(store.kept.items()):
        found.setdefault(store.tier.neighbours(stored.place), []).append(number)
    return list(found.values())


def test_an_extent_is_lent_only_above_min_free(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """The store would take the filesystem's last bytes (LMCache#4664)."""
    store = opened(tmp_path, disk)
    leave_free(store, disk, MIN_FREE + 2 * EXTENT - 1)
    store.write([])
    assert store.tier.room(LENGTH) == PER_EXTENT
    statuses = store.write(range(2 * PER_EXTENT), LENGTH)
    assert statuses == [Status.DONE] * PER_EXTENT + [Status.NO_ROOM] * PER_EXTENT
    assert free(store) >= MIN_FREE
    assert "min_free keeps 1MiB; an extent takes 512KiB" in store.tier._room.refusal
    assert store.tier.excess_bytes() == 0
    disk.others -= 1
    assert store.write([99], LENGTH) == [Status.DONE]
    store.close()


def test_an_extent_is_given_back_if_others_were_faster(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """Between looking at the disk and claiming an extent another process takes the same bytes."""
    store = opened(tmp_path, disk)
    leave_free(store, disk, MIN_FREE + EXTENT)

    def grab() -> None:
        disk.others += 4096

    disk.between = staticmethod(grab)
    assert store.write([1], LENGTH) == [Status.NO_ROOM]
    assert free(store) == MIN_FREE + EXTENT - 4096
    assert store.tier._store.slab.file.disk_bytes() == 0
    assert store.tier.check() == []
    store.close()


def test_the_store_gives_way(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """Others fill the disk beyond min_free, and the cache keeps what they need more."""
    store = opened(tmp_path, disk)
    store.write(range(4 * PER_EXTENT), LENGTH)
    assert store.tier.excess_bytes() == 0
    leave_free(store, disk, MIN_FREE - EXTENT - 1)
    assert store.tier.excess_bytes() == 0, "from memory"
    store.write([])
    assert store.tier.excess_bytes() == EXTENT + 1
    assert store.tier.room(LENGTH) == 0
    evicted = extents_of(store)[0]
    assert store.write([500], LENGTH, evict=evicted) == [Status.NO_ROOM] + [Status.DONE] * PER_EXTENT
    assert store.tier.excess_bytes() == 1, "the disk of the emptied extent is back when the write returns"
    assert set(store.write([], evict=extents_of(store)[0])) == {Status.DONE}
    assert store.tier.excess_bytes() == 0
    assert free(store) >= MIN_FREE
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    disk.others = 0
    store.write([])
    assert store.tier.room(LENGTH) > PER_EXTENT
    assert store.write([501], LENGTH) == [Status.DONE]
    assert store.tier.check() == []
    store.close()


def test_scattered_evictions_give_nothing_back(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """New blocks would be written into an extent that is being emptied, and it would never be empty."""
    store = opened(tmp_path, disk)
    store.write(range(2 * PER_EXTENT), LENGTH)
    leave_free(store, disk, 0)
    store.write([], evict=[0, PER_EXTENT])
    assert store.tier.excess_bytes() == MIN_FREE
    assert store.write([500], LENGTH) == [Status.NO_ROOM]
    store.close()


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("free_bytes", [0, MIN_FREE - EXTENT - 1, MIN_FREE - 1])
def test_what_gave_way_is_not_offered_again(
    tmp_path: Path, disk: type[SharedDisk], claimed: bool, free_bytes: int
) -> None:
    """Blocks would be stored in the room just given back, leave for it again, and so for ever."""
    disk.claims = claimed
    store = opened(tmp_path, disk)
    store.write(range(4 * PER_EXTENT), LENGTH)
    leave_free(store, disk, free_bytes)
    store.write([])
    while store.tier.excess_bytes():
        store.write([], evict=extents_of(store)[0])
    for number in range(1000, 1000 + store.tier.room(LENGTH) + 1):
        store.write([number], LENGTH)
        assert store.tier.excess_bytes() == 0
    assert free(store) >= MIN_FREE
    store.close()


def test_no_more_is_asked_than_there_is(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """An engine would look for victims for ever in a store that has given all it had."""
    store = opened(tmp_path, disk)
    store.write(range(3), LENGTH)
    leave_free(store, disk, 0)
    store.write([])
    assert store.tier.excess_bytes() == EXTENT
    assert store.tier.drop(store.namespace).done
    assert store.tier.excess_bytes() == 0
    assert store.tier.room(LENGTH) == 0
    store.close()


def test_giving_way_is_told_once(tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would know why the cache shrinks; or the log would fill the disk's last bytes."""
    store = opened(tmp_path, disk)
    store.write(range(3), LENGTH)
    leave_free(store, disk, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store.write([])
    [record] = caplog.records
    assert "has 0B free, of which min_free keeps 1MiB; blocks leave" in record.getMessage()
    store.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "until there is more room" in record.getMessage()]


def test_a_store_that_can_hold_nothing_says_so(
    tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture
) -> None:
    """A min_free above what is free would leave the store empty for good, and nobody know why."""
    disk.others = disk.total - MIN_FREE // 2
    with caplog.at_level(logging.WARNING):
        store = opened(tmp_path, disk)
        [text] = told(caplog)
        assert "the filesystem has 512KiB free, of which min_free keeps 1MiB, and " in text
        assert "KiB are promised; an extent takes 512KiB: no block can be stored" in text
        assert [note for note in store.tier.notes if text.endswith(note)]
        assert store.write([1], LENGTH) == [Status.NO_ROOM]
        store.reopen()
        assert any("no block can be stored" in note for note in store.tier.notes)
        assert told(caplog) == [text]
    store.close()


@pytest.mark.parametrize("claimed", [True, False])
def test_a_store_that_stops_growing_says_so(
    tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture, claimed: bool
) -> None:
    """Blocks would be refused below the capacity in silence; or a full store be called one that has no room."""
    disk.claims = claimed
    store = opened(tmp_path, disk)
    leave_free(store, disk, MIN_FREE + 2 * EXTENT)
    with caplog.at_level(logging.WARNING):
        assert store.write([1], LENGTH) == [Status.DONE]
        assert told(caplog) == []
        disk.others += 4096
        store.write([])
        [text] = told(caplog)
        assert "the store stays at 1 extent until" in text
        assert ("are promised" in text) is not claimed
        store.write([])
    assert told(caplog) == [text]
    assert len([note for note in store.tier.notes if "stays at" in note]) == 1
    store.close()


def test_a_store_at_its_capacity_has_nothing_to_say(
    tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture
) -> None:
    """Each full cache would warn of a disk that has what it needs."""
    store = opened(tmp_path, disk)
    assert Status.NO_ROOM in store.write(range(400), LENGTH)
    leave_free(store, disk, MIN_FREE)
    with caplog.at_level(logging.WARNING):
        store.write([])
    assert told(caplog) == []
    store.close()


def test_a_disk_that_refuses_an_extent_is_told(
    tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture
) -> None:
    """A quota refuses what the filesystem shows as free."""

    def refuse(self: BlockFile, offset: int, length: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    disk.allocate = refuse
    store = opened(tmp_path, disk)
    with caplog.at_level(logging.WARNING):
        assert store.write([1], LENGTH) == [Status.NO_ROOM]
    [text] = told(caplog)
    assert "the disk refused an extent: [Errno" in text
    store.close()


def test_an_opened_store_gives_way(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """A store that grew on an emptier disk would keep what it has after a restart."""
    store = opened(tmp_path, disk, min_free_bytes=0)
    store.write(range(2 * PER_EXTENT), LENGTH)
    leave_free(store, disk, MIN_FREE // 2)
    store.reopen(min_free_bytes=MIN_FREE)
    assert store.tier.excess_bytes() == MIN_FREE // 2
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    store.close()


def test_index_pages_count(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """The index would grow into the bytes that are to stay free, or not even evictions could be written down."""
    store = opened(tmp_path, disk)
    assert set(store.write(range(30), LENGTH)) == {Status.DONE}
    leave_free(store, disk, MIN_FREE)
    index = store.tier._store.index
    before = index.map_bytes()
    assert store.write([], row=os.urandom(200_000)) == [Status.NO_ROOM]
    assert index.map_bytes() == before
    assert any("until there is more room" in note for note in store.tier.notes)
    leave_free(store, disk, MIN_FREE + 512 * 1024)
    assert store.write([], row=os.urandom(200_000)) == [Status.DONE]
    assert before < index.map_bytes() <= index.disk_bytes()
    leave_free(store, disk, 0)
    assert set(store.write([], evict=sorted(store.kept))) == {Status.DONE}
    store.close()


def test_what_is_lent_and_not_yet_claimed_counts(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """Where the filesystem claims nothing ahead, the same free bytes would be lent twice."""
    disk.claims = False
    store = opened(tmp_path, disk)
    leave_free(store, disk, MIN_FREE + EXTENT + EXTENT // 2)
    assert store.write([1], LENGTH) == [Status.DONE]
    assert store.write([2], 4096) == [Status.NO_ROOM], "another size would need another extent"
    assert set(store.write(range(10, 10 + PER_EXTENT - 1), LENGTH)) == {Status.DONE}
    assert free(store) >= MIN_FREE
    store.close()


def test_a_filesystem_that_does_not_answer(
    tmp_path: Path, disk: type[SharedDisk], caplog: pytest.LogCaptureFixture
) -> None:
    """An error after the commit would hide that the batch was written."""
    store = opened(tmp_path, disk)
    store.write([1], LENGTH)

    def refuse(self: BlockFile) -> int:
        raise OSError(errno.EIO, "Input/output error")

    disk.disk_free_bytes = refuse
    with caplog.at_level(logging.WARNING):
        assert store.write([2], LENGTH, evict=[1]) == [Status.DONE] * 2
    assert "does not say what it has" in caplog.text
    assert store.read([2]) == [Status.DONE]
    store.close()


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_can_only_be_cut(tmp_path: Path, disk: type[SharedDisk]) -> None:
    """Without hole punching a store opened with less capacity would keep its old size, or never give way."""
    disk.punching = False
    store = opened(tmp_path, disk, capacity_bytes=8 << 20, min_free_bytes=0)
    slab = tmp_path / "s" / "slab"
    store.write(range(7 * 64), LENGTH)
    assert [note for note in store.tier.notes if "no part of a file back" in note]
    extents = extents_of(store)
    store.write([], evict=extents[2])
    full = slab.stat().st_size
    store.write([], evict=extents[-1])
    assert slab.stat().st_size == full - (1 << 20)
    store.reopen(capacity_bytes=4 << 20)
    assert slab.stat().st_blocks * 512 < 4 << 20
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    assert sorted(store.kept) == [n for extent in extents[:2] for n in extent]
    assert store.tier.check() == []
    store.close()


def test_the_reserve_comes_back(tmp_path: Path) -> None:
    """The second full index of a store's life could not be emptied any more."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=2 << 20)
    for episode in range(2):
        store.write(range(2000), 4096)
        row = 0
        while store.write([], **{f"{episode}-{row}": os.urandom(40_000)}) == [Status.DONE]:
            row += 1
        assert set(store.write([], evict=sorted(store.kept))) == {Status.DONE}
        assert not store.tier._room.reserve_used
    disk_bytes = sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").rglob("*"))
    assert disk_bytes <= 2 << 20
    store.close()


def test_a_smaller_capacity_takes_back_the_indexs_claims(tmp_path: Path) -> None:
    """Disk that the index claimed and never used would count against the blocks of a smaller store."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=16 << 20)
    for row in range(40):
        store.write([row], **{f"row{row}": os.urandom(60_000)})
    index = store.tier._store.index
    assert index.disk_bytes() > index.file_bytes() + EVICT_RESERVE_BYTES + (64 << 10)
    store.reopen(capacity_bytes=15 << 20)
    index = store.tier._store.index
    assert index.disk_bytes() <= index.file_bytes() + EVICT_RESERVE_BYTES + (16 << 10)
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    store.close()


def test_what_a_crash_left_goes_before_anything_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extent that was claimed and never named would stand beside the index's next pages: too much for a moment."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(3), LENGTH)
    store.close()
    with (tmp_path / "s" / "slab").open("r+b") as slab:
        os.posix_fallocate(slab.fileno(), 2 * EXTENT, EXTENT)
    seen = []
    commit = Index.commit

    def noting(self: Index, change: Change) -> None:
        seen.append((tmp_path / "s" / "slab").stat().st_blocks * 512)
        commit(self, change)

    monkeypatch.setattr(Index, "commit", noting)
    store.tier = store._open()
    assert seen[0] == EXTENT
    assert store.read(range(3)) == [Status.DONE] * 3
    store.close()


class LateDisk(SharedDisk):
    """Claims nothing, and takes a page's disk when it is first written."""

    claims = False
    backed: set[int] = set()

    def disk_bytes(self) -> int:
        return 4096 * len(self.backed)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        length = sum(map(len, buffers))
        pages = set(range(offset // 4096, (offset + length) // 4096)) - self.backed
        if 4096 * len(pages) > self.disk_free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.backed.update(pages)
        return super().write(buffers, offset)


def test_no_block_leaves_for_one_that_the_disk_refuses(tmp_path: Path) -> None:
    """A disk that fills up under a store costs it one batch of blocks after the other, until none is left."""

    class Disk(LateDisk):
        backed: set[int] = set()

    store = StoreDriver(tmp_path / "s", open_file=Disk.open)
    assert store.write(range(6), LENGTH) == [Status.DONE] * 6
    Disk.others = Disk.total - store.tier._store.slab.file.disk_bytes()
    assert store.write([10, 11], LENGTH, evict=[0], note=b"x") == [Status.NO_ROOM] * 3 + [Status.DONE]
    assert store.read(range(6)) == [Status.DONE] * 6
    assert store.tier.check() == []
    for number in range(3):  # what leaves makes room where the disk is ours already
        assert store.write([], evict=[2 * number, 2 * number + 1]) == [Status.DONE] * 2
        if number < 2:
            assert store.write([20 + number, 30 + number], LENGTH) == [Status.DONE] * 2
    assert store.write([22], LENGTH) == [Status.DONE]
    assert sorted(store.kept) == [20, 21, 22, 30, 31]
    assert store.tier.check() == []
    allocator = store.tier._store.allocator
    assert allocator.withheld_pages == 2 * LENGTH // 4096
    Disk.others -= 2 * LENGTH - 1
    store.write([])
    assert allocator.withheld_pages == 2 * LENGTH // 4096
    Disk.others -= 1
    store.write([])
    assert allocator.withheld_pages == 0
    assert store.tier.check() == []
    store.reopen()
    assert sorted(store.kept) == [20, 21, 22, 30, 31]
    store.close()


def test_an_extent_that_the_disk_refuses_altogether_is_given_back(tmp_path: Path) -> None:
    """An extent in which nothing can be written stays lent, and no other size may have it."""

    class Disk(LateDisk):
        backed: set[int] = set()
        total = 64 << 20

    store = StoreDriver(tmp_path / "s", open_file=Disk.open)
    store.write([0], LENGTH)
    store.write([], evict=[0])
    write, Disk.write = Disk.write, lambda self, buffers, offset: no_space()
    assert store.write([1, 2], LENGTH) == [Status.NO_ROOM] * 2
    assert list(store.tier._store.allocator.lent()) == []
    Disk.write = write
    assert store.write([1, 2], LENGTH) == [Status.DONE] * 2
    assert store.tier.check() == []
    store.close()


def no_space() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_dead_readers_are_let_go_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a dead reader saw are kept for good, and the index takes the room of blocks."""
    store = StoreDriver(tmp_path / "s")
    now_s, checks = [100.0], []
    room = Room(store.tier._store, 0, LENGTH, clock=lambda: now_s[0])
    monkeypatch.setattr(store.tier._store.index, "release_dead_readers", lambda: checks.append(now_s[0]) or 0)
    for now_s[0] in (101.0, 129.9, 130.0, 131.0, 159.9, 160.5):
        room.refresh()
    assert checks == [130.0, 160.5]
    store.close()


def test_a_capacity_that_shrinks_is_kept_as_soon_as_blocks_have_left(tmp_path: Path) -> None:
    """A store that is to take less goes on storing, or one that is to take more is full."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 << 20)
    room = store.tier.room(LENGTH)
    store.write(range(room), LENGTH)
    assert store.tier.change_capacity(16 << 20).done
    assert store.tier.room(LENGTH) > room * 0.8
    store.write(range(room, room + 50), LENGTH)
    assert store.tier.change_capacity(6 << 20).done
    assert store.tier.capacity_bytes == 6 << 20
    assert store.tier.room(LENGTH) == 0
    assert store.write([900], LENGTH) == [Status.NO_ROOM]
    while store.tier.excess_bytes():
        store.write([], evict=extents_of(store)[0])
    kept = sorted(store.kept)
    assert 0 < len(kept) < room
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert used <= 6 << 20
    assert store.read(kept) == [Status.DONE] * len(kept)
    assert store.tier.check() == []
    store.reopen(capacity_bytes=6 << 20)
    assert sorted(store.kept) == kept
    store.close()


def test_a_capacity_that_cannot_be_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store would be left without room for a block, or believe a capacity that is not written down."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    room = store.tier.room(LENGTH)
    refused = store.tier.change_capacity(100_000)
    assert (refused.status, "Give at least" in refused.detail) == (Status.FAILED, True)
    with monkeypatch.context() as patch:
        patch.setattr(store.tier._store.index, "commit", lambda change: no_space_in_index())
        assert store.tier.change_capacity(16 << 20).status is Status.NO_ROOM
    assert (store.tier.capacity_bytes, store.tier.room(LENGTH)) == (4 << 20, room)
    store.close()


def no_space_in_index() -> None:
    raise lmdb.DiskError("no room")
