"""What the engine has left in a store's sidecar, for people: its policy, counters, wear, blocks it has condemned.

Owns nothing. A row that cannot be read is a finding of the reader, and otherwise as good as absent; rows of other
kinds are passed over. Units: bytes, milliseconds since 1970.
"""

from dataclasses import dataclass, field
from typing import Any

from kvtier.blocks import plain_cbor
from kvtier.cache.order_rows import HEAD_KEY, LOG_KEY, SNAPSHOT_KEY
from kvtier.engine.sidecar import CONDEMNED_KEY, COUNTERS_KEY, WEAR_KEY
from kvtier.engine.wear import read_row
from kvtier.tiers.lmdb.offline import StoreReader

_PLACE_BYTES = 8


@dataclass(slots=True)
class Notes:
    """Each is None where the engine has left none; `condemned` is in the order of time."""

    policy: dict[str, Any] | None = None
    counters: dict[str, int] | None = None
    wear: dict[str, Any] | None = None
    condemned: list[dict[str, Any]] = field(default_factory=list)


def read_notes(reader: StoreReader) -> Notes:
    """One pass over the sidecar."""
    notes = Notes()
    head: dict[Any, Any] | None = None
    snapshot_bytes = log_rows = log_bytes = 0
    for key, row in reader.sidecar():
        if key == HEAD_KEY:
            head = _fields(reader, key, row)
        elif key.startswith(SNAPSHOT_KEY):
            snapshot_bytes += len(row)
        elif key.startswith(LOG_KEY):
            log_rows += 1
            log_bytes += len(row)
        elif key == COUNTERS_KEY:
            notes.counters = _counters(_fields(reader, key, row))
        elif key == WEAR_KEY:
            _fields(reader, key, row)
            notes.wear = read_row(row) or None
        elif key.startswith(CONDEMNED_KEY):
            notes.condemned.append(_condemned(key, _fields(reader, key, row)))
    if head is not None:
        sizes = {"snapshot_bytes": snapshot_bytes, "log_rows": log_rows, "log_bytes": log_bytes}
        known = {"ordered_blocks": _whole(head.get("residents")), "ghosts": _whole(head.get("ghosts"))}
        notes.policy = {"name": str(head.get("policy", "")), **known, **sizes}
    notes.condemned.sort(key=lambda entry: entry["at_ms"] or 0)
    return notes


def _condemned(key: bytes, fields: dict[Any, Any] | None) -> dict[str, Any]:
    place, fields = key[len(CONDEMNED_KEY) :], fields or {}
    return {
        "found_by": "engine",
        "place": int.from_bytes(place, "big") if len(place) == _PLACE_BYTES else None,
        "key": _hex(fields.get("key")),
        "namespace": _hex(fields.get("namespace")),
        "length_bytes": _whole(fields.get("length")),
        "stored_ms": None,
        "at_ms": _whole(fields.get("at_ms")),
        "detail": str(fields.get("detail", "")),
    }


def _counters(fields: dict[Any, Any] | None) -> dict[str, int] | None:
    if fields is None:
        return None
    return {name: count for name, count in fields.items() if isinstance(name, str) and _whole(count) is not None}


def _fields(reader: StoreReader, key: bytes, row: bytes) -> dict[Any, Any] | None:
    try:
        fields = plain_cbor.loads(row)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        return fields
    reader.note(f"sidecar {key!r}: it is not a CBOR map", ("sidecar", key))
    return None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _hex(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else ""
