"""How a store's capacity is split between payload and index, so that the folder never outgrows it.

    capacity  =  extents_max * extent_bytes  +  index_bytes (LMDB's map, a hard limit)  +  overhead

Pure arithmetic. Units: bytes.
"""

from dataclasses import dataclass

from kvtier.config.units import readable_bytes
from kvtier.errors import ConfigError
from kvtier.types import PAGE_BYTES, page_aligned

MIB = 1 << 20
EXTENT_BYTES_MAX = 64 * MIB
EXTENTS_WANTED = 8
EXTENTS_MAX = 1 << 16  # on a disk that is nearly full; each is looked at when the store opens
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
    """The split. The index may later grow at the cost of extents that are not lent yet.

    share: what `capacity_bytes` is of the capacity that the user gave, as a fraction; for the message.
    """

    capacity_bytes: int
    extent_bytes: int
    index_bytes: int
    share: tuple[int, int] = (1, 1)

    @property
    def overhead_bytes(self) -> int:
        return OVERHEAD_BYTES + self.capacity_bytes // FILESYSTEM_SHARE

    @property
    def extents_max(self) -> int:
        return max(0, self.capacity_bytes - self.index_bytes - self.overhead_bytes) // self.extent_bytes

    def slots(self, stride_bytes: int) -> int:
        """How many blocks of this stride fit."""
        return self.extents_max * (self.extent_bytes // stride_bytes)

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
    reachable_bytes: int | None = None,
    share: tuple[int, int] = (1, 1),
) -> Budget:
    """Split a capacity for blocks of up to `length_bytes_max`.

    extent_bytes: of the existing store, None for a new one. index_bytes_min: what its index takes already.
    lent_extents: that hold blocks; they are not given up for an index that could be larger, only for a capacity
    that is smaller. reachable_bytes: how much of the capacity the disk can give a new store; its extents follow that.
    where: the place in the configuration, for the message; share: as in Budget. Raises ConfigError with the numbers.
    """
    stride = page_aligned(length_bytes_max)
    index_bytes_least = max(INDEX_BYTES_MIN, page_aligned(index_bytes_min))
    if extent_bytes is None:
        extent_bytes = _extent_bytes(capacity_bytes, stride, reachable_bytes)
        if Budget(capacity_bytes, extent_bytes, index_bytes_least, share).slots(stride) < SLOTS_MIN:
            extent_bytes = stride  # nothing is left over at an extent's end
    elif stride > extent_bytes:
        raise ConfigError(
            f"{where}.path",
            f"the store was created with extents of {readable_bytes(extent_bytes)}, and a block now takes "
            f"{readable_bytes(stride, up=True)}",
            "Use a new path, or delete the store to have it created anew",
        )
    least = Budget(capacity_bytes, extent_bytes, index_bytes_least, share)
    if least.slots(stride) < SLOTS_MIN:
        raise _too_small(least, stride, where)
    wanted = max(INDEX_BYTES_MIN, capacity_bytes // INDEX_SHARE, capacity_bytes // stride * RECORD_BYTES)
    wanted = page_aligned(min(wanted, capacity_bytes // 8))
    beside_extents = least.index_bytes_max(max(lent_extents, _extents_min(extent_bytes, stride)))
    index_bytes = max(index_bytes_least, min(wanted, beside_extents // PAGE_BYTES * PAGE_BYTES))
    return Budget(capacity_bytes, extent_bytes, index_bytes, share)


def _extent_bytes(capacity_bytes: int, stride: int, reachable_bytes: int | None) -> int:
    """A new store's extents: a share of what it can reach, and not too many for its capacity."""
    reachable_bytes = capacity_bytes if reachable_bytes is None else min(capacity_bytes, max(0, reachable_bytes))
    wanted = max(reachable_bytes // EXTENTS_WANTED, capacity_bytes // EXTENTS_MAX)
    return max(stride, min(EXTENT_BYTES_MAX, page_aligned(wanted)))


def _extents_min(extent_bytes: int, stride: int) -> int:
    return -(-SLOTS_MIN // (extent_bytes // stride))


def _too_small(budget: Budget, stride: int, where: str) -> ConfigError:
    """The refusal of a capacity, with the smallest one that would do: it solves n - n // FILESYSTEM_SHARE == fixed."""
    fixed_bytes = budget.index_bytes + OVERHEAD_BYTES
    fixed_bytes += _extents_min(budget.extent_bytes, stride) * budget.extent_bytes
    needed_bytes = fixed_bytes + (fixed_bytes - 1) // (FILESYSTEM_SHARE - 1)
    part, whole = budget.share
    needed_bytes = -(-needed_bytes * whole // part)
    of_it = "" if part == whole else f" ({part}/{whole} of the capacity)"
    left_bytes = budget.index_bytes_max(0) - budget.index_bytes
    left = f"leave {readable_bytes(left_bytes)}" if left_bytes > 0 else "leave nothing"
    return ConfigError(
        f"{where}.capacity",
        f"{readable_bytes(budget.capacity_bytes)}{of_it}, less {readable_bytes(budget.index_bytes)} of index and "
        f"{readable_bytes(budget.overhead_bytes, up=True)} of overhead, {left}: {budget.extents_max} extents of "
        f"{readable_bytes(budget.extent_bytes)}, {budget.slots(stride)} blocks of {readable_bytes(stride)}; a store "
        f"needs room for {SLOTS_MIN}",
        f"Give at least {needed_bytes} bytes ({readable_bytes(needed_bytes, up=True)})",
    )
