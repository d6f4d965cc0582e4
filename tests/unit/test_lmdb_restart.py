"""What a restart with the same capacity keeps: all that was stored, beside an index of whatever size."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.blockfile import claim
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, Budget
from kvtier.types import PAGE_BYTES, Status

DONE, NO_ROOM = Status.DONE, Status.NO_ROOM
LENGTH = 16_384
MIB = 1 << 20


def full(folder: Path, **options: Any) -> StoreDriver:
    """Every extent is lent, and the index as large as it may become beside them."""
    store = StoreDriver(folder, **{"capacity_bytes": 4 * MIB} | options)
    length_bytes = options.get("length_bytes_max", LENGTH)
    assert set(store.write(range(store.tier.room(length_bytes)), length_bytes)) == {DONE}
    assert store.write([5000], length_bytes) == [NO_ROOM]
    row = 0
    while store.write([], **{f"row{row}": os.urandom(20_000)}) == [DONE]:
        row += 1
    return store


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def keeps_all(store: StoreDriver, caplog: pytest.LogCaptureFixture, **options: Any) -> None:
    """A restart gives nothing up, and the store goes on as before."""
    kept = sorted(store.kept)
    store.reopen(**options)
    assert sorted(store.kept) == kept
    assert store.tier.excess_bytes() == 0
    assert "given up" not in caplog.text
    assert "blocks leave" not in caplog.text
    assert store.read(kept) == [DONE] * len(kept)
    assert taken_bytes(store.path) <= store.options["capacity_bytes"]


@pytest.mark.parametrize("payload", ["slab", "inline"])
def test_a_page_of_the_filesystems_own_costs_no_extent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, payload: str
) -> None:
    """An index whose file lies in many pieces opens a page larger than it closed, and an extent of blocks goes."""
    store = full(tmp_path / "s", payload=payload, capacity_bytes=12 * MIB)
    map_bytes = store.tier._store.index.map_bytes()
    store.tier.close()
    with (tmp_path / "s" / "index" / "data.mdb").open("r+b") as data:
        claimed_bytes = os.fstat(data.fileno()).st_blocks * 512
        claim(data.fileno(), claimed_bytes + PAGE_BYTES)
        assert os.fstat(data.fileno()).st_blocks * 512 > claimed_bytes
    keeps_all(store, caplog)
    assert store.tier._store.index.map_bytes() <= map_bytes + PAGE_BYTES
    assert not store.tier._room.reserve_used
    assert set(store.write([], evict=sorted(store.kept)[:3])) == {DONE}
    store.close()


def test_a_reserve_that_was_used_costs_no_extent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What evictions have filled of their reserve counts twice after a restart, and an extent goes for it."""
    store = full(tmp_path / "s", length_bytes_max=4096)
    row = 0
    while not store.tier._room.reserve_used:  # each leaves its extent lent
        store.write([], evict=sorted(store.kept)[row * 90 : row * 90 + 60])
        row += 1
    index = store.tier._store.index
    assert index.file_bytes() > index.map_bytes() - EVICT_RESERVE_BYTES
    lent = store.tier._store.allocator.lent_extents
    keeps_all(store, caplog)
    assert store.tier._store.allocator.lent_extents == lent
    assert store.tier._room.reserve_used
    assert store.tier.change_capacity(4 * MIB + PAGE_BYTES).done
    assert store.tier.excess_bytes() == 0, "a capacity that grows takes nothing"
    while store.kept:  # and it can be emptied
        assert set(store.write([], evict=sorted(store.kept)[:200])) == {DONE}
    assert not store.tier._room.reserve_used
    store.close()


def test_what_an_index_may_fill_goes_before_blocks_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A capacity that is a little smaller, while the store is open, takes blocks though the index has room to spare."""
    store = StoreDriver(tmp_path / "s", capacity_bytes=8 * MIB)
    for row in range(30):
        store.write([], **{f"row{row}": os.urandom(60_000)})
    store.write([], **{f"row{row}": b"" for row in range(30)})
    store.write(range(store.tier.room(LENGTH)), LENGTH)
    index, extent_bytes = store.tier._store.index, store.tier._store.header.extent_bytes
    lent, before_bytes = store.tier._store.allocator.lent_extents, index.map_bytes()
    middle_bytes = (index.file_bytes() + before_bytes) // 2
    assert middle_bytes > index.file_bytes() + 4 * PAGE_BYTES
    capacity_bytes = 8 * MIB
    while Budget(capacity_bytes, extent_bytes, 0).index_bytes_max(lent) > middle_bytes:
        capacity_bytes -= PAGE_BYTES
    kept = sorted(store.kept)
    assert store.tier.change_capacity(capacity_bytes).done
    assert store.tier.excess_bytes() == 0
    assert index.map_bytes() <= middle_bytes
    assert taken_bytes(tmp_path / "s") <= capacity_bytes
    keeps_all(store, caplog, capacity_bytes=capacity_bytes)
    assert sorted(store.kept) == kept
    store.close()


def test_a_smaller_capacity_does_not_use_the_reserve(tmp_path: Path) -> None:
    """The disk that a full index needs to be emptied is given to the index, and no sidecar is kept any more."""
    store = full(tmp_path / "s")
    store.write([], evict=[])
    assert not store.tier._room.reserve_used
    assert store.tier.change_capacity(4 * MIB - (128 << 10)).done
    assert store.tier.excess_bytes() > 0
    while store.tier.excess_bytes():
        assert set(store.write([], evict=sorted(store.kept)[:10])) == {DONE}
    assert not store.tier._room.reserve_used
    assert taken_bytes(tmp_path / "s") <= 4 * MIB - (128 << 10)
    store.close()


def test_what_is_said_of_blocks_that_go_is_true(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator who changed nothing is told that the capacity is smaller now."""
    store = full(tmp_path / "s")
    store.reopen(capacity_bytes=3 * MIB)
    extents = store.tier._store.allocator.extents_max
    assert f"a capacity of 3MiB has room for {extents} extents beside an index of" in caplog.text
    assert 0 < store.tier._store.allocator.lent_extents <= extents
    store.close()
