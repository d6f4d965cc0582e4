"""Compares what the memory of an open store says with its index, and with what the next opening would believe.

Owns nothing, changes nothing. Units: a place is a page number; strides in pages of 4096 bytes.
"""

from kvtier.tiers.lmdb.loading import extent_strides, list_blocks
from kvtier.tiers.lmdb.opened import OpenStore


def recount(store: OpenStore) -> list[str]:
    """What does not agree, in words; an empty list means that all does. Reads the index."""
    allocator = store.allocator
    findings = allocator.check()
    recorded = {b.place for b in list_blocks(store.index, store.names, allocator, store.slab.file.length_bytes())}
    owned = set(allocator.owned())
    findings += [f"place {place}: in the index, not in memory" for place in sorted(recorded - owned)]
    findings += [f"place {place}: in memory, not in the index" for place in sorted(owned - recorded)]
    return findings + _rows_of_extents(store, {allocator.extent_of(place) for place in owned})


def _rows_of_extents(store: OpenStore, used: set[int]) -> list[str]:
    """Of extents that hold blocks: the next opening believes none of these without the row, or with another stride."""
    strides, findings = extent_strides(store.index)
    for extent in sorted(used):
        lent_to, row = store.allocator.stride_of(extent), strides.get(extent)
        if lent_to != row:
            said = "there is no row of it" if row is None else f"its row says {row}"
            findings.append(f"extent {extent}: lent to slots of {lent_to} pages, and {said}")
    return findings
