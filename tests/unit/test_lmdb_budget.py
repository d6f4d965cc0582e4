"""Capacity is split so that the folder never outgrows it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.testing.stores import StoreDriver
from kvtier.tiers.lmdb.budget import EXTENT_BYTES_MAX, EXTENTS_MAX, FILESYSTEM_SHARE, OVERHEAD_BYTES, SLOTS_MIN, split
from kvtier.types import PAGE_BYTES, Status, page_aligned


@given(st.integers(1, 1 << 42), st.integers(1, 1 << 28))
def test_parts_fit(capacity: int, length: int) -> None:
    """A store would take more disk than it was given (LMCache#4664)."""
    try:
        budget = split(capacity, length, "tiers[0]")
    except ConfigError as error:
        remedy = error.remedy
    else:
        remedy = ""
    if remedy:
        needed = int(remedy.split()[3])
        assert needed > capacity
        with pytest.raises(ConfigError):
            split(needed - 1, length, "tiers[0]")
        budget = split(needed, length, "tiers[0]")
        capacity = needed
    stride = page_aligned(length)
    overhead = OVERHEAD_BYTES + capacity // FILESYSTEM_SHARE
    assert budget.extents_max * budget.extent_bytes + budget.index_bytes + overhead <= capacity
    assert budget.extent_bytes % PAGE_BYTES == 0
    assert stride <= budget.extent_bytes <= max(EXTENT_BYTES_MAX, stride)
    assert budget.extents_max * (budget.extent_bytes // stride) >= SLOTS_MIN


def test_common_sizes() -> None:
    """Extents would be too few to share between size classes, or too small to coalesce."""
    budget = split(50 << 30, 2 << 20, "tiers[2]")
    assert budget.extent_bytes == 64 << 20
    assert budget.index_bytes <= (50 << 30) // 64
    assert split(16 << 20, 65536, "x").extent_bytes == 2 << 20


def test_existing_extents_bind() -> None:
    """Blocks larger than the store's extents would end as NO_ROOM for ever, in silence."""
    with pytest.raises(ConfigError, match="extents of 1MiB"):
        split(1 << 30, 2 << 20, "tiers[2]", extent_bytes=1 << 20)


@pytest.mark.parametrize("length", [1, 4096, 65_536, 300_000, 203 * 4096, 2 << 20, 24 << 20, 1 << 28])
@pytest.mark.parametrize("extent", [None, 1 << 28])
def test_the_remedy_is_the_smallest_capacity(length: int, extent: int | None) -> None:
    """The user would be sent to a capacity that is refused as well, or to more than is needed."""
    with pytest.raises(ConfigError) as caught:
        split(1 << 19, length, "tiers[2]", extent)
    needed = int(caught.value.remedy.split()[3])
    with pytest.raises(ConfigError, match=rf"Give at least {needed} bytes"):
        split(needed - 1, length, "tiers[2]", extent)
    for more in (0, 1, 4096, needed // 100, needed // 3, 10 * needed):
        assert split(needed + more, length, "tiers[2]", extent).slots(page_aligned(length)) >= SLOTS_MIN


def test_a_refusal_adds_up() -> None:
    """The user would see a number of blocks that does not follow from the sizes beside it."""
    with pytest.raises(ConfigError) as caught:
        split(1 << 20, 65_536, "tiers[2]")
    assert caught.value.problem == (
        "1MiB, less 512KiB of index and 324KiB of overhead, leave 188KiB: 2 extents of 64KiB, 2 blocks of 64KiB; a "
        "store needs room for 4"
    )
    assert caught.value.remedy == "Give at least 1118481 bytes (1.07MiB)"


@given(st.integers(1 << 22, 1 << 42), st.integers(1, 1 << 20), st.integers(-(1 << 30), 1 << 42))
def test_extents_follow_the_disk(capacity: int, length: int, reachable: int) -> None:
    """One extent would be more than a small disk can give; or a large store have too many to look at."""
    budget = split(capacity, max(1, min(length, capacity // 16)), "tiers[2]", reachable_bytes=reachable)
    stride = page_aligned(max(1, min(length, capacity // 16)))
    share = page_aligned(max(0, min(capacity, reachable)) // 8)
    least = page_aligned(capacity // EXTENTS_MAX)
    assert stride <= budget.extent_bytes <= max(stride, min(EXTENT_BYTES_MAX, max(share, least)))
    assert budget.extents_max <= max(EXTENTS_MAX, capacity // EXTENT_BYTES_MAX)


@pytest.mark.parametrize("capacity", [(1 << 62) + 1, 1 << 64, 1 << 70])
def test_no_header_can_say_more(tmp_path: Path, capacity: int) -> None:
    """The store would be created, and nobody could ever read its header again."""
    with pytest.raises(ConfigError, match=r"EiB are more than a store can have\. Use 4EiB at most") as caught:
        StoreDriver(tmp_path / "s", capacity_bytes=capacity)
    assert caught.value.path == "tier disk.capacity"
    assert not (tmp_path / "s").exists()
    store = StoreDriver(tmp_path / "s", capacity_bytes=1 << 62)
    store.write([1])
    ended = store.tier.change_capacity(capacity)
    assert (ended.status, "more than a store can have" in ended.detail) == (Status.FAILED, True)
    assert store.tier.capacity_bytes == 1 << 62
    store.reopen(capacity_bytes=512 << 20)
    assert store.read([1]) == [Status.DONE]
    store.close()


def test_no_process_can_map_more(tmp_path: Path) -> None:
    """A user would be told to mend what nobody can, and find a folder that is no store; or a live cache would lose its
    payloads to a map that cannot be."""
    with pytest.raises(ConfigError, match=r"payload: inline are more.*Use 100TiB at most, or payload: slab"):
        StoreDriver(tmp_path / "s", payload="inline", capacity_bytes=(100 << 40) + 1)
    assert not (tmp_path / "s").exists()
    store = StoreDriver(tmp_path / "s", payload="inline", capacity_bytes=100 << 40)
    store.write([1])
    assert store.tier.change_capacity(200 << 40).status is Status.FAILED
    assert store.read([1]) == [Status.DONE]
    store.close()
