"""The report of `kvtier inspect` as plain data, in the shape that docs/inspect.md documents.

Owns no state. Always: the store is read once, in streams; what is kept of it are sums, a sample's places and at most
CONDEMNED_KEPT bad blocks. Units: bytes, seconds, milliseconds since 1970.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier.blocks import plain_cbor
from kvtier.cli.inspect.notes import read_notes
from kvtier.cli.inspect.pace import Pace
from kvtier.cli.inspect.tally import Tally
from kvtier.cli.inspect.wear import wear_of
from kvtier.tiers.lmdb.audit import BATCH_BYTES, Audit, Audited, Verdict
from kvtier.tiers.lmdb.offline import UNKNOWN, StoreReader
from kvtier.types import PAGE_BYTES

SAMPLE_BLOCKS = 64
CONDEMNED_KEPT = 1000
_BAD = (Verdict.CORRUPT, Verdict.UNREADABLE)

Progress = Callable[[int, int, int], None]  # blocks done, blocks in all (about), bytes done


@dataclass(frozen=True, slots=True)
class Look:
    """How closely to look. `sample`: blocks to read and check, None for all of them."""

    sample: int | None = SAMPLE_BLOCKS
    bytes_per_s: int | None = None


@dataclass(slots=True)
class Checked:
    """What became of the blocks that were read."""

    now_ms: int
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    read_bytes: int = 0
    seconds: float = 0.0
    condemned: list[dict[str, Any]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return self.verdicts.total()

    @property
    def bad(self) -> int:
        return sum(self.verdicts[verdict] for verdict in _BAD)

    def add(self, reader: StoreReader, batch: Iterable[Audited]) -> int:
        """Count a batch; returns how many bytes were read for it."""
        batch_bytes = 0
        for audited in batch:
            batch_bytes += audited.stored.stride_bytes
            self.verdicts[audited.verdict] += 1
            if audited.verdict in _BAD and len(self.condemned) < CONDEMNED_KEPT:
                self.condemned.append(condemned_entry(reader, audited, "inspect", self.now_ms))
        self.read_bytes += batch_bytes
        return batch_bytes


def describe(reader: StoreReader, look: Look, progress: Progress) -> dict[str, Any]:
    """Read the store as closely as wished. Raises Overtaken or StoreError like the reader."""
    now_ms = time.time_ns() // 10**6
    tally = Tally(now_ms, keep_places=bool(look.sample))
    checked = _check(reader, look, tally, now_ms, progress)
    notes = read_notes(reader)
    namespaces = reader.namespaces()
    limits = reader.generation_limit(), reader.namespace_limit()
    reader.expect_undisturbed()
    header = reader.header
    return {
        "path": str(reader.folder),
        "live": reader.live,
        "clean": reader.state.clean,
        "format": header.format,
        "store_id": header.store_id.hex(),
        "durability": header.durability,
        "created_ms": header.created_ms,
        "now_ms": now_ms,
        "capacity_bytes": header.capacity_bytes,
        "extent_bytes": header.extent_bytes,
        "extents": {"lent": len(tally.extents), "capacity": header.capacity_bytes // header.extent_bytes},
        "disk_bytes": reader.disk_bytes(),
        "blocks": tally.blocks,
        "payload_bytes": tally.payload_bytes,
        "slot_bytes": tally.slot_bytes,
        "codecs": [
            {"codec": codec, "blocks": blocks, "raw_bytes": raw_bytes, "payload_bytes": payload_bytes}
            for codec, (blocks, raw_bytes, payload_bytes) in sorted(tally.coded.items())
        ],
        "oldest_ms": tally.oldest_ms,
        "newest_ms": tally.newest_ms,
        "ages": tally.ages(),
        "generation": {"newest": tally.generation_newest, "limit": _known(limits[0])},
        "namespaces": _namespaces(reader, tally),
        "namespaces_gone": None if limits[1] == UNKNOWN else max(0, limits[1] - 1 - len(namespaces)),
        "dropped_records": reader.dropped_records,
        "unknown_records": reader.unknown_records,
        "size_classes": _size_classes(reader, tally),
        "policy": notes.policy,
        "counters": notes.counters,
        "wear": wear_of(notes.wear, reader.folder, now_ms),
        "verify": _verify(look, checked),
        "condemned": notes.condemned + checked.condemned,
        "condemned_left_out": checked.bad - len(checked.condemned),
        "findings": sorted(reader.findings),
        "findings_left_out": reader.findings_left_out,
    }


def condemned_entry(reader: StoreReader, audited: Audited, found_by: str, at_ms: int) -> dict[str, Any]:
    """A bad block, for people and programs. found_by: the verb that found it."""
    stored = audited.stored
    if stored.record.namespace not in reader.names:
        reader.namespaces()  # a block that came after the list was begun
    fingerprint, _ = reader.names.get(stored.record.namespace, (b"", b""))
    return {
        "found_by": found_by,
        "place": reader.offset_of(stored) // PAGE_BYTES,
        "key": stored.record.key.hex(),
        "namespace": fingerprint.hex(),
        "length_bytes": stored.record.length_bytes,
        "stored_ms": stored.record.stored_ms,
        "at_ms": at_ms,
        "detail": audited.detail,
    }


def is_damaged(report: dict[str, Any]) -> bool:
    """Whether something is wrong with the store now; what the engine condemned earlier has left it already."""
    return bool(report["findings"] or report["verify"]["corrupt"] or report["verify"]["unreadable"])


def _check(reader: StoreReader, look: Look, tally: Tally, now_ms: int, progress: Progress) -> Checked:
    """Let all records pass through the tally, and read those that are to be checked."""
    pace = Pace(look.bytes_per_s)
    audit = Audit(reader, pace.batch_bytes(BATCH_BYTES))
    checked = Checked(now_ms)
    records = tally.counted(reader.records())
    if look.sample is None:
        blocks_about, batches = reader.records_about(), audit.run(records)
    else:
        for _ in records:
            pass
        chosen = reader.records_at(tally.sample(look.sample))
        found = [stored for stored in chosen if stored is not None]
        checked.verdicts[Verdict.MOVED] += len(chosen) - len(found)
        blocks_about, batches = len(found), audit.run(found)
    started = time.monotonic()
    for batch in batches:
        pace.spend(checked.add(reader, batch))
        progress(checked.blocks, blocks_about, checked.read_bytes)
    checked.seconds = time.monotonic() - started
    return checked


def _verify(look: Look, checked: Checked) -> dict[str, Any]:
    mode = "all" if look.sample is None else "sample" if look.sample else "none"
    counts = {verdict.value: checked.verdicts[verdict] for verdict in Verdict}
    speed = {"read_bytes": checked.read_bytes, "seconds": round(checked.seconds, 3)}
    return {"mode": mode, "blocks": checked.blocks, **counts, **speed}


def _namespaces(reader: StoreReader, tally: Tally) -> list[dict[str, Any]]:
    rows = []
    for tier_id, (fingerprint, description) in sorted(reader.names.items()):
        fields = _fields(description)
        rows.append(
            {
                "fingerprint": fingerprint.hex(),
                "name": str(fields.get("name", "")),
                "fields": fields,
                "blocks": tally.blocks_of[tier_id],
                "payload_bytes": tally.payload_of[tier_id],
            }
        )
    return rows


def _size_classes(reader: StoreReader, tally: Tally) -> list[dict[str, int]]:
    extents = Counter(stride_pages * PAGE_BYTES for stride_pages in reader.extents().values())
    blocks = tally.blocks_of_stride
    return [
        {"stride_bytes": stride, "extents": extents[stride], "blocks": blocks[stride]}
        for stride in sorted(blocks.keys() | extents.keys())
    ]


def _fields(description: bytes) -> dict[str, Any]:
    """The namespace's fields; empty if the engine described it in a way that is not CBOR."""
    try:
        fields = plain_cbor.loads(description)
        json.dumps(fields)
    except (ValueError, TypeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _known(limit: int) -> int | None:
    return None if limit == UNKNOWN else limit
