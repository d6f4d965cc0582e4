"""Which part of a slab file holds what: extents lent to size classes, and the slots in them.

Owns: which extent is lent to which size class, which of its slots is taken, and by whom. Does not own bytes,
records or I/O.
Always:  lent extents <= extents_max unless the store was adopted with more; an extent without a taken slot is
         not lent; used_pages and slots_of_owner count exactly the owned slots.
Units:   pages of 4096 bytes. A *place* is the page number of a slot in the slab; a size class is its slots'
         stride in pages; extents and slots are counted from 0.

Life of a slot:  free --take--> taken --own--> owned --give_back--> free. A slot that is taken and never owned
(its write went wrong in a way that forbids trust) stays out of use until the store is opened again. One that the disk
had no room for is withheld until `release`, and does not keep its extent from being empty.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


@dataclass(slots=True)
class _Extent:
    """One lent extent. `taken` has a byte per slot (bytes search faster than lists), `owners` a u32."""

    stride_pages: int
    taken: bytearray
    owners: "array[int]"  # 0: nobody yet
    taken_slots: int = 0
    search_from: int = 0  # no free slot lies before it

    @property
    def free_slots(self) -> int:
        return len(self.taken) - self.taken_slots


_NOT_LENT = _Extent(1, bytearray(), array("I"))  # it has no slots


class ExtentAllocator:
    """One caller at a time, except `slots_of`, `free_slots` and `used_pages`, which any thread may ask."""

    def __init__(self, extent_pages: int, extents_max: int) -> None:
        self.extent_pages = extent_pages
        self.extents_max = extents_max
        self.used_pages = 0
        self.slots_of_owner: Counter[int] = Counter()
        self._extents: dict[int, _Extent] = {}
        self._free_slots: dict[int, int] = {}  # by stride
        self._open: dict[int, dict[int, None]] = {}  # by stride: extents with a free slot, in the order they got one
        self._withheld: dict[int, set[int]] = {}  # places by extent
        self._returned: list[int] = []  # heap of extents below _fresh that are not lent
        self._fresh = 0  # every extent from here on was never lent, or was adopted

    # ------------------------------------------------------------ questions

    @property
    def lent_extents(self) -> int:
        return len(self._extents)

    def slots_per_extent(self, stride_pages: int) -> int:
        return self.extent_pages // stride_pages

    def free_slots(self, stride_pages: int) -> int:
        """Free slots in extents that are lent to this class already."""
        return self._free_slots.get(stride_pages, 0)

    def extent_of(self, place: int) -> int:
        return place // self.extent_pages

    def stride_of(self, extent: int) -> int | None:
        """The size class an extent is lent to, None if it is not lent."""
        found = self._extents.get(extent)
        return None if found is None else found.stride_pages

    def slots_of(self, places: Iterable[int]) -> list[tuple[int, int] | None]:
        """(extent, slot) of each place, None where no slot begins. A pure look at current lending.

        All of a batch at once, as below: of small blocks a call for each would cost more than their records.
        """
        extents, extent_pages = self._extents, self.extent_pages
        slots: list[tuple[int, int] | None] = []
        for place in places:
            index, page = divmod(place, extent_pages)
            extent = extents.get(index, _NOT_LENT)
            slot, rest = divmod(page, extent.stride_pages)
            slots.append((index, slot) if not rest and slot < len(extent.taken) else None)
        return slots

    def place_of(self, extent: int, slot: int) -> int:
        return extent * self.extent_pages + slot * self._extents[extent].stride_pages

    def owners_of(self, slots: Iterable[tuple[int, int] | None]) -> list[int]:
        """Who owns each slot (as `slots_of` found them, just now), 0 for nobody."""
        extents = self._extents
        return [0 if slot is None else extents[slot[0]].owners[slot[1]] for slot in slots]

    def owned(self) -> list[int]:
        """All places that hold a block."""
        return [
            self.place_of(index, slot)
            for index, extent in self._extents.items()
            for slot, who in enumerate(extent.owners)
            if who
        ]

    def owned_by(self, owner: int) -> list[int]:
        """All places of one owner."""
        return [
            self.place_of(index, slot)
            for index, extent in self._extents.items()
            for slot, who in enumerate(extent.owners)
            if who == owner
        ]

    def lent(self) -> Iterator[tuple[int, int, int]]:
        """(extent, stride in pages, taken slots) of every lent extent."""
        for index, extent in self._extents.items():
            yield index, extent.stride_pages, extent.taken_slots

    def owners_left_by(self, places: Collection[int]) -> set[int]:
        """The owners that giving back these places would leave without a block. Changes nothing."""
        small = {owner: slots for owner, slots in self.slots_of_owner.items() if 0 < slots <= len(places)}
        leaving = Counter(self.owners_of(self.slots_of(places)) if small else ())
        return {owner for owner, slots in small.items() if slots == leaving[owner]}

    def emptied_by(self, places: Iterable[int]) -> list[int]:
        """The extents that giving back these places would empty. Changes nothing."""
        leaving = Counter([place // self.extent_pages for place in places])
        return [extent for extent, slots in leaving.items() if self._in_use(extent) == slots]

    # ------------------------------------------------------------ moves

    def next_unlent(self) -> int | None:
        """The extent that `lend` would lend, None when extents_max are lent. Changes nothing of note."""
        if len(self._extents) >= self.extents_max:
            return None
        while self._fresh in self._extents:
            self._fresh += 1
        return self._returned[0] if self._returned else self._fresh

    def lend(self, stride_pages: int) -> int | None:
        """Lend the lowest free extent to a size class; None when extents_max are lent."""
        extent = self.next_unlent()
        if extent is None:
            return None
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._fresh += 1
        self._add(extent, stride_pages)
        return extent

    def unlend_unused(self, extent: int) -> None:
        """Take back an extent that was lent and never used (its disk space was refused)."""
        self._remove(extent)

    def take(self, stride_pages: int, slots: int) -> list[int]:
        """Up to `slots` places from extents lent to the class, in as few runs of neighbours as is easy."""
        places: list[int] = []
        open_extents = self._open.get(stride_pages, {})
        while len(places) < slots and open_extents:
            index = max(open_extents, key=lambda e: self._extents[e].free_slots)
            places.extend(self._take_from(index, slots - len(places)))
        return places

    def own(self, owners: Mapping[int, int]) -> None:
        """By place: the taken slot holds a block of this owner (not 0) from now on."""
        extents, extent_pages = self._extents, self.extent_pages
        used_pages = 0
        for place, owner in owners.items():
            index, page = divmod(place, extent_pages)
            extent = extents[index]
            extent.owners[page // extent.stride_pages] = owner
            used_pages += extent.stride_pages
        self.slots_of_owner.update(owners.values())
        self.used_pages += used_pages

    def adopt(self, extent: int, stride_pages: int, slots: Sequence[int] | Ints, owners: Sequence[int] | Ints) -> None:
        """Take over an extent as an earlier process left it. `slots` is not empty and has no duplicates."""
        self._add(extent, stride_pages)
        found = self._extents[extent]
        np.frombuffer(found.taken, np.uint8)[slots] = 1
        np.frombuffer(found.owners, np.uint32)[slots] = owners
        self.slots_of_owner.update(Counter(np.asarray(owners).tolist()))
        self._count_taken(extent, len(owners))
        self.used_pages += len(owners) * stride_pages

    def block(self, extent: int, stride_pages: int, slots: Sequence[int]) -> None:
        """Take slots out of use for good, in an extent that is or is not adopted: they hold what we cannot read."""
        if extent not in self._extents:
            self._add(extent, stride_pages)
        np.frombuffer(self._extents[extent].taken, np.uint8)[slots] = 1
        self._count_taken(extent, len(slots))

    def give_back(self, places: Iterable[int]) -> list[int]:
        """These slots are free again. Returns the extents that became empty and are lent no longer."""
        extents, extent_pages = self._extents, self.extent_pages
        touched, owners = [], []
        for place in places:
            index, page = divmod(place, extent_pages)
            extent = extents[index]
            slot = page // extent.stride_pages
            if owner := extent.owners[slot]:
                extent.owners[slot] = 0
                self.used_pages -= extent.stride_pages
                owners.append(owner)
            extent.taken[slot] = 0
            if slot < extent.search_from:
                extent.search_from = slot
            touched.append(index)
        self.slots_of_owner.subtract(owners)
        slots_by_extent = Counter(touched)
        for index, slots in slots_by_extent.items():
            self._count_taken(index, -slots)
        return self._without_empty(slots_by_extent)

    @property
    def withheld_pages(self) -> int:
        return sum(self._extents[index].stride_pages * len(places) for index, places in self._withheld.items())

    def withhold(self, places: Iterable[int]) -> list[int]:
        """These slots are taken, and nothing can be written there for now. Returns extents as `give_back` does."""
        touched = {self.extent_of(place): None for place in places}
        for place in places:
            self._withheld.setdefault(self.extent_of(place), set()).add(place)
        return self._without_empty(touched)

    def release(self) -> None:
        """What was withheld is free again."""
        withheld, self._withheld = self._withheld, {}
        for places in withheld.values():
            self.give_back(places)

    def check(self) -> list[str]:
        """Recount everything; an empty list means all invariants hold."""
        findings = []
        free: dict[int, int] = {}
        owned_pages = 0
        for index, extent in self._extents.items():
            free[extent.stride_pages] = free.get(extent.stride_pages, 0) + extent.free_slots
            owned_pages += sum(1 for owner in extent.owners if owner) * extent.stride_pages
            if sum(extent.taken) != extent.taken_slots or extent.taken_slots == 0:
                findings.append(f"extent {index}: {sum(extent.taken)} slots taken, {extent.taken_slots} counted")
            if 0 in extent.taken[: extent.search_from]:
                findings.append(f"extent {index}: a free slot before {extent.search_from}")
            if (index in self._open.get(extent.stride_pages, {})) != (extent.free_slots > 0):
                findings.append(f"extent {index}: open list is wrong")
            if index in self._returned:
                findings.append(f"extent {index}: lent and returned")
        counted = {stride: slots for stride, slots in self._free_slots.items() if slots}
        if counted != {stride: slots for stride, slots in free.items() if slots}:
            findings.append(f"free slots {free}, counted {counted}")
        by_owner = Counter(owner for extent in self._extents.values() for owner in extent.owners if owner)
        if by_owner != +self.slots_of_owner:
            findings.append(f"slots by owner {dict(by_owner)}, counted {dict(+self.slots_of_owner)}")
        if owned_pages != self.used_pages:
            findings.append(f"{owned_pages} pages owned, {self.used_pages} counted")
        return findings

    # ------------------------------------------------------------ inside

    def _add(self, index: int, stride_pages: int) -> None:
        slots = self.slots_per_extent(stride_pages)
        self._extents[index] = _Extent(stride_pages, bytearray(slots), array("I", bytes(4 * slots)))
        self._free_slots[stride_pages] = self.free_slots(stride_pages) + slots
        self._open.setdefault(stride_pages, {})[index] = None

    def _in_use(self, index: int) -> int:
        """Taken slots of an extent that hold something, or are about to."""
        return self._extents[index].taken_slots - len(self._withheld.get(index, ()))

    def _without_empty(self, touched: Iterable[int]) -> list[int]:
        """Lend those of these extents no longer in which nothing is; returns them."""
        emptied = [index for index in touched if not self._in_use(index)]
        for index in emptied:
            self._remove(index)
        return emptied

    def _remove(self, index: int) -> None:
        self._withheld.pop(index, None)
        extent = self._extents.pop(index)
        self._free_slots[extent.stride_pages] -= extent.free_slots
        self._open[extent.stride_pages].pop(index, None)
        if index < self._fresh:
            heapq.heappush(self._returned, index)

    def _take_from(self, index: int, slots: int) -> list[int]:
        extent = self._extents[index]
        places: list[int] = []
        while len(places) < slots:
            start = extent.taken.find(0, extent.search_from)
            if start < 0:
                break
            end = extent.taken.find(1, start, start + slots - len(places))
            if end < 0:
                end = min(start + slots - len(places), len(extent.taken))
            extent.taken[start:end] = b"\1" * (end - start)
            extent.search_from = end
            places += range(self.place_of(index, start), self.place_of(index, end), extent.stride_pages)
        self._count_taken(index, len(places))
        return places

    def _count_taken(self, index: int, change: int) -> None:
        extent = self._extents[index]
        extent.taken_slots += change
        self._free_slots[extent.stride_pages] -= change
        if extent.free_slots:
            self._open[extent.stride_pages].setdefault(index, None)
        else:
            self._open[extent.stride_pages].pop(index, None)
