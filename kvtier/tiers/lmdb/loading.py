"""Takes stock of a store when it is opened: which blocks are there, and which rows are not to be believed.

Every record is validated before anything is built on it: its check, its version, its namespace, its size class,
its place inside the slab. A bad one is skipped and noted, and its slot is free. Two more kinds of row go without
a note: records that a drop left behind, and the older of two blocks with the same key.

Units: bytes, pages of 4096 bytes. Columns, not objects: a million records would leave 500 MB of holes behind.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.extents import ExtentAllocator
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import ID_KEY, PLACE_KEY, Record, decode_extent, decode_namespace, decode_record
from kvtier.tiers.lmdb.names import TierNames
from kvtier.types import PAGE_BYTES, StoredBlock, StoreKey, store_key

Rows = NDArray[np.int64]  # numbers of rows in `Blocks`


class Blocks:
    """Records that are believed, one row each; `order` names those that count, oldest write first."""

    def __init__(self) -> None:
        self.keys: list[StoreKey] = []
        self._columns = {name: array(kind) for name, kind in zip(_COLUMNS, "QIIIII", strict=True)}
        self.order: Rows = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[StoredBlock]:
        generations, _, _, _, lengths, places = self._columns.values()
        for row in self.order.tolist():
            yield StoredBlock(self.keys[row], places[row], generations[row], lengths[row])

    def add(self, key: StoreKey, *cells: int) -> None:
        """One more row; `cells` in the order of `_COLUMNS`."""
        self.keys.append(key)
        for column, cell in zip(self._columns.values(), cells, strict=True):
            column.append(cell)

    def sort(self) -> None:
        """All rows count, by generation."""
        self.order = np.argsort(self.column("generation"), kind="stable")

    def column(self, name: str) -> NDArray[np.unsignedinteger]:
        """A view of one column, by row. No row may be added while it lives."""
        column = self._columns[name]
        return np.frombuffer(column, column.typecode)

    def place_key(self, row: int) -> bytes:
        return PLACE_KEY.pack(self._columns["extent"][row], self._columns["slot"][row])


_COLUMNS = ("generation", "extent", "slot", "tier_id", "length", "place")


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
    """Read the whole index and adopt its extents into `allocator`, which is empty.

    If more extents are lent than it allows (the capacity became smaller), whole extents are evicted, those first
    whose newest block is oldest; in a file that can only be cut (`fixed`), those at its end.
    """
    stock = Stock()
    strides = stock.strides_before = _extent_rows(index, stock)
    _read(index, names, strides, allocator.extent_pages, slab_bytes, stock)
    if len(stock.blocks):
        stock.generation_next = int(stock.blocks.column("generation").max()) + 1
    _keep_newest_of_each_key(stock)
    _keep_within_capacity(allocator.extents_max, fixed, stock)
    _adopt(strides, allocator, stock)
    for tier_id in names.tier_ids():
        if not allocator.slots_of_owner[tier_id]:
            stock.change.namespaces[ID_KEY.pack(tier_id)] = None
            names.remove(tier_id)
    return stock


def list_blocks(index: Index, names: TierNames, allocator: ExtentAllocator, slab_bytes: int) -> Blocks:
    """The blocks of an open store, oldest first, without adopting or changing anything."""
    stock = Stock()
    strides = {extent: stride for extent, stride, _ in allocator.lent()}
    _read(index, names, strides, allocator.extent_pages, slab_bytes, stock)
    _keep_newest_of_each_key(stock)
    return stock.blocks


def _extent_rows(index: Index, stock: Stock) -> dict[int, int]:
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


def _read(
    index: Index, names: TierNames, strides: dict[int, int], extent_pages: int, slab_bytes: int, stock: Stock
) -> None:
    """Every record that is believed, by generation; the others are noted or to be removed."""
    blocks = stock.blocks
    for place_key, row in index.rows("blocks"):
        try:
            found = _validated(place_key, row, names, strides, extent_pages, slab_bytes)
        except CorruptBlock as error:
            stock.findings.append(f"record {place_key.hex()}: {error}")
            stock.change.blocks[place_key] = None
        else:
            if found is None:
                stock.change.blocks[place_key] = None
            else:
                record, local, extent, slot, place = found
                cells = record.generation, extent, slot, record.namespace, record.raw_bytes, place
                blocks.add(store_key(local, record.key), *cells)
    blocks.sort()


def _validated(
    place_key: bytes, row: bytes, names: TierNames, strides: dict[int, int], extent_pages: int, slab_bytes: int
) -> tuple[Record, int, int, int, int] | None:
    """A record, its local namespace, extent, slot and place; None if a drop left it behind. Raises CorruptBlock."""
    if len(place_key) != PLACE_KEY.size:
        raise CorruptBlock("record at no place")
    record = decode_record(place_key, row)
    local = names.to_local(record.namespace)
    if local is None:
        if record.namespace < names.limit:
            return None
        raise CorruptBlock(f"namespace {record.namespace} is unknown")
    extent, slot = PLACE_KEY.unpack(place_key)
    stride_pages = strides.get(extent)
    if stride_pages is None or stride_pages * PAGE_BYTES != record.stride_bytes:
        raise CorruptBlock(f"length {record.length_bytes} in an extent of {stride_pages} pages per slot")
    page = slot * stride_pages
    place = extent * extent_pages + page
    if page + stride_pages > extent_pages or (place + stride_pages) * PAGE_BYTES > slab_bytes:
        raise CorruptBlock("its slot lies outside the slab")
    return record, local, extent, slot, place


def _keep_newest_of_each_key(stock: Stock) -> None:
    blocks = stock.blocks
    if len(set(blocks.keys)) == len(blocks.keys):
        return
    newest = {blocks.keys[row]: row for row in blocks.order.tolist()}  # by generation: the last one wins
    _keep(stock, np.isin(blocks.order, list(newest.values())))


def _keep_within_capacity(extents_max: int, fixed: bool, stock: Stock) -> None:
    extents = stock.blocks.column("extent")[stock.blocks.order]
    newest = dict(zip(extents.tolist(), range(len(extents)), strict=True))  # extent -> its last row in order
    if fixed:
        leaving = [extent for extent in newest if extent >= extents_max]
    else:
        leaving = sorted(newest, key=newest.__getitem__)[: max(0, len(newest) - extents_max)]
    before = len(stock.blocks)
    _keep(stock, ~np.isin(extents, leaving))
    stock.evicted_blocks = before - len(stock.blocks)


def _keep(stock: Stock, kept: NDArray[np.bool_]) -> None:
    """Of the rows that count, go on with those that are `kept`, and remove the records of the others."""
    blocks = stock.blocks
    stock.change.blocks.update((blocks.place_key(row), None) for row in blocks.order[~kept].tolist())
    blocks.order = blocks.order[kept]


def _adopt(strides: dict[int, int], allocator: ExtentAllocator, stock: Stock) -> None:
    blocks = stock.blocks
    extents = blocks.column("extent")[blocks.order]
    by_extent = np.argsort(extents, kind="stable")
    found, starts = np.unique(extents[by_extent], return_index=True)
    rows = np.split(blocks.order[by_extent], starts[1:]) if len(found) else []
    slots, owners = blocks.column("slot"), blocks.column("tier_id")
    for extent, members in zip(found.tolist(), rows, strict=True):
        allocator.adopt(extent, strides[extent], slots[members].tolist(), owners[members].tolist())
        stock.strides[extent] = strides[extent]
    stock.change.extents.update((ID_KEY.pack(extent), None) for extent in strides.keys() - stock.strides.keys())
