"""`DictDisk`: a disk that is a dict, in extents, each lent to blocks of one size, as a model of what a store must do.

It shares no code with the real store. `open` gives the tier over it; the rows stay when that is closed. Always: an
extent holds blocks of one size; a place freed by a batch is used again only by a later one.

Units: pages of 4 KiB (places, sizes), bytes.
"""

from collections.abc import Iterator, Sequence

from kvtier.blocks.namespace import NamespaceTable
from kvtier.policies.wear import Written
from kvtier.testing.exploring.store import Row
from kvtier.tiers.base import TierTraits
from kvtier.types import (
    DONE,
    PAGE_BYTES,
    EvictItem,
    Outcome,
    ReadItem,
    Status,
    StoredBlock,
    WriteBatch,
    WriteItem,
    block_key_of,
    namespace_of,
    page_aligned,
    store_key,
)


class DictDisk:
    """`extents` of `extent_pages` pages each. A `GlassDisk`."""

    def __init__(self, extents: int, extent_pages: int) -> None:
        self.extents = extents
        self.extent_pages = extent_pages
        self.by_place: dict[int, Row] = {}
        self.notes: dict[bytes, bytes] = {}  # the sidecar
        self.descriptions: dict[bytes, bytes] = {}  # of every fingerprint it has met
        self.damaged: set[int] = set()
        self.allowed_bytes: int | None = None
        self.generation = 0  # of the latest row

    def open(self, namespaces: NamespaceTable) -> "DictStore":
        for fingerprint, description in self.descriptions.items():
            namespaces.id_of(fingerprint, description)
        newest = {(row.fingerprint, row.key): row.place for row in self._by_age()}
        self.by_place = {row.place: row for row in self._by_age() if newest[row.fingerprint, row.key] == row.place}
        return DictStore(self, namespaces)

    def rows(self) -> Iterator[Row]:
        return iter(self.by_place.values())

    def squeeze(self, allowed_bytes: int | None) -> None:
        self.allowed_bytes = allowed_bytes

    def damage(self, place: int) -> None:
        if place in self.by_place:
            self.damaged.add(place)

    def _by_age(self) -> list[Row]:
        return sorted(self.by_place.values(), key=lambda row: row.generation)

    # ------------------------------------------------------------ room

    def used_bytes(self) -> int:
        return sum(page_aligned(len(row.payload)) for row in self.by_place.values())

    def excess_bytes(self) -> int:
        return 0 if self.allowed_bytes is None else max(0, self.used_bytes() - self.allowed_bytes)

    def free_places(self, pages: int) -> list[int]:
        """Where blocks of this size may lie: gaps in extents that are lent to the size, then empty extents.

        No more than are allowed: were it to take what it must give back at once, blocks would come and go for ever.
        """
        sizes = {row.place // self.extent_pages: _pages(len(row.payload)) for row in self.by_place.values()}
        lent = [extent for extent in range(self.extents) if sizes.get(extent) == pages]
        empty = [extent for extent in range(self.extents) if extent not in sizes]
        starts = range(0, self.extent_pages - pages + 1, pages)
        places = [extent * self.extent_pages + start for extent in lent + empty for start in starts]
        free = [place for place in places if place not in self.by_place]
        if self.allowed_bytes is None:
            return free
        return free[: max(0, self.allowed_bytes - self.used_bytes()) // (pages * PAGE_BYTES)]


class DictStore:
    """The persistent tier over a `DictDisk`. Survives as a disk: close this, and open another."""

    name = "disk"

    def __init__(self, disk: DictDisk, namespaces: NamespaceTable) -> None:
        self._disk = disk
        self._namespaces = namespaces
        capacity_bytes = disk.extents * disk.extent_pages * PAGE_BYTES
        self.traits = TierTraits(capacity_bytes, 0, True, False, PAGE_BYTES)
        self._written = Written()

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        return [self._read(item) for item in items]

    def _read(self, item: ReadItem) -> Outcome:
        row = self._row(item)
        if row is None:
            return Outcome(Status.MISSING)
        if item.place in self._disk.damaged:
            item.into[: len(row.payload)] = bytes(len(row.payload))
            return Outcome(Status.CORRUPT)
        item.into[: len(row.payload)] = row.payload
        return DONE

    def _row(self, item: ReadItem | EvictItem) -> Row | None:
        """What lies at a place, if it is what the item means."""
        row = self._disk.by_place.get(item.place)
        wanted = (self._fingerprint(namespace_of(item.key)), block_key_of(item.key), item.generation)
        return row if row is not None and (row.fingerprint, row.key, row.generation) == wanted else None

    def write(self, batch: WriteBatch) -> list[Outcome]:
        written = [self._write(item) for item in batch.items]  # before the evictions: their places are not free yet
        evicted = [self._evict(item) for item in batch.evict]
        self._count(batch.items, written)
        for name, note in batch.sidecar.items():
            self._disk.notes.pop(name, None)
            if note is not None:
                self._disk.notes[name] = note
        return written + evicted + [DONE] * bool(batch.sidecar)

    def _write(self, item: WriteItem) -> Outcome:
        disk = self._disk
        places = disk.free_places(_pages(item.length_bytes))
        if not places:
            return Outcome(Status.NO_ROOM)
        disk.generation += 1
        namespace = namespace_of(item.key)
        fingerprint = self._fingerprint(namespace)
        disk.descriptions[fingerprint] = self._namespaces.description_of(namespace)
        payload = bytes(item.source[: item.length_bytes])
        disk.by_place[places[0]] = Row(fingerprint, block_key_of(item.key), places[0], disk.generation, payload)
        disk.damaged.discard(places[0])
        return Outcome(Status.DONE, places[0], disk.generation)

    def _evict(self, item: EvictItem) -> Outcome:
        if self._row(item) is None:
            return Outcome(Status.MISSING)
        del self._disk.by_place[item.place]
        return DONE

    def drop(self, namespace: int) -> Outcome:
        fingerprint = self._fingerprint(namespace)
        disk = self._disk
        disk.by_place = {place: row for place, row in disk.by_place.items() if row.fingerprint != fingerprint}
        return DONE

    def written(self) -> Written:
        """Slots are whole pages, and every transaction writes a page of the index."""
        return self._written

    def _count(self, items: Sequence[WriteItem], outcomes: Sequence[Outcome]) -> None:
        lengths = [item.length_bytes for item, outcome in zip(items, outcomes, strict=True) if outcome.done]
        payload, slots, index, _ = self._written
        slots += sum(map(page_aligned, lengths))
        self._written = Written(payload + sum(lengths), slots, index + PAGE_BYTES)

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        return [self._scrubbed(block) for block in blocks]

    def _scrubbed(self, block: StoredBlock) -> Outcome:
        if self._row(EvictItem(block.key, block.place, block.generation)) is None:
            return Outcome(Status.MISSING)
        return Outcome(Status.CORRUPT) if block.place in self._disk.damaged else DONE

    def scan(self) -> Iterator[StoredBlock]:
        for row in self._disk._by_age():
            namespace = self._namespaces.find(row.fingerprint)
            assert namespace is not None, "registered when it was opened"
            yield StoredBlock(store_key(namespace, row.key), row.place, row.generation, len(row.payload))

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(self._disk.notes.items()))

    def room(self, length_bytes: int) -> int:
        return len(self._disk.free_places(_pages(length_bytes)))

    def excess_bytes(self) -> int:
        return self._disk.excess_bytes()

    def used_bytes(self) -> int:
        return self._disk.used_bytes()

    def neighbours(self, place: int) -> int:
        return place // self._disk.extent_pages

    def close(self) -> None:
        """Nothing is held."""

    def _fingerprint(self, namespace: int) -> bytes:
        return self._namespaces.fingerprint_of(namespace)


def _pages(length_bytes: int) -> int:
    return page_aligned(length_bytes) // PAGE_BYTES
