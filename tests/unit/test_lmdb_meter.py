"""What a store says that it gives its disk, against what it does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb import meter
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.meter import Meter, device_of, disk_written_bytes, file_system_bytes
from kvtier.types import PAGE_BYTES


@pytest.fixture
def store(tmp_path: Path) -> StoreDriver:
    return StoreDriver(tmp_path / "s")


def test_blocks_slots_and_index_are_counted(store: StoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wear is told too low: padding and index pages wear a disk as well."""
    passed = []
    write = BlockFile.write

    def noting(self: BlockFile, buffers: list[memoryview], offset: int) -> int:
        passed.append(write(self, buffers, offset))
        return passed[-1]

    monkeypatch.setattr(BlockFile, "write", noting)
    assert store.tier.written()[:3] == (0, 0, 0)
    store.write(range(5), 5000)
    told = store.tier.written()
    assert (told.payload_bytes, told.slot_bytes) == (25_000, 5 * 2 * PAGE_BYTES)
    assert told.slot_bytes == sum(passed)
    store.write([], evict=[1], note=b"x" * 3000)
    later = store.tier.written()
    assert later[:2] == told[:2]
    assert later.index_bytes > told.index_bytes
    store.close()


def test_the_index_pages_are_those_that_reach_the_file(store: StoreDriver) -> None:
    """The kernel's counter is of another thread, or nothing: the index seems to cost nothing."""
    assert store.tier._writer.meter._passed_bytes() >= 0
    store.write(range(3), 5000)
    before = store.tier.written().index_bytes
    store.write([], note=b"n" * 40_000)  # ten pages of its own, at least
    given = store.tier.written().index_bytes - before
    assert 10 * PAGE_BYTES <= given <= 25 * PAGE_BYTES
    assert given % PAGE_BYTES == 0
    store.close()


def test_whoever_commits_is_counted(tmp_path: Path) -> None:
    """The kernel counts by thread: the pages of a commit on another one than the first are missed."""
    counted = Meter(tmp_path)
    data = tmp_path / "data"

    def commit() -> None:
        with counted.commit():
            data.write_bytes(bytes(3 * PAGE_BYTES))

    commit()
    assert counted.written().index_bytes == 3 * PAGE_BYTES
    with ThreadPoolExecutor(1) as other:
        other.submit(commit).result()
    commit()
    assert counted.written().index_bytes == 9 * PAGE_BYTES
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    counted.close()
    counted.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files


def test_blocks_that_lie_inline_are_pages_as_well(tmp_path: Path) -> None:
    """A store that keeps blocks in LMDB seems to write nothing but an index."""
    store = StoreDriver(tmp_path / "s", payload="inline", capacity_bytes=16 << 20)
    store.write(range(20), 5000)
    told = store.tier.written()
    assert (told.payload_bytes, told.slot_bytes) == (100_000, 0)
    assert told.index_bytes > 100_000
    store.close()


def test_a_payload_that_the_device_refuses_is_not_counted(store: StoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken disk uses up the budget of writes that never happened."""

    def refusing(self: BlockFile, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "no")

    monkeypatch.setattr(BlockFile, "write", refusing)
    store.write(range(5), 5000)
    assert store.tier.written()[:2] == (0, 0)
    monkeypatch.undo()
    store.close()


def test_what_the_kernel_does_not_tell_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store on tmpfs, or in a container without these files, does not open or loses batches."""
    monkeypatch.setattr(meter, "device_of", lambda folder: None)
    counted = Meter(tmp_path)
    with counted.commit():
        pass
    counted.payload(10, 4096)
    assert counted.written() == (10, 4096, 0, None)
    assert device_of(tmp_path / "not there") is None
    assert disk_written_bytes(tmp_path) is None


def test_the_disks_own_count_is_told_as_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes of before the start, or the wrong field, are taken for ours."""
    stat = tmp_path / "stat"
    stat.write_text("1 2 3 4 5 6 1000 8 9 10 11\n")
    monkeypatch.setattr(meter, "device_of", lambda folder: tmp_path)
    counted = Meter(tmp_path)
    assert counted.written().disk_bytes == 0
    stat.write_text("1 2 3 4 5 6 1010 8 9 10 11\n")
    with counted.commit():
        pass
    assert counted.written().disk_bytes == 10 * 512
    stat.unlink()  # it was taken out
    with counted.commit():
        pass
    assert counted.written().disk_bytes == 10 * 512


def test_the_size_of_a_file_system_is_known_before_the_folder_is_there(tmp_path: Path) -> None:
    """`dwpd` without a drive fails at the first start."""
    assert file_system_bytes(tmp_path / "a" / "b") == file_system_bytes(tmp_path) > 1 << 20
