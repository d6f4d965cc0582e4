"""What the configuration asks of a store, and whether its filesystem can give it.

Owns nothing. Always: what can never work is refused before anything is created, with path, numbers and a remedy; what
works less well than it reads is a note. Units: bytes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.units import BYTES_MAX, readable_bytes
from kvtier.errors import ConfigError
from kvtier.registry import suggestion
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, INDEX_BYTES_MIN, OVERHEAD_BYTES, Budget, split
from kvtier.tiers.lmdb.index import SYNC_MODES, Index
from kvtier.tiers.lmdb.inline_file import SLOTS_SHARE
from kvtier.tiers.lmdb.layout import FORMATS, LENGTH_BYTES_MAX
from kvtier.tiers.lmdb.payload_table import DELETE_RESERVE_BYTES
from kvtier.types import PAGE_BYTES, page_aligned

# Three fifths are LMDB's map, which must fit into the 128 TiB that a process has addresses for, beside all else.
INLINE_BYTES_MAX = 100 << 40


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says. `where` is the place in it, for messages."""

    where: str
    capacity_bytes: int
    length_bytes_max: int
    min_free_bytes: int
    durability: str
    io_threads: int
    payload: str = "slab"

    @property
    def budget_bytes(self) -> int:
        """What slots and index may take of the capacity: all, unless LMDB needs room around the payloads."""
        part, whole = self.share
        return self.capacity_bytes * part // whole

    @property
    def payload_bytes(self) -> int:
        """What the table of inline payloads may grow to: what `budget_bytes` leaves, and a reserve for deleting."""
        return (self.capacity_bytes - self.budget_bytes - DELETE_RESERVE_BYTES) // PAGE_BYTES * PAGE_BYTES

    @property
    def share(self) -> tuple[int, int]:
        """`budget_bytes` as a fraction of the capacity."""
        return (1, 1) if self.payload == "slab" else SLOTS_SHARE

    def budget_beside(self, extent_bytes: int, index: Index, lent_extents: int, before_bytes: int) -> Budget:
        """The split of the capacity, which was `before_bytes`, for a store that has these extents and this index.

        What the index may fill and has not costs no extent; nor, unless the capacity is smaller now, does what it has
        filled of its reserve, which is overhead. Raises ConfigError, lmdb.Error.
        """
        self.check_capacity()
        beside_bytes = Budget(self.budget_bytes, extent_bytes, 0).index_bytes_max(lent_extents)
        beside_bytes = max(0, beside_bytes // PAGE_BYTES * PAGE_BYTES)
        reserve_bytes = EVICT_RESERVE_BYTES if self.capacity_bytes >= before_bytes else 0
        index_bytes = max(index.file_bytes(), min(index.map_bytes(), beside_bytes))
        if index_bytes <= beside_bytes + reserve_bytes:
            index_bytes = min(index_bytes, beside_bytes)
        return split(
            self.budget_bytes,
            self.length_bytes_max,
            self.where,
            extent_bytes,
            index_bytes,
            lent_extents,
            share=self.share,
        )

    def check(self) -> None:
        """Raises ConfigError."""
        if self.durability not in SYNC_MODES:
            raise ConfigError(
                f"{self.where}.durability",
                f"durability {self.durability!r} is unknown",
                suggestion(self.durability, SYNC_MODES),
            )
        if self.payload not in FORMATS:
            raise ConfigError(
                f"{self.where}.payload", f"payload {self.payload!r} is unknown", suggestion(self.payload, FORMATS)
            )
        if not 1 <= self.length_bytes_max <= LENGTH_BYTES_MAX:
            raise ConfigError(
                self.where, f"blocks of {self.length_bytes_max} bytes", f"Use 1 to {LENGTH_BYTES_MAX} bytes"
            )
        if self.io_threads < 1:
            raise ConfigError(self.where, f"{self.io_threads} I/O threads", "Use at least 1")
        self.check_capacity()
        if self.min_free_bytes < 0:
            raise ConfigError(f"{self.where}.min_free", f"min_free of {self.min_free_bytes} bytes", "Use 0 or more")

    def check_capacity(self) -> None:
        """Raises ConfigError for one that no header can say, or no process map; too small ones are for `split`."""
        most_bytes = INLINE_BYTES_MAX if self.payload == "inline" else BYTES_MAX
        if self.capacity_bytes > most_bytes:
            of_inline = " with payload: inline" if self.payload == "inline" else ""
            most = readable_bytes(most_bytes)
            raise ConfigError(
                f"{self.where}.capacity",
                f"{readable_bytes(self.capacity_bytes)}{of_inline} are more than a store can have",
                f"Use {most} at most{', or payload: slab' if of_inline else ''}",
            )

    def check_new(self) -> None:
        """As `check`, of a store that does not exist yet: its capacity must do for some blocks."""
        self.check()
        split(self.budget_bytes, self.length_bytes_max, self.where, share=self.share)

    def check_filesystem(self, folder: Path) -> list[str]:
        """Compare with the size of the filesystem that the folder is or will be on; returns notes.

        Raises ConfigError if min_free forbids every block, OSError if the filesystem does not answer.
        """
        total_bytes = filesystem_bytes(folder)
        if total_bytes == 0:  # some network filesystems do not tell
            return []
        has, keep = readable_bytes(total_bytes), readable_bytes(self.min_free_bytes)
        if self.min_free_bytes >= total_bytes:
            raise ConfigError(
                f"{self.where}.min_free",
                f"the filesystem of {folder} has {has} in all, and {keep} of them are to stay free: no block could "
                "ever be stored",
                f"Use less than {has}, or a larger filesystem",
            )
        reachable_bytes = total_bytes - self.min_free_bytes
        if self.capacity_bytes <= reachable_bytes:
            return []
        return [
            f"capacity: {readable_bytes(self.capacity_bytes)} will never be reached, for the filesystem has {has} in "
            f"all and min_free keeps {keep}: {readable_bytes(reachable_bytes)} at most"
        ]

    def reachable_bytes(self, folder: Path, free_bytes: int) -> int:
        """What of the capacity a new store can reach: in what the filesystem has free now, or, if not even one block
        fits there, in all of it, for then others must leave first. Raises OSError."""
        now_bytes = free_bytes - self.min_free_bytes
        if now_bytes >= INDEX_BYTES_MIN + OVERHEAD_BYTES + page_aligned(self.length_bytes_max):
            return min(self.capacity_bytes, now_bytes)
        total_bytes = filesystem_bytes(folder)
        return min(self.capacity_bytes, total_bytes - self.min_free_bytes) if total_bytes else self.capacity_bytes


def filesystem_bytes(folder: Path) -> int:
    """The size of the filesystem that a folder is on, or will be when it exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    filesystem = os.statvfs(folder)
    return filesystem.f_blocks * filesystem.f_frsize
