"""Takes out of a store what nobody needs, and gives its disk back.

Owns nothing. Always: no block that a cache would find goes, nor a row that is damaged or of a later version; each step
is whole by itself, so that an interruption costs the rest and nothing else. In this order: records, then the rows of
namespaces and extents that nothing points to any more, then disk.
Units: bytes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtier.errors import CorruptBlock, StoreError
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import ID_KEY, PLACE_KEY, decode_namespace
from kvtier.tiers.lmdb.superseded import Superseded
from kvtier.tiers.lmdb.upkeep import Upkeep

ROWS_AT_ONCE = 10_000
COMPACT_BYTES_MIN = 1 << 20  # a smaller gain is not worth writing a file anew
COMPACT_SHARE = 4  # nor one below a quarter of it


@dataclass(slots=True)
class Swept:
    """What went. `disk_bytes`: what slab and index took less of the disk in the end, by their names."""

    dropped_records: int = 0
    superseded_records: int = 0
    namespaces: int = 0
    extents: int = 0
    sidecar_rows: int = 0
    compacted: bool = False
    disk_bytes: dict[str, int] | None = None
    unknown_records: int = 0  # passed over


def sweep(upkeep: Upkeep, sidecar_surplus: Iterable[bytes]) -> Swept:
    """Sweep an open store. sidecar_surplus: keys of the engine's rows that it would have deleted by now.

    Raises StoreError; what was swept until then stays swept.
    """
    before = upkeep.reader.disk_bytes()
    swept = _sweep_rows(upkeep, list(sidecar_surplus))
    _return_disk(upkeep)
    slab = upkeep.slab
    if isinstance(slab, InlineSlab):
        _delete_payloads(upkeep, slab)
        if _is_worth(slab.file.disk_bytes(), slab.used_bytes()):
            swept.compacted = _done(upkeep.compact_payload)
    if _is_worth(upkeep.index.disk_bytes(), upkeep.index.used_bytes()):
        swept.compacted = _done(upkeep.compact_index) or swept.compacted
    after = upkeep.reader.disk_bytes()
    swept.disk_bytes = {name: max(0, before[name] - after[name]) for name in before}  # deleting may take a few pages
    return swept


def _delete_payloads(upkeep: Upkeep, slab: InlineSlab) -> None:
    """Of blocks that have left, those that lie in extents with others that stay."""
    reader = upkeep.reader
    kept = {reader.offset_of(stored) for stored in reader.records()}
    if reader.unknown_records:  # who knows where in their extents they begin
        return
    try:
        slab.keep_only(kept)
    except OSError as error:
        raise StoreError(str(upkeep.folder), f"payloads could not be deleted: {error}", "See to the disk") from error


def _is_worth(disk_bytes: int, used_bytes: int) -> bool:
    """Whether a file should be written anew."""
    return disk_bytes - used_bytes >= max(COMPACT_BYTES_MIN, disk_bytes // COMPACT_SHARE)


def _done(compact: Callable[[], None]) -> bool:
    try:
        compact()
    except StoreError:  # it takes room for a while, and what was swept so far may be all there is
        return False
    return True


def _sweep_rows(upkeep: Upkeep, sidecar_surplus: list[bytes]) -> Swept:
    reader = upkeep.reader
    superseded = Superseded()
    dropped: list[bytes] = []
    used: set[int] = set()
    for stored in reader.records(dropped):
        superseded.add(stored)
        used.add(stored.record.namespace)
    void = superseded.find(reader)
    leaving = dropped + void
    for start in range(0, len(leaving), ROWS_AT_ONCE):
        upkeep.commit(Change(blocks=dict.fromkeys(leaving[start : start + ROWS_AT_ONCE])))
    change = Change(sidecar=dict.fromkeys(sidecar_surplus))
    if not reader.unknown_records:  # any namespace may be theirs
        change.namespaces.update((key, None) for key in _namespaces_beside(upkeep, used))
    pointed_to = _extents_pointed_to(upkeep)
    change.extents.update((ID_KEY.pack(extent), None) for extent in reader.extents().keys() - pointed_to)
    upkeep.commit(change)
    return Swept(
        dropped_records=len(dropped),
        superseded_records=len(void),
        namespaces=len(change.namespaces),
        extents=len(change.extents),
        sidecar_rows=len(change.sidecar),
        unknown_records=reader.unknown_records,
    )


def _namespaces_beside(upkeep: Upkeep, used: set[int]) -> Iterator[bytes]:
    for key, row in upkeep.index.rows("namespaces"):
        try:
            tier_id, _, _ = decode_namespace(key, row)
        except CorruptBlock:
            continue
        if tier_id not in used:
            yield key


def _extents_pointed_to(upkeep: Upkeep) -> set[int]:
    """By any row whatsoever: whether it can be believed is somebody else's question."""
    return {PLACE_KEY.unpack(key)[0] for key, _ in upkeep.index.rows("blocks") if len(key) == PLACE_KEY.size}


def _return_disk(upkeep: Upkeep) -> None:
    """Punch what is not lent, and end the file where the last lent extent does."""
    file, extent_bytes = upkeep.slab.file, upkeep.header.extent_bytes
    lent = _extents_pointed_to(upkeep) | upkeep.reader.extents().keys()
    for extent in range(-(-file.length_bytes() // extent_bytes)):
        if extent not in lent:
            file.punch(extent * extent_bytes, extent_bytes)
    try:
        file.cut((max(lent, default=-1) + 1) * extent_bytes)
    except OSError as error:
        raise StoreError(str(upkeep.folder), f"the slab could not be cut: {error}", "See to the disk") from error
