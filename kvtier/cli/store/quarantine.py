"""Notes in a store of blocks that a verb took out of it, beside those that the engine left. Pure but for the reading.

Units: milliseconds since 1970.
"""

import time
from collections.abc import Sequence

import cbor2

from kvtier.blocks import plain_cbor
from kvtier.engine.sidecar import CONDEMNED_KEY, CONDEMNED_MAX
from kvtier.tiers.lmdb.audit import Audited
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.types import PAGE_BYTES


def quarantine_rows(reader: StoreReader, bad: Sequence[Audited]) -> dict[bytes, bytes | None]:
    """Rows for the latest of these blocks, and the deletion of older rows, so that CONDEMNED_MAX stay."""
    now_ms = time.time_ns() // 10**6
    new: dict[bytes, bytes | None] = {}
    for audited in bad[-CONDEMNED_MAX:]:
        stored = audited.stored
        fingerprint, _ = reader.names[stored.record.namespace]
        row = {"key": stored.record.key, "namespace": fingerprint, "length": stored.record.length_bytes}
        row |= {"at_ms": now_ms, "detail": audited.detail}
        place = reader.offset_of(stored) // PAGE_BYTES
        new[CONDEMNED_KEY + place.to_bytes(8, "big")] = cbor2.dumps(row, canonical=True)
    return new | dict.fromkeys(surplus(reader, beside=new), None)


def surplus(reader: StoreReader, beside: dict[bytes, bytes | None]) -> list[bytes]:
    """The oldest of the rows that are there, as many as are too many beside new ones."""
    there = [(_at_ms(row), key) for key, row in reader.sidecar() if key.startswith(CONDEMNED_KEY) and key not in beside]
    too_many = len(there) + len(beside) - CONDEMNED_MAX
    return [key for _, key in sorted(there)[: max(0, too_many)]]


def _at_ms(row: bytes) -> int:
    """When; 0 if the row cannot be read."""
    try:
        return int(plain_cbor.loads(row)["at_ms"])
    except (KeyError, TypeError, ValueError):
        return 0
