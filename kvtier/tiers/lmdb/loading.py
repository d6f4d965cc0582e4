"""Takes stock of a store when it is opened: which blocks are there, and which rows are not to be believed.

Every record is validated before anything is built on it: its check, its version, its namespace, its size class,
its place inside the slab. A bad one is skipped and noted, and its slot is free. Two more kinds of row go without
a note: records that a drop left behind, and the older of two blocks with the same key.

Units: bytes, pages of 4096 bytes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.allocator.extents import ExtentAllocator
from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.index import Change, Index
from kvtier.tiers.lmdb.layout import ID_KEY, PLACE_KEY, decode_extent, decode_namespace, decode_record
from kvtier.tiers.lmdb.names import TierNames
from kvtier.types import PAGE_BYTES, StoredBlock, page_aligned, store_key


class _Found(NamedTuple):
    generation: int  # first: the order of the scan
    place_key: bytes
    extent: int
    slot: int
    tier_id: int
    block: StoredBlock


@dataclass(slots=True)
class Stock:
    """What a store holds. `change` removes the rows that are not to be believed any more."""

    blocks: list[StoredBlock] = field(default_factory=list)
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
    found = sorted(_believable(index, names, strides, allocator.extent_pages, slab_bytes, stock))
    if found:
        stock.generation_next = found[-1].generation + 1
    found = _newest_of_each_key(found, stock)
    found = _within_capacity(found, allocator.extents_max, fixed, stock)
    _adopt(found, strides, allocator, stock)
    for tier_id in names.tier_ids():
        if not allocator.slots_of_owner[tier_id]:
            stock.change.namespaces[ID_KEY.pack(tier_id)] = None
            names.remove(tier_id)
    stock.blocks = [entry.block for entry in found]
    return stock


def list_blocks(index: Index, names: TierNames, allocator: ExtentAllocator, slab_bytes: int) -> list[StoredBlock]:
    """The blocks of an open store, oldest first, without adopting or changing anything."""
    stock = Stock()
    strides = {extent: stride for extent, stride, _ in allocator.lent()}
    found = sorted(_believable(index, names, strides, allocator.extent_pages, slab_bytes, stock))
    return [entry.block for entry in _newest_of_each_key(found, stock)]


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


def _believable(
    index: Index, names: TierNames, strides: dict[int, int], extent_pages: int, slab_bytes: int, stock: Stock
) -> list[_Found]:
    found = []
    for place_key, row in index.rows("blocks"):
        try:
            entry = _validated(place_key, row, names, strides, extent_pages, slab_bytes)
        except CorruptBlock as error:
            stock.findings.append(f"record {place_key.hex()}: {error}")
            stock.change.blocks[place_key] = None
        else:
            if entry is None:
                stock.change.blocks[place_key] = None
            else:
                found.append(entry)
    return found


def _validated(
    place_key: bytes, row: bytes, names: TierNames, strides: dict[int, int], extent_pages: int, slab_bytes: int
) -> _Found | None:
    """None for a record that a drop left behind. Raises CorruptBlock."""
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
    if stride_pages is None or stride_pages * PAGE_BYTES != page_aligned(record.length_bytes):
        raise CorruptBlock(f"length {record.length_bytes} in an extent of {stride_pages} pages per slot")
    page = slot * stride_pages
    place = extent * extent_pages + page
    if page + stride_pages > extent_pages or (place + stride_pages) * PAGE_BYTES > slab_bytes:
        raise CorruptBlock("its slot lies outside the slab")
    block = StoredBlock(store_key(local, record.key), place, record.generation, record.length_bytes)
    return _Found(record.generation, place_key, extent, slot, record.namespace, block)


def _newest_of_each_key(found: list[_Found], stock: Stock) -> list[_Found]:
    newest = {entry.block.key: entry for entry in found}  # sorted by generation: the last one wins
    if len(newest) == len(found):
        return found
    stock.change.blocks.update((e.place_key, None) for e in found if newest[e.block.key] is not e)
    return [entry for entry in found if newest[entry.block.key] is entry]


def _within_capacity(found: list[_Found], extents_max: int, fixed: bool, stock: Stock) -> list[_Found]:
    newest = {entry.extent: entry.generation for entry in found}
    if fixed:
        leaving = {extent for extent in newest if extent >= extents_max}
    else:
        leaving = set(sorted(newest, key=newest.__getitem__)[: max(0, len(newest) - extents_max)])
    if not leaving:
        return found
    stock.change.blocks.update((entry.place_key, None) for entry in found if entry.extent in leaving)
    kept = [entry for entry in found if entry.extent not in leaving]
    stock.evicted_blocks = len(found) - len(kept)
    return kept


def _adopt(found: list[_Found], strides: dict[int, int], allocator: ExtentAllocator, stock: Stock) -> None:
    by_extent: dict[int, list[_Found]] = {}
    for entry in found:
        by_extent.setdefault(entry.extent, []).append(entry)
    for extent, entries in by_extent.items():
        allocator.adopt(extent, strides[extent], [e.slot for e in entries], [e.tier_id for e in entries])
        stock.strides[extent] = strides[extent]
    stock.change.extents.update((ID_KEY.pack(extent), None) for extent in strides.keys() - by_extent.keys())
