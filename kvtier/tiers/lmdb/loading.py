"""Takes stock of a store when it is opened: which blocks are there, and which rows are not to be believed.

Every record is validated before anything is built on it: its check, its version, its namespace, its size class,
its place inside the slab. A bad one is skipped and noted, and its slot is free. Two more kinds of row go without
a note: records that a drop left behind, and the older of two blocks with the same key. A sound record of a later
version is left alone, and its slot is nobody's.

Units: bytes, pages of 4096 bytes. Columns, not objects: a million records would leave 500 MB of holes behind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.extents import ExtentAllocator
from kvtier.cache.stored import StoredBlocks
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import (
    ID_KEY,
    PLACE_KEY,
    UnknownVersion,
    decode_extent,
    decode_namespace,
    decode_record,
)
from kvtier.tiers.lmdb.names import TierNames
from kvtier.tiers.lmdb.records import Columns, Records
from kvtier.types import NAMESPACE_BYTES, PAGE_BYTES, StoreKey, store_key

Rows = NDArray[np.int64]  # numbers of rows in `Blocks`
_COLUMNS = {"generation": np.uint64, "extent": np.uint32, "slot": np.uint32, "namespace": np.uint32}
_COLUMNS |= {"length": np.uint32, "place": np.uint32, "stride": np.int64}


class Blocks:
    """Records that are believed, one row each; `order` names those that count, oldest write first."""

    def __init__(self) -> None:
        self.keys: list[StoreKey] = []
        self.order: Rows = np.empty(0, np.int64)
        self._chunks: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, kind)] for name, kind in _COLUMNS.items()}

    def __len__(self) -> int:
        return len(self.order)

    def add(self, keys: list[StoreKey], columns: Columns) -> None:
        """More rows."""
        self.keys += keys
        for name, chunks in self._chunks.items():
            chunks.append(columns[name])

    def sort(self) -> None:
        """All rows are there, and all count, by generation."""
        for name, chunks in self._chunks.items():
            self._chunks[name] = [np.concatenate(chunks, dtype=_COLUMNS[name], casting="unsafe")]
        self.order = np.argsort(self.column("generation"), kind="stable")

    def column(self, name: str) -> NDArray[Any]:
        """One column, by row, once they are sorted."""
        (column,) = self._chunks[name]
        return column

    def place_key(self, row: int) -> bytes:
        return PLACE_KEY.pack(self.column("extent")[row], self.column("slot")[row])

    def stored(self) -> StoredBlocks:
        """Those that count, in their order."""
        sizes = (self.column(name)[self.order] for name in ("place", "generation", "length", "stride"))
        keys = self.keys
        return StoredBlocks([keys[row] for row in self.order.tolist()], *sizes)


@dataclass(slots=True)
class Stock:
    """What a store holds. `change` removes the rows that are not to be believed any more."""

    blocks: Blocks = field(default_factory=Blocks)
    findings: list[str] = field(default_factory=list)
    change: Change = field(default_factory=Change)
    strides: dict[int, int] = field(default_factory=dict)  # extent -> stride in pages, of adopted extents
    strides_before: dict[int, int] = field(default_factory=dict)  # of all that have a row
    generation_next: int = 1
    evicted_blocks: int = 0
    unknown: dict[int, list[int]] = field(default_factory=dict)  # extent -> slots of records of later versions

    @property
    def unknown_records(self) -> int:
        """How many records are left alone, with their slots, because a later version wrote them."""
        return sum(map(len, self.unknown.values()))


@dataclass(frozen=True, slots=True)
class Slab:
    """What a record must fit: the namespaces, the extents' strides in pages, an extent, the file."""

    names: TierNames
    strides: dict[int, int]
    extent_pages: int
    length_bytes: int

    def believes(self, columns: Columns) -> NDArray[np.bool_]:
        """Which of these records `judge` would place."""
        named = _mapped(columns["namespace"], lambda tier_id: self.names.to_local(tier_id) is not None)
        stride_pages, place = self._places(columns)
        page_end = columns["slot"].astype(np.int64) * stride_pages + stride_pages
        right: NDArray[np.bool_] = (named == 1) & (stride_pages == columns["pages"])
        return right & (page_end <= self.extent_pages) & ((place + stride_pages) * PAGE_BYTES <= self.length_bytes)

    def located(self, columns: Columns) -> tuple[list[StoreKey], Columns]:
        """Believed records with engine-local keys, and their places."""
        key_bytes = columns["key"].itemsize
        named = np.empty(len(columns["key"]), [("namespace", f">u{NAMESPACE_BYTES}"), ("key", f"V{key_bytes}")])
        named["namespace"] = _mapped(columns["namespace"], lambda tier_id: self.names.to_local(tier_id) or 0)
        named["key"] = columns["key"]
        stride_pages, places = self._places(columns)
        placed = columns | {"place": places, "stride": stride_pages * PAGE_BYTES}
        return named.view(f"V{NAMESPACE_BYTES + key_bytes}").tolist(), placed

    def _places(self, columns: Columns) -> tuple[Rows, Rows]:
        """Stride in pages (0: the extent is not lent) and first page of each record's slot."""
        strides = _mapped(columns["extent"], lambda extent: self.strides.get(extent, 0))
        first_pages = columns["extent"].astype(np.int64) * self.extent_pages
        return strides, first_pages + columns["slot"].astype(np.int64) * strides

    def has_slot(self, place_key: bytes) -> bool:
        """Whether a slot of a lent extent begins there."""
        extent, slot = PLACE_KEY.unpack(place_key)
        return bool((slot + 1) * self.strides.get(extent, self.extent_pages + 1) <= self.extent_pages)

    def judge(self, place_key: bytes, row: bytes) -> tuple[list[StoreKey], Columns] | None:
        """One record, as `located` has it; None if a drop left it behind. Raises CorruptBlock,
        UnknownVersion."""
        if len(place_key) != PLACE_KEY.size:
            raise CorruptBlock("record at no place")
        record = decode_record(place_key, row)
        local = self.names.to_local(record.namespace)
        if local is None:
            if record.namespace < self.names.limit:
                return None
            raise CorruptBlock(f"namespace {record.namespace} is unknown")
        extent, slot = PLACE_KEY.unpack(place_key)
        stride_pages = self.strides.get(extent)
        if stride_pages is None or stride_pages * PAGE_BYTES != record.stride_bytes:
            raise CorruptBlock(f"length {record.length_bytes} in an extent of {stride_pages} pages per slot")
        page = slot * stride_pages
        place = extent * self.extent_pages + page
        if page + stride_pages > self.extent_pages or (place + stride_pages) * PAGE_BYTES > self.length_bytes:
            raise CorruptBlock("its slot lies outside the slab")
        cells = record.generation, extent, slot, record.namespace, record.raw_bytes, place, record.stride_bytes
        columns = {name: np.array([cell]) for name, cell in zip(_COLUMNS, cells, strict=True)}
        return [store_key(local, record.key)], columns


