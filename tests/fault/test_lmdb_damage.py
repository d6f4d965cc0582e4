"""Damaged files and failing disks: a miss or a clear refusal, never wrong bytes, never a crash."""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import HEADER_KEY, PLACE_KEY, encode_header, encode_record
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.types import EvictItem, Status, WriteBatch


class FailingFile(BlockFile):
    """A disk that fails as told: `fault` sees each call's kind and byte range, and may raise or shorten."""

    fault: Callable[[str, int, int], int | None] = staticmethod(lambda kind, start, end: None)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._checked("read", buffers, offset, super().read)

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._checked("write", buffers, offset, super().write)

    def sync(self) -> None:
        type(self).fault("sync", 0, 0)
        super().sync()

    def allocate(self, offset: int, length: int) -> None:
        type(self).fault("allocate", offset, offset + length)
        super().allocate(offset, length)

    def _checked(self, kind: str, buffers: Sequence[memoryview], offset: int, move: Callable[..., int]) -> int:
        length = sum(len(buffer) for buffer in buffers)
        short = type(self).fault(kind, offset, offset + length)
        if short is None:
            return move(buffers, offset)
        first = buffers[0][:short]
        return move([first], offset)


@pytest.fixture
def failing() -> type[FailingFile]:
    class Fresh(FailingFile):
        pass

    return Fresh


def refuse(kind: str, code: int, page: int | None = None) -> Callable[[str, int, int], int | None]:
    """Calls of a kind fail with an errno; with `page`, only those that touch its first byte."""

    def fault(called: str, start: int, end: int) -> None:
        if called == kind and (page is None or start <= page * 4096 < end):
            raise OSError(code, os.strerror(code))

    return fault


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# ---------------------------------------------------------------- payload


@pytest.mark.parametrize("position", [0, 4095, 4999])
def test_a_flipped_byte_is_corrupt(tmp_path: Path, position: int) -> None:
    """A rotten disk's bytes would reach attention (vLLM#54363)."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2, 3])
    store.close()
    flip(tmp_path / "s" / "slab", store.offset_of(2) + position)
    store.tier = store._open()
    assert store.read([1, 2, 3]) == [Status.DONE, Status.CORRUPT, Status.DONE]
    assert store.write([], evict=[2]) == [Status.DONE]
    assert store.tier.check() == []
    store.close()


def test_swapped_blocks_are_corrupt(tmp_path: Path) -> None:
    """Intact bytes of another block would pass for this one's."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2], 4096)
    with (tmp_path / "s" / "slab").open("r+b") as slab:
        slots = []
        for number in (1, 2):
            slab.seek(store.offset_of(number))
            slots.append(slab.read(4096))
        for number, slot in zip((2, 1), slots, strict=True):
            slab.seek(store.offset_of(number))
            slab.write(slot)
        slab.flush()
        os.fsync(slab.fileno())
    assert store.read([1, 2]) == [Status.CORRUPT] * 2
    store.close()


def test_a_truncated_slab(tmp_path: Path) -> None:
    """The missing tail would be read as zeroes, or take the blocks before it along."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(8), 8192)
    os.truncate(tmp_path / "s" / "slab", store.offset_of(5) + 4096)
    assert store.read(range(8)) == [Status.DONE] * 5 + [Status.CORRUPT] * 3
    store.reopen()
    assert sorted(store.kept) == [0, 1, 2, 3, 4]
    assert len(store.tier.findings) == 3
    assert set(store.write(range(10, 30), 8192)) == {Status.DONE}
    assert set(store.read(sorted(store.kept))) == {Status.DONE}
    store.close()


def test_unverified_reads_still_look_at_the_record(tmp_path: Path) -> None:
    """With verify off a reader could get the bytes of a slot's next occupant."""
    store = StoreDriver(tmp_path / "s", verify=False)
    store.write([1, 2])
    assert store.read([1, 2]) == [Status.DONE] * 2
    stale = dict(store.kept)
    original = store.tier._store.slab.read

    def overtaken(*args: object, **kwargs: object) -> None:
        store.write([3], evict=[1])
        original(*args, **kwargs)

    store.tier._store.slab.read = overtaken
    store.kept = dict(stale)
    assert store.read([1]) == [Status.MISSING]
    store.close()


