"""Where a store's next bytes go: slots for blocks, extents for size classes, pages for the index.

Owns: the right to grow. Always: lent extents and the index's map stay within the capacity together; whatever grows
claims its disk first, and only if the filesystem then still has `min_free_bytes`; an empty extent's disk is given
back. If somebody else takes the disk, the store gives way: `excess_bytes` asks for extents to be emptied, and
until they are nothing is stored. The first time that the disk
lets it grow no further, it says so. The writer's thread only, except `left` and `excess_bytes`.
Units: bytes; strides and places in pages of 4096 bytes.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import lmdb

from kvtier.config.units import readable_bytes
from kvtier.notices import say_once
from kvtier.tiers.lmdb.budget import EVICT_RESERVE_BYTES, MIB
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.types import PAGE_BYTES, page_aligned

_log = logging.getLogger(__name__)

_INDEX_STEP_BYTES = MIB // 4
READER_CHECK_S = 30.0


class Room:
    """What one open store may still take."""

    def __init__(
        self,
        store: OpenStore,
        min_free_bytes: int,
        length_bytes_max: int,
        slot_bytes: Callable[[int], int] = page_aligned,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """slot_bytes: how long the slot is that a block of a length gets."""
        self.length_bytes_max = length_bytes_max
        self._slot_bytes = slot_bytes
        self.refusal = ""  # why the last extent was not lent
        self.closed = False  # nothing can be committed any more
        self._store = store
        self._min_free_bytes = min_free_bytes
        self.reserve_used = True  # the disk that evictions need on a full one is not claimed (yet, or any more)
        self._disk_free_bytes = 0
        self._spare_bytes = 0  # of the filesystem, above min_free and what we owe
        self._owed_bytes = 0  # of disk, to the index and to what is lent and not yet written
        self._excess_bytes = 0
        self._over_bytes = 0
        self._refused_free_bytes = 0  # what the filesystem had when it last refused a payload
        self._shortage_told = False
        self._clock = clock
        self._readers_due_s = clock() + READER_CHECK_S  # opening has just done it
        if store.settled:
            self.fit_index()
        self.refresh()

    # ------------------------------------------------------------ from memory, on any thread

    def left(self, length_bytes: int) -> int:
        """How many more blocks of this length, coded as most of them are, fit without evicting."""
        stride_pages = self._slot_bytes(length_bytes) // PAGE_BYTES
        store = self._store
        usable = store.settled and not self.closed and not self._excess_bytes
        if not usable or not 1 <= length_bytes <= self.length_bytes_max:
            return 0
        allocator = store.allocator
        by_capacity = allocator.extents_max - allocator.lent_extents
        by_disk = self._spare_bytes // self._extent_takes_bytes()
        unlent = max(0, min(by_capacity, by_disk))
        return allocator.free_slots(stride_pages) + unlent * allocator.slots_per_extent(stride_pages)

    def fitting(self, strides_pages: Sequence[int]) -> list[bool]:
        """Of blocks with slots of these strides, in this order, which ones fit without evicting."""
        store = self._store
        allocator = store.allocator
        unlent = min(allocator.extents_max - allocator.lent_extents, self._spare_bytes // self._extent_takes_bytes())
        if not store.settled or self.closed or self._excess_bytes:
            return [False] * len(strides_pages)
        free: dict[int, int] = {}
        fits = []
        for stride_pages in strides_pages:
            left = free.get(stride_pages)
            if left is None:
                left = allocator.free_slots(stride_pages)
            if not left and unlent > 0:
                unlent -= 1
                left = allocator.slots_per_extent(stride_pages)
            fits.append(left > 0)
            free[stride_pages] = max(0, left - 1)
        return fits

    def excess_bytes(self) -> int:
        """What the store should give back for `min_free` or a smaller capacity, as of the last batch: at most what its
        extents take.

        Only emptied extents give anything back.
        """
        return self._excess_bytes

    # ------------------------------------------------------------ slots and extents

    def take(self, stride_pages: int, slots: int) -> list[int]:
        """Up to `slots` free slots of a class, lending extents as needed; `refusal` says why there are fewer."""
        if self._excess_bytes:  # nor into extents that are lent: they are to become empty
            self.refusal = self._why_excess()
            return []
        allocator = self._store.allocator
        places = allocator.take(stride_pages, slots)
        while len(places) < slots and self._lend(stride_pages):
            places += allocator.take(stride_pages, slots - len(places))
        return places

    def withhold(self, places: Collection[int]) -> None:
        """The disk had no room for what was to be written there, claimed or not: use other slots until it has more.

        Blocks that leave give slots that have their disk; were these tried again and again, all would leave for them.
        """
        if not places:
            return
        self._look()
        self._refused_free_bytes = self._disk_free_bytes
        self._store.return_disk(self._store.allocator.withhold(places))

    def give_back(self, places: Iterable[int]) -> None:
        """Free slots, and give the disk of extents that became empty back."""
        emptied = self._store.allocator.give_back(places)
        if emptied:
            self._store.return_disk(emptied)

    def _lend(self, stride_pages: int) -> bool:
        """Lend one more extent, if capacity, min_free and the disk allow it."""
        store = self._store
        allocator, extent_bytes = store.allocator, self._extent_takes_bytes()
        self.refusal = ""
        self._look()
        if allocator.next_unlent() is None:
            self.refusal = f"capacity: all {allocator.extents_max} extents are lent"
            return False
        if self._spare_bytes < extent_bytes:
            self.refusal = self._too_little_for("an extent", extent_bytes)
        else:
            extent = allocator.lend(stride_pages)
            assert extent is not None, "there is one to lend"
            self.refusal = self._claim_extent(extent)
            if self.refusal:
                allocator.unlend_unused(extent)
                store.return_disk([extent])
        if self.refusal:
            self._tell_shortage(self.refusal)
        return not self.refusal

    def _claim_extent(self, extent: int) -> str:
        """Take an extent's disk; returns why not. Somebody else may take some at the same time: so look again."""
        extent_bytes = self._store.header.extent_bytes
        try:
            self._store.slab.file.allocate(extent * extent_bytes, extent_bytes)
        except OSError as error:
            return f"the disk refused an extent: {error}"
        self._look()
        return self._below_min_free() if self._disk_free_bytes < self._min_free_bytes else ""

    def _extent_takes_bytes(self) -> int:
        """What one more extent takes of the disk."""
        return self._store.slab.file.takes_bytes(self._store.header.extent_bytes)

    # ------------------------------------------------------------ the index

    def grow_index(self, evicting: bool) -> bool:
        """Give the index part of what no extent uses yet. Only evictions may use the reserve, once."""
        store = self._store
        if store.release_dead_readers():
            return True  # there are pages to be used again
        now = store.index.map_bytes()
        step = max(now // 2 // PAGE_BYTES * PAGE_BYTES, _INDEX_STEP_BYTES)
        wanted = min(now + step, self._index_bytes_max() // PAGE_BYTES * PAGE_BYTES)
        if wanted > now and self._claim_index(wanted):
            if self._limit_index(wanted):
                self._count_index()
                return True
            store.index.claim_only(now + (0 if self.reserve_used else EVICT_RESERVE_BYTES))
        elif wanted > now:
            self._tell_shortage(self._too_little_for("the index", wanted - now))
        if not evicting or self.reserve_used or not self._limit_index(now + EVICT_RESERVE_BYTES):
            return False
        self.reserve_used = True
        return True

    def fit_index(self) -> None:
        """Since the opening, or with another capacity: what the index may fill and has not goes before an extent does.

        The opening goes by what the file takes of the disk, which is a page more if it lies there in many pieces.
        """
        store = self._store
        if store.allocator.lent_extents > store.allocator.extents_max:
            return  # some are to leave first, for which the index needs pages
        index, most = store.index, self._index_bytes_max() // PAGE_BYTES * PAGE_BYTES
        with_reserve = max(index.file_bytes(), most + EVICT_RESERVE_BYTES)
        full = index.file_bytes() > most
        fitting = with_reserve if full else most
        if index.map_bytes() > most and index.map_bytes() != fitting and self._limit_index(fitting):
            self.reserve_used = self.reserve_used or full
            index.claim_only(with_reserve)

    def _restore_reserve(self) -> None:
        """Once used, the reserve is part of the index for good: take another one as soon as capacity and disk allow."""
        now = self._store.index.map_bytes()
        if now <= self._index_bytes_max() and self._claim_index(now):
            self._count_index()
            self.reserve_used = False

    def _index_bytes_max(self) -> int:
        return self._store.budget.index_bytes_max(self._store.occupied_extents())

    def _claim_index(self, index_bytes: int) -> bool:
        """Claim the disk of an index of this size and of a reserve behind it, if min_free allows."""
        index = self._store.index
        self._look()
        wanted = index_bytes + EVICT_RESERVE_BYTES
        try:
            if max(0, wanted - index.disk_bytes()) > max(0, self._spare_bytes):
                return False
            index.claim(wanted)
        except OSError:
            return False
        return True

    def _limit_index(self, index_bytes: int) -> bool:
        try:
            self._store.index.grow(index_bytes)
        except lmdb.Error as error:
            self._tell_shortage(f"no index of {readable_bytes(index_bytes)} can be mapped: {error}")
            return False
        return True

    def _count_index(self) -> None:
        """Take what the index may fill by now out of what extents may."""
        store = self._store
        store.budget = replace(store.budget, index_bytes=max(store.budget.index_bytes, store.index.map_bytes()))
        store.allocator.extents_max = store.budget.extents_max

    # ------------------------------------------------------------ the filesystem

    def refresh(self) -> None:
        """Ask the filesystem again what it has left, for `left` and `excess_bytes`. After every batch."""
        store = self._store
        store.note_deletion()
        self._check_readers()
        store.return_rest()
        if self.reserve_used:
            self._restore_reserve()
        self._look()
        withheld_bytes = store.allocator.withheld_pages * PAGE_BYTES
        if withheld_bytes and self._disk_free_bytes >= self._refused_free_bytes + withheld_bytes:
            store.allocator.release()
        short_bytes = max(0, self._min_free_bytes - self._disk_free_bytes)
        held_bytes = store.occupied_extents() * store.header.extent_bytes
        lent, most = store.allocator.lent_extents, store.allocator.extents_max
        self._over_bytes = max(0, lent - most) * store.header.extent_bytes  # since the capacity became smaller
        excess_bytes = max(min(short_bytes, held_bytes) if store.slab.file.gives_back else 0, self._over_bytes)
        if excess_bytes and not self._excess_bytes:
            _log.warning("%s: %s; blocks leave", store.folder, self._why_excess())
        self._excess_bytes = excess_bytes
        lends = store.allocator.lent_extents < store.allocator.extents_max
        if lends and store.settled and not excess_bytes and self._spare_bytes < self._extent_takes_bytes():
            self._tell_shortage(self._too_little_for("an extent", self._extent_takes_bytes()))

    def _check_readers(self) -> None:
        """From time to time: pages that a dead reader saw are not used again, and others are taken in their place."""
        now_s = self._clock()
        if now_s >= self._readers_due_s:
            self._readers_due_s = now_s + READER_CHECK_S
            self._store.release_dead_readers()

    def _look(self) -> None:
        """What the filesystem has, and what of it is ours to take. Where nothing can be claimed ahead, what is lent
        and not yet written counts as taken."""
        store = self._store
        try:
            self._disk_free_bytes = store.slab.file.disk_free_bytes()
            slab_bytes = store.slab.file.disk_bytes()
            index_bytes = store.index.disk_bytes()
        except OSError as error:  # the last answer stands; what it costs shows at the next write
            _log.warning("%s: the filesystem does not say what it has: %s", store.folder, error)
            return
        lent_bytes = store.allocator.lent_extents * store.header.extent_bytes
        self._owed_bytes = max(0, store.slab.file.takes_bytes(lent_bytes) - slab_bytes) + max(
            0, store.index.map_bytes() - index_bytes
        )
        self._spare_bytes = self._disk_free_bytes - self._owed_bytes - self._min_free_bytes

    def _tell_shortage(self, reason: str) -> None:
        """Say, the first time, that the store cannot grow and why; else blocks would be refused in silence."""
        if self._shortage_told:
            return
        self._shortage_told = True
        store = self._store
        lent = store.allocator.lent_extents
        kept = f"the store stays at {lent} extent{'s' * (lent > 1)}" if lent else "no block can be stored"
        store.notes.append(f"{reason}: {kept} until there is more room")
        say_once(_log, str(store.folder), "room", store.notes[-1])

    def _too_little_for(self, what: str, wanted_bytes: int) -> str:
        owed = f", and {readable_bytes(self._owed_bytes)} are promised" if self._owed_bytes else ""
        return f"{self._below_min_free()}{owed}; {what} takes {readable_bytes(wanted_bytes, up=True)}"

    def _why_excess(self) -> str:
        if not self._over_bytes:
            return self._below_min_free()
        return f"the capacity is {readable_bytes(self._store.budget.capacity_bytes)} now"

    def _below_min_free(self) -> str:
        return (
            f"the filesystem has {readable_bytes(self._disk_free_bytes)} free, of which min_free keeps "
            f"{readable_bytes(self._min_free_bytes, up=True)}"
        )