def _mapped(column: NDArray[Any], number_of: Callable[[int], int]) -> Rows:
    """A number for each cell, asked for once for neighbours that are alike."""
    starts = np.flatnonzero(column[1:] != column[:-1]) + 1
    bounds = np.concatenate(([0], starts, [len(column)]))
    numbers = [number_of(cell) for cell in column[bounds[:-1]].tolist()] if len(column) else []
    return np.repeat(np.array(numbers, np.int64), np.diff(bounds)[: len(numbers)])


def load_names(index: Index, names: TierNames) -> list[str]:
    """Fill `names` with the namespaces of the store; returns what is wrong with their rows."""
    findings = []
    for key, row in index.rows("namespaces"):
        try:
            names.add_stored(*decode_namespace(key, row))
        except (CorruptBlock, ValueError) as error:
            findings.append(f"namespace {key.hex()}: {error}")
    return findings


def take_stock(
    index: Index, names: TierNames, allocator: ExtentAllocator, slab_bytes: int, fixed: bool = False
) -> Stock:
    """Judge what the opening of the index found, and adopt its extents into `allocator`, which is empty.

    If more extents are lent than it allows (the capacity became smaller), whole extents are evicted, those first
    whose newest block is oldest; in a file that can only be cut (`fixed`), those at its end.
    """
    stock = Stock()
    strides = stock.strides_before = _believed_extents(index, stock)
    slab = Slab(names, strides, allocator.extent_pages, slab_bytes)
    _read(index, index.found(), slab, stock)
    if len(stock.blocks):
        stock.generation_next = int(stock.blocks.column("generation").max()) + 1
    _keep_newest_of_each_key(stock)
    _keep_within_capacity(allocator.extents_max, fixed, stock)
    _adopt(strides, allocator, stock)
    for tier_id in [] if stock.unknown else names.tier_ids():  # any of them may be theirs
        if not allocator.slots_of_owner[tier_id]:
            stock.change.namespaces[ID_KEY.pack(tier_id)] = None
            names.remove(tier_id)
    return stock


def list_blocks(index: Index, names: TierNames, allocator: ExtentAllocator, slab_bytes: int) -> StoredBlocks:
    """The blocks of an open store, oldest first, without adopting or changing anything."""
    stock = Stock()
    strides = {extent: stride for extent, stride, _ in allocator.lent()}
    _read(index, index.records(), Slab(names, strides, allocator.extent_pages, slab_bytes), stock)
    _keep_newest_of_each_key(stock)
    return stock.blocks.stored()


