"""Where a store's next bytes go: slots for blocks, extents for size classes, pages for the index.

Owns: the right to grow. Always: lent extents and the index's map stay within the capacity together; an extent is
lent only if the filesystem keeps `min_free_bytes` and has claimed its disk space; an empty extent's disk is given
back. The writer's thread only, except `left`.
Units: bytes; strides and places in pages of 4096 bytes.
"""

from collections.abc import Iterable
from dataclasses import replace

import lmdb

from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, MIB
from kvtier.tiers.lmdb.opening import OpenStore
from kvtier.types import PAGE_BYTES, page_aligned

_INDEX_STEP_BYTES = MIB // 4


class Room:
    """What one open store may still take."""

    def __init__(self, store: OpenStore, min_free_bytes: int, length_bytes_max: int) -> None:
        self.length_bytes_max = length_bytes_max
        self.refusal = ""  # why the last extent was not lent
        self.closed = False  # nothing can be committed any more
        self._store = store
        self._min_free_bytes = min_free_bytes
        self._reserve_used = False
        self._disk_free_bytes = store.slab.file.disk_free_bytes()

    def left(self, length_bytes: int) -> int:
        """How many more blocks of this length fit without evicting. From memory, on any thread."""
        stride_pages = page_aligned(length_bytes) // PAGE_BYTES
        allocator = self._store.allocator
        if self.closed or not 1 <= length_bytes <= self.length_bytes_max:
            return 0
        by_capacity = allocator.extents_max - allocator.lent_extents
        by_disk = (self._disk_free_bytes - self._min_free_bytes) // self._store.header.extent_bytes
        unlent = max(0, min(by_capacity, by_disk))
        return allocator.free_slots(stride_pages) + unlent * allocator.slots_per_extent(stride_pages)

    def take(self, stride_pages: int, slots: int) -> list[int]:
        """Up to `slots` free slots of a class, lending extents as needed; `refusal` says why there are fewer."""
        allocator = self._store.allocator
        places = allocator.take(stride_pages, slots)
        while len(places) < slots and self._lend(stride_pages):
            places += allocator.take(stride_pages, slots - len(places))
        return places

    def _lend(self, stride_pages: int) -> bool:
        """Lend one more extent, if capacity, min_free and the disk allow it."""
        store = self._store
        extent_bytes = store.header.extent_bytes
        extent = store.allocator.lend(stride_pages)
        if extent is None:
            self.refusal = f"capacity: all {store.allocator.extents_max} extents are lent"
            return False
        self.refusal = ""
        if store.slab.file.disk_free_bytes() - extent_bytes < self._min_free_bytes:
            self.refusal = f"min_free: the disk must keep {self._min_free_bytes} bytes free"
        else:
            try:
                store.slab.file.allocate(extent * extent_bytes, extent_bytes)
            except OSError as error:
                self.refusal = f"the disk refused an extent: {error}"
                store.slab.file.punch(extent * extent_bytes, extent_bytes)
        if self.refusal:
            store.allocator.unlend_unused(extent)
        return not self.refusal

    def give_back(self, places: Iterable[int]) -> list[int]:
        """Free slots, and give the disk of extents that became empty back; returns those."""
        extent_bytes = self._store.header.extent_bytes
        emptied = self._store.allocator.give_back(places)
        for extent in emptied:
            self._store.slab.file.punch(extent * extent_bytes, extent_bytes)
        return emptied

    def refresh(self) -> None:
        """Ask the filesystem again what it has left, for `left`."""
        self._disk_free_bytes = self._store.slab.file.disk_free_bytes()

    def grow_index(self, evicting: bool) -> bool:
        """Give the index part of what no extent uses yet. Only evictions may use the reserve, once."""
        store = self._store
        store.index.release_dead_readers()
        now = store.index.map_bytes()
        step = max(now // 2 // PAGE_BYTES * PAGE_BYTES, _INDEX_STEP_BYTES)
        limit = store.budget.index_bytes_max(store.allocator.lent_extents) // PAGE_BYTES * PAGE_BYTES
        wanted = min(now + step, limit)
        reserve = wanted <= now
        if reserve:
            if not evicting or self._reserve_used:
                return False
            wanted = now + EVICT_RESERVE_BYTES
        try:
            store.index.grow(wanted)
        except lmdb.Error:
            return False
        if reserve:
            self._reserve_used = True
        else:
            store.budget = replace(store.budget, index_bytes=wanted)
            store.allocator.extents_max = store.budget.extents_max
        return True
