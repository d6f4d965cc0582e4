"""Capacity is split so that the folder never outgrows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.tiers.lmdb.budget import EXTENT_BYTES_MAX, FILESYSTEM_SHARE, OVERHEAD_BYTES, SLOTS_MIN, split
from kvtier.types import PAGE_BYTES, page_aligned


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
    with pytest.raises(ConfigError, match="extents of 1048576"):
        split(1 << 30, 2 << 20, "tiers[2]", extent_bytes=1 << 20)