def extent_strides(index: Index) -> tuple[dict[int, int], list[str]]:
    """Extent -> stride in pages, of those that have a row; and what is wrong with other rows."""
    stock = Stock()
    return _believed_extents(index, stock), stock.findings


def _believed_extents(index: Index, stock: Stock) -> dict[int, int]:
    strides = {}
    for key, row in index.rows("extents"):
        try:
            extent, stride_pages = decode_extent(key, row)
        except CorruptBlock as error:
            stock.findings.append(f"extent {key.hex()}: {error}")
            stock.change.extents[key] = None
        else:
            strides[extent] = stride_pages
    return strides


def _read(index: Index, records: Records, slab: Slab, stock: Stock) -> None:
    """Every record that is believed, by generation; the others are noted or to be removed."""
    doubtful = records.doubtful
    for columns in records.drain():
        right = slab.believes(columns)
        places = np.stack((columns["extent"], columns["slot"]), axis=1)[~right]
        doubtful += [PLACE_KEY.pack(*place) for place in places.tolist()]
        if not right.all():
            columns = {name: column[right] for name, column in columns.items()}
        stock.blocks.add(*slab.located(columns))
    doubtful.sort()
    for place_key, row in zip(doubtful, index.fetch(doubtful), strict=True):
        if row is None:
            continue  # it went meanwhile
        try:
            found = slab.judge(place_key, row)
        except UnknownVersion:
            if slab.has_slot(place_key):
                extent, slot = PLACE_KEY.unpack(place_key)
                stock.unknown.setdefault(extent, []).append(slot)
        except CorruptBlock as error:
            stock.findings.append(f"record {place_key.hex()}: {error}")
            stock.change.blocks[place_key] = None
        else:
            if found is None:
                stock.change.blocks[place_key] = None
            else:
                stock.blocks.add(*found)
    stock.blocks.sort()


def _keep_newest_of_each_key(stock: Stock) -> None:
    blocks = stock.blocks
    hashes = np.fromiter(map(hash, blocks.keys), np.int64, len(blocks.keys))  # Python keeps them: a dict follows
    hashes.sort()
    if not (hashes[1:] == hashes[:-1]).any():
        return
    newest = {blocks.keys[row]: row for row in blocks.order.tolist()}  # by generation: the last one wins
    _keep(stock, np.isin(blocks.order, list(newest.values())))


def _keep_within_capacity(extents_max: int, fixed: bool, stock: Stock) -> None:
    if not fixed and len(stock.strides_before) <= extents_max:
        return
    extents = stock.blocks.column("extent")[stock.blocks.order]
    newest = dict(zip(extents.tolist(), range(len(extents)), strict=True))  # extent -> its last row in order
    newest |= {extent: len(extents) + extent for extent in stock.unknown}  # they leave last
    if fixed:
        leaving = [extent for extent in newest if extent >= extents_max]
    else:
        leaving = sorted(newest, key=newest.__getitem__)[: max(0, len(newest) - extents_max)]
    before = len(stock.blocks)
    _keep(stock, ~np.isin(extents, leaving))
    stock.evicted_blocks = before - len(stock.blocks)
    for extent in stock.unknown.keys() & set(leaving):
        stock.change.blocks.update((PLACE_KEY.pack(extent, slot), None) for slot in stock.unknown.pop(extent))


def _keep(stock: Stock, kept: NDArray[np.bool_]) -> None:
    """Of the rows that count, go on with those that are `kept`, and remove the records of the others."""
    blocks = stock.blocks
    stock.change.blocks.update((blocks.place_key(row), None) for row in blocks.order[~kept].tolist())
    blocks.order = blocks.order[kept]


def _adopt(strides: dict[int, int], allocator: ExtentAllocator, stock: Stock) -> None:
    blocks = stock.blocks
    extents = blocks.column("extent")[blocks.order]
    by_extent = np.argsort(extents, kind="stable")
    extents = extents[by_extent]
    starts = np.flatnonzero(np.diff(extents, prepend=np.int64(-1)))
    slots, owners = (blocks.column(name)[blocks.order[by_extent]] for name in ("slot", "namespace"))
    ends = np.append(starts, len(extents))[1:]
    for extent, first, end in zip(extents[starts].tolist(), starts, ends, strict=True):
        allocator.adopt(extent, strides[extent], slots[first:end], owners[first:end])
        stock.strides[extent] = strides[extent]
    for extent, unknown in stock.unknown.items():
        allocator.block(extent, strides[extent], unknown)
        stock.strides[extent] = strides[extent]
    stock.change.extents.update((ID_KEY.pack(extent), None) for extent in strides.keys() - stock.strides.keys())
