"""How a store's capacity is split between payload and index, so that the folder never outgrows it.

    capacity  =  extents_max * extent_bytes  +  index_bytes (LMDB's map, a hard limit)  +  overhead

Pure arithmetic. Units: bytes.
"""

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.types import PAGE_BYTES, page_aligned

MIB = 1 << 20
EXTENT_BYTES_MAX = 64 * MIB
EXTENTS_WANTED = 8
SLOTS_MIN = 4  # fewer blocks than this are not a cache
INDEX_BYTES_MIN = MIB // 2
INDEX_BYTES_FIRST = MIB // 8  # the limit that a new index's file begins with; it grows by what it needs
INDEX_SHARE = 128  # index_bytes is at least capacity / INDEX_SHARE
RECORD_BYTES = 512  # a record is ~120 bytes in a page 60 % full, and its page may exist twice
EVICT_RESERVE_BYTES = MIB // 4  # index room that only evictions may use, so that a full index can be emptied
OVERHEAD_BYTES = EVICT_RESERVE_BYTES + 64 * 1024  # and the lock files and folders
# The filesystem's own map of the slab counts too: on ext4 up to 0.3 % of it, measured with every other slot of 4 KiB
# written, 0.02 % with 64 KiB.
FILESYSTEM_SHARE = 256


@dataclass(frozen=True, slots=True)
class Budget:
    """The split. The index may later grow at the cost of extents that are not lent yet."""

    capacity_bytes: int
    extent_bytes: int
    index_bytes: int

    @property
    def overhead_bytes(self) -> int:
        return OVERHEAD_BYTES + self.capacity_bytes // FILESYSTEM_SHARE

    @property
    def extents_max(self) -> int:
        return max(0, self.capacity_bytes - self.index_bytes - self.overhead_bytes) // self.extent_bytes

    def index_bytes_max(self, lent_extents: int) -> int:
        """How large the index may become while `lent_extents` stay."""
        return self.capacity_bytes - self.overhead_bytes - lent_extents * self.extent_bytes


def split(
    capacity_bytes: int,
    length_bytes_max: int,
    where: str,
    extent_bytes: int | None = None,
    index_bytes_min: int = 0,
    lent_extents: int = 0,
) -> Budget:
    """Split a capacity for blocks of up to `length_bytes_max`.

    extent_bytes: of the existing store, None for a new one. index_bytes_min: what its index takes already.
    lent_extents: that hold blocks; they are not given up for an index that could be larger, only for a capacity
    that is smaller. where: the place in the configuration, for the message. Raises ConfigError with the numbers.
    """
    stride = page_aligned(length_bytes_max)
    if extent_bytes is None:
        extent_bytes = max(stride, min(EXTENT_BYTES_MAX, page_aligned(capacity_bytes // EXTENTS_WANTED)))
    elif stride > extent_bytes:
        raise ConfigError(
            f"{where}.path",
            f"the store was created with extents of {extent_bytes} bytes, and a block now takes {stride}",
            "Use a new path, or delete the store to have it created anew",
        )
    wanted = max(INDEX_BYTES_MIN, capacity_bytes // INDEX_SHARE, capacity_bytes // stride * RECORD_BYTES)
    beside_extents = Budget(capacity_bytes, extent_bytes, 0).index_bytes_max(lent_extents) // PAGE_BYTES * PAGE_BYTES
    wanted = min(page_aligned(min(wanted, capacity_bytes // 8)), beside_extents)
    index_bytes = max(wanted, INDEX_BYTES_MIN, page_aligned(index_bytes_min))
    budget = Budget(capacity_bytes, extent_bytes, index_bytes)
    slots = budget.extents_max * (extent_bytes // stride)
    if slots < SLOTS_MIN:
        extents_wanted = -(-SLOTS_MIN // (extent_bytes // stride))
        enough = 2 * (INDEX_BYTES_MIN + OVERHEAD_BYTES) + EXTENTS_WANTED * stride  # for a new store of any size
        as_it_is = index_bytes_min + OVERHEAD_BYTES + extents_wanted * extent_bytes  # for an existing one
        needed_bytes = max(enough, as_it_is)
        needed_bytes += needed_bytes // (FILESYSTEM_SHARE - 1) + 1
        raise ConfigError(
            f"{where}.capacity",
            f"{capacity_bytes} bytes hold {slots} blocks of {length_bytes_max} bytes beside an index of "
            f"{index_bytes}; that is too few",
            f"Give at least {needed_bytes} bytes",
        )
    return budget