def test_overtaken_while_reading(tmp_path: Path) -> None:
    """A block that moved under a reader would be condemned as corrupt (9 of 7,776 reads in a trial)."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    stale = dict(store.kept)
    original = store.tier._store.slab.read
    calls = []

    def overtaken(*args: object, **kwargs: object) -> None:
        if not calls:
            calls.append(1)
            store.write([], evict=[1])
            store.write([2])
        original(*args, **kwargs)

    store.tier._store.slab.read = overtaken
    store.kept = dict(stale)
    assert store.read([1]) == [Status.MISSING]
    store.close()


@pytest.mark.parametrize("verify", [True, False])
def test_dropped_while_reading(tmp_path: Path, verify: bool) -> None:
    """A drop leaves records behind: the next owner of a slot would be served, or the dropped block called corrupt."""
    store = StoreDriver(tmp_path / "s", verify=verify)
    store.write([1])
    place = store.kept[1][1].place
    original = store.tier._store.slab.read

    def overtaken(*args: object, **kwargs: object) -> None:
        if store.kept:
            store.tier.drop(store.namespace)
            with open(tmp_path / "s" / "slab", "r+b") as slab:  # the next batch's payload; its record is yet to come
                slab.seek(place * 4096)
                slab.write(b"x" * 4096)
        original(*args, **kwargs)

    store.tier._store.slab.read = overtaken
    assert store.read([1]) == [Status.MISSING]
    store.close()


# ---------------------------------------------------------------- failing disk


def test_read_errors_hit_one_block(tmp_path: Path, failing: type[FailingFile]) -> None:
    """One bad sector would fail a whole batch, or be taken for corruption."""
    store = StoreDriver(tmp_path / "s", open_file=failing.open)
    store.write(range(6), 8192)
    failing.fault = refuse("read", errno.EIO, store.kept[3][1].place)
    assert store.read(range(6)) == [Status.DONE] * 3 + [Status.FAILED] + [Status.DONE] * 2
    failing.fault = FailingFile.fault
    assert store.read(range(6)) == [Status.DONE] * 6
    store.close()


@pytest.mark.parametrize(("code", "status"), [(errno.EIO, Status.FAILED), (errno.ENOSPC, Status.NO_ROOM)])
def test_write_errors_hit_one_block(tmp_path: Path, failing: type[FailingFile], code: int, status: Status) -> None:
    """A block whose write failed would be visible to lookup (LMCache#4991), or its neighbours be lost."""
    store = StoreDriver(tmp_path / "s", open_file=failing.open)
    store.write([0], 8192)
    failing.fault = refuse("write", code, store.kept[0][1].place + 2 * 2)
    evicted = Status.NO_ROOM if code == errno.ENOSPC else Status.DONE
    assert store.write([1, 2, 3], 8192, evict=[0]) == [Status.DONE, status, Status.DONE, evicted]
    assert store.tier.check() == []
    store.reopen()
    assert sorted(store.kept) == [1, 3] if evicted is Status.DONE else [0, 1, 3]
    assert store.read([1, 3]) == [Status.DONE] * 2
    store.close()


def test_no_space_for_an_extent(tmp_path: Path, failing: type[FailingFile]) -> None:
    """A full disk would be an exception instead of a value."""
    failing.fault = refuse("allocate", errno.ENOSPC)
    store = StoreDriver(tmp_path / "s", open_file=failing.open)
    assert store.write([1, 2]) == [Status.NO_ROOM] * 2
    assert store.tier.check() == []
    failing.fault = FailingFile.fault
    assert store.write([1, 2]) == [Status.DONE] * 2
    store.close()


def test_short_transfers_are_continued(tmp_path: Path, failing: type[FailingFile]) -> None:
    """The kernel may move less than asked; the rest would be garbage."""
    failing.fault = lambda kind, start, end: 4096 if kind in ("read", "write") and end - start > 4096 else None
    store = StoreDriver(tmp_path / "s", open_file=failing.open)
    assert store.write(range(5), 16_384) == [Status.DONE] * 5
    assert store.read(range(5)) == [Status.DONE] * 5
    store.close()


def test_a_failed_sync_is_final(tmp_path: Path, failing: type[FailingFile]) -> None:
    """The kernel reports a lost write once; the next sync succeeds and the lost slots would be believed."""
    store = StoreDriver(tmp_path / "s", durability="batch", open_file=failing.open)
    store.write([1])
    failing.fault = refuse("sync", errno.EIO)
    assert store.write([2, 3], evict=[1]) == [Status.FAILED] * 3
    failing.fault = FailingFile.fault
    assert store.read([1]) == [Status.DONE]
    lost = {store.kept[1][1].place + 2, store.kept[1][1].place + 4}
    assert store.write(range(4, 10)) == [Status.DONE] * 6
    assert not lost & {stored.place for _, stored in store.kept.values()}
    assert len(store.tier.findings) == 1
    store.reopen()
    assert sorted(store.kept) == [1, *range(4, 10)]
    store.close()


@pytest.mark.parametrize(
    ("error", "status"), [(lmdb.Error("no"), Status.FAILED), (lmdb.DiskError("no"), Status.NO_ROOM)]
)
def test_a_failed_commit_changes_nothing(tmp_path: Path, error: lmdb.Error, status: Status) -> None:
    """A batch would be half applied: its slots reused while the old records still name them."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2])
    used, room = store.tier.used_bytes(), store.tier.room(5000)
    commit = store.tier._store.index.commit

    def refused(change: object) -> None:
        raise error

    store.tier._store.index.commit = refused
    assert store.write([3, 4], evict=[1], note=b"x") == [status] * 4
    assert store.tier.drop(store.namespace).status is status
    store.tier._store.index.commit = commit
    assert (store.tier.used_bytes(), store.tier.room(5000)) == (used, room)
    assert store.tier.check() == []
    assert store.read([1, 2]) == [Status.DONE] * 2
    store.reopen()
    assert sorted(store.kept) == [1, 2]
    store.close()


def test_a_dead_index_stops_the_writer(tmp_path: Path) -> None:
    """After a half-written commit payload would be written over slots that the disk's index still names."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    index = store.tier._store.index

    def refused(change: object) -> None:
        raise lmdb.PanicError("half written")

    index.commit, index.is_writable = refused, lambda: False
    assert store.write([2]) == [Status.FAILED]
    assert store.write([3], evict=[1]) == [Status.FAILED] * 2
    assert store.tier.room(5000) == 0
    assert store.read([1]) == [Status.DONE]
    store.close()


# ---------------------------------------------------------------- index


def rows_of(path: Path) -> Index:
    return Index.open(path / "index", "none", 1 << 20)


@pytest.mark.parametrize("position", [0, 1, 2, 4, 8, 12, 20, 28, 36, 70, 75])
def test_damaged_records_are_skipped(tmp_path: Path, position: int) -> None:
    """A record with one wrong byte would name another block, or another length."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2, 3])
    store.close()
    raw = lmdb.open(str(tmp_path / "s" / "index"), max_dbs=5)
    blocks = raw.open_db(b"blocks")
    with raw.begin(write=True, db=blocks) as txn:
        key, row = list(txn.cursor())[1]
        damaged = bytearray(row)
        damaged[position] ^= 0x41
        txn.put(key, bytes(damaged))
    raw.close()
    store.tier = store._open()
    store.rescan([1, 2, 3])
    assert sorted(store.kept) == [1, 3]
    assert len(store.tier.findings) == 1
    assert store.tier.used_bytes() == 2 * 8192
    assert store.write([4]) == [Status.DONE]
    assert store.read([1, 3, 4]) == [Status.DONE] * 3
    store.close()


@pytest.mark.parametrize("position", [4, 12, 40, -1], ids=["namespace", "generation", "key", "check"])
def test_a_record_damaged_while_open(tmp_path: Path, position: int) -> None:
    """A damaged record would be believed by a reader, or its slot be lost for ever."""
    store = StoreDriver(tmp_path / "s")
    store.write([1, 2])
    index = store.tier._store.index
    [(key, row), _] = index.rows("blocks")
    damaged = bytearray(row)
    damaged[position] ^= 1
    index.commit(Change(blocks={key: bytes(damaged)}))
    assert store.read([1, 2]) == [Status.CORRUPT, Status.DONE]
    assert store.write([], evict=[1]) == [Status.DONE]
    assert store.tier.check() == []
    store.close()


def test_a_record_at_a_free_slot_frees_nothing(tmp_path: Path) -> None:
    """A slot that is free would be freed again, and given to two blocks."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    index, (_, stored) = store.tier._store.index, store.kept[1]
    [(key, row)] = index.rows("blocks")
    extent, slot = PLACE_KEY.unpack(key)
    index.commit(Change(blocks={PLACE_KEY.pack(extent, slot + 1): row}))
    astray = EvictItem(key_of(1, store.namespace), stored.place + 2, stored.generation)
    assert [end.status for end in store.tier.write(WriteBatch(evict=[astray]))] == [Status.CORRUPT]
    assert store.tier._store.allocator.check() == []
    assert store.read([1]) == [Status.DONE]
    store.close()


@pytest.mark.parametrize("beside", [{}, {b"odd": b"x"}], ids=["looked at together", "looked at one by one"])
def test_records_at_impossible_places(tmp_path: Path, beside: dict[bytes, bytes]) -> None:
    """Intact records that contradict their extent, the slab or the namespaces would be served."""
    store = StoreDriver(tmp_path / "s")
    store.write([1])
    store.close()
    reader = StoreReader.open(tmp_path / "s")
    [stored] = reader.records()
    reader.close()
    index = rows_of(tmp_path / "s")
    record = stored.record
    lies = [
        (PLACE_KEY.pack(0, 9999), record),
        (PLACE_KEY.pack(77, 0), record),
        (PLACE_KEY.pack(0, 5), record._replace(length_bytes=4096)),
        (PLACE_KEY.pack(0, 6), record._replace(namespace=999)),
    ]
    from kvtier.tiers.lmdb.index import Change

    index.commit(Change(blocks={key: encode_record(key, lie) for key, lie in lies} | beside))
    index.close()
    store.tier = store._open()
    store.rescan([1])
    assert len(store.tier.findings) == 4 + len(beside)
    assert store.read([1]) == [Status.DONE]
    assert store.tier.used_bytes() == 8192
    store.close()


def test_a_future_format(tmp_path: Path) -> None:
    """A store of a later version would be read by this version's rules, and ruined."""
    store = StoreDriver(tmp_path / "s")
    header = store.tier._store.header
    store.close()
    from dataclasses import replace

    from kvtier.tiers.lmdb.index import Change

    index = rows_of(tmp_path / "s")
    index.commit(Change(meta={HEADER_KEY: encode_header(replace(header, format=3))}))
    index.close()
    with pytest.raises(StoreFormatError, match=r"format 3.*reads format 1 and 2.*Use the kvtier that made it"):
        store._open()


@pytest.mark.parametrize("damage", ["empty", "cut", "cut to a page", "garbage", "zeroes", "absent", "no header"])
def test_a_broken_index(tmp_path: Path, damage: str) -> None:
    """LMDB would follow a wild pointer and take the inference server with it."""
    store = StoreDriver(tmp_path / "s")
    store.write(range(200), 4096)
    store.close()
    data = tmp_path / "s" / "index" / "data.mdb"
    size = data.stat().st_size
    if damage == "empty":
        os.truncate(data, 0)
    elif damage == "cut":
        os.truncate(data, size // 2)
    elif damage == "cut to a page":
        os.truncate(data, 4096)
    elif damage == "garbage":
        data.write_bytes(random.Random(1).randbytes(size))
    elif damage == "zeroes":
        data.write_bytes(bytes(size))
    elif damage == "absent":
        data.unlink()
    else:
        from kvtier.tiers.lmdb.index import Change

        index = rows_of(tmp_path / "s")
        index.commit(Change(meta={HEADER_KEY: None}))
        index.close()
    with pytest.raises(StoreFormatError, match="Delete the folder to start with an empty store"):
        store._open()
    store.path = tmp_path / "t"
    store.tier = store._open()  # nothing of the failed attempt is in the way
    store.close()


HOSTILE = """
import pathlib, random, shutil, sys
from kvtier.errors import StoreFormatError
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.types import EvictItem, Status, WriteBatch

source, folder, seed = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
whole = (source / "index" / "data.mdb").read_bytes()
for _ in range(40):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    damaged = bytearray(whole)
    if chance.random() < 0.5:
        page = chance.randrange(len(whole) // 4096) * 4096
        damaged[page : page + 4096] = chance.randbytes(4096)
    for _ in range(chance.choice((1, 3, 30, 300))):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    (folder / "index" / "data.mdb").write_bytes(damaged)
    try:
        store = StoreDriver(folder)
    except StoreFormatError:
        continue
    store.rescan(range(300))
    assert set(store.read(sorted(store.kept))) <= {Status.DONE, Status.CORRUPT}
    store.write(range(300, 340), evict=sorted(store.kept)[:20])
    store.read(sorted(store.kept))
    store.close()
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hostile_index_pages(tmp_path: Path, seed: int) -> None:
    """Random damage inside the index would crash the process, or make it serve wrong bytes."""
    store = StoreDriver(tmp_path / "s")
    for start in range(0, 300, 30):
        store.write(range(start, start + 30), 4096, evict=sorted(store.kept)[:3], row=bytes(9000))
    store.close()
    command = [sys.executable, "-c", HOSTILE, str(tmp_path / "s"), str(tmp_path / "t"), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
