"""The one transaction that takes out of a store's index what cannot be believed, and keeps the rest.

Pure. Always: nothing is removed that was not found damaged; a limit is written anew above everything that was given;
records of versions that this kvtier does not read are not touched.
"""

from kvtier.tiers.lmdb.examine import Examined
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.layout import (
    GENERATION_KEY,
    GENERATION_MAX,
    NAMESPACE_KEY,
    NAMESPACE_MARGIN,
    NAMESPACE_MAX,
    encode_limit,
)
from kvtier.tiers.lmdb.offline import StoreReader


def repair(reader: StoreReader, found: Examined) -> Change:
    """What to commit. `reader.damaged_rows` was a set from the start of the examination."""
    assert reader.damaged_rows is not None, "findings were kept with their rows"
    change = Change()
    limits = {
        GENERATION_KEY: min(found.generation_newest + 1, GENERATION_MAX),
        NAMESPACE_KEY: min(found.namespace_newest + 1 + NAMESPACE_MARGIN, NAMESPACE_MAX),
    }
    sidecar: dict[bytes, bytes | None] = {}
    for table, key in sorted(reader.damaged_rows):
        if table == "sidecar":
            sidecar[key] = None
        elif table == "meta":
            change.meta[key] = encode_limit(key, limits[key])
        else:
            getattr(change, table)[key] = None
    change.blocks.update((audited.stored.place_key, None) for audited in found.bad)
    change.sidecar = sidecar
    return change
