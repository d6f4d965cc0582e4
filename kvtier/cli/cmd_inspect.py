"""`kvtier inspect`: what a store on disk holds, and whether a sample of it is sound.

Read-only, and safe beside a live writer. Exit codes: 0 sound, 1 damage found, 2 not a store.

JSON (keys are stable; sizes in bytes, times in milliseconds since 1970):
    path, live, clean, format, store_id (hex), durability, created_ms, capacity_bytes, extent_bytes
    extents     {lent, capacity}           disk_bytes {slab, index}
    blocks, payload_bytes, slot_bytes, oldest_ms, newest_ms (null when empty)
    namespaces  [{fingerprint (hex), name, fields, blocks, payload_bytes}]
    size_classes [{stride_bytes, extents, blocks}]
    sample      {verified, corrupt}        findings [text]
    error       text, instead of all others but path, when the store cannot be read
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cbor2
from rich.console import Console
from rich.table import Table

from kvtier.errors import StoreError
from kvtier.tiers.lmdb.index import DamagedStore
from kvtier.tiers.lmdb.offline import StoredRecord, StoreReader
from kvtier.types import PAGE_BYTES

SOUND, DAMAGED, USAGE = 0, 1, 2
SAMPLE_BLOCKS = 64
_FINDINGS_SHOWN = 20


def inspect(path: Path, json_output: bool = False, sample: int = SAMPLE_BLOCKS) -> int:
    """Print what the store in `path` holds and return the exit code. `sample`: blocks to read and verify."""
    try:
        report = _look(path, sample)
    except StoreError as error:
        _say({"path": str(path), "error": str(error)}, json_output)
        return DAMAGED if isinstance(error, DamagedStore) else USAGE
    except OSError as error:
        _say({"path": str(path), "error": f"{path}: cannot be read: {error.strerror}"}, json_output)
        return USAGE
    _say(report, json_output)
    return DAMAGED if report["findings"] else SOUND


def _look(path: Path, sample: int) -> dict[str, Any]:
    """Describe the store; once more, and carefully, if a writer appeared meanwhile."""
    for live in (False, True):
        reader = StoreReader.open(path, live)
        try:
            report = describe(reader, sample)
            if not reader.overtaken:
                break
        finally:
            reader.close()
    return report


def describe(reader: StoreReader, sample: int) -> dict[str, Any]:
    """The report as plain data, in the shape that the module's head documents."""
    records = list(reader.records())
    corrupt = sum(not reader.verify(stored) for stored in spread(records, sample))
    header = reader.header
    lent = {stored.extent for stored in records}
    times = [stored.record.stored_ms for stored in records]
    return {
        "path": str(reader.folder),
        "live": reader.live,
        "clean": reader.state.clean,
        "format": header.format,
        "store_id": header.store_id.hex(),
        "durability": header.durability,
        "created_ms": header.created_ms,
        "capacity_bytes": header.capacity_bytes,
        "extent_bytes": header.extent_bytes,
        "extents": {"lent": len(lent), "capacity": header.capacity_bytes // header.extent_bytes},
        "disk_bytes": reader.disk_bytes(),
        "blocks": len(records),
        "payload_bytes": sum(stored.record.length_bytes for stored in records),
        "slot_bytes": sum(stored.stride_bytes for stored in records),
        "oldest_ms": min(times, default=None),
        "newest_ms": max(times, default=None),
        "namespaces": _namespaces(reader, records),
        "size_classes": _size_classes(reader, records),
        "sample": {"verified": min(sample, len(records)), "corrupt": corrupt},
        "findings": sorted(set(reader.findings)),
    }


def spread(records: Sequence[StoredRecord], sample: int) -> list[StoredRecord]:
    """Up to `sample` records, evenly spread over the slab; the first and the last are among them."""
    if sample >= len(records):
        return list(records)
    if sample == 1:
        return [records[0]]
    return [records[position * (len(records) - 1) // (sample - 1)] for position in range(sample)]


def _namespaces(reader: StoreReader, records: Sequence[StoredRecord]) -> list[dict[str, Any]]:
    blocks = Counter(stored.record.namespace for stored in records)
    payload: Counter[int] = Counter()
    for stored in records:
        payload[stored.record.namespace] += stored.record.length_bytes
    rows = []
    for tier_id, (fingerprint, description) in reader.namespaces().items():
        fields = _fields(description)
        rows.append(
            {
                "fingerprint": fingerprint.hex(),
                "name": str(fields.get("name", "")),
                "fields": fields,
                "blocks": blocks[tier_id],
                "payload_bytes": payload[tier_id],
            }
        )
    return rows


def _size_classes(reader: StoreReader, records: Sequence[StoredRecord]) -> list[dict[str, int]]:
    blocks = Counter(stored.stride_bytes for stored in records)
    extents = Counter(stride_pages * PAGE_BYTES for stride_pages in reader.extents().values())
    return [
        {"stride_bytes": stride, "extents": extents[stride], "blocks": blocks[stride]}
        for stride in sorted(blocks.keys() | extents.keys())
    ]


def _fields(description: bytes) -> dict[str, Any]:
    """The namespace's fields; empty if the engine described it in a way that is not CBOR."""
    try:
        fields = cbor2.loads(description)
        json.dumps(fields)
    except (cbor2.CBORDecodeError, ValueError, TypeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _say(report: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print(json.dumps(report))
    elif "error" in report:
        print(report["error"])
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    state = "in use" if report["live"] else "closed" if report["clean"] else "not closed cleanly"
    console.print(
        f"{report['path']}: format {report['format']}, durability {report['durability']}, {state}", markup=False
    )
    extents, disk = report["extents"], report["disk_bytes"]
    console.print(
        f"{report['blocks']} blocks, {_size(report['payload_bytes'])}; capacity {_size(report['capacity_bytes'])}; "
        f"extents of {_size(report['extent_bytes'])}: {extents['lent']} of {extents['capacity']}; "
        f"on disk: slab {_size(disk['slab'])}, index {_size(disk['index'])}"
    )
    console.print(
        _table(
            "namespace",
            ["fingerprint", "name", "blocks", "bytes"],
            [
                [row["fingerprint"][:12], row["name"], str(row["blocks"]), _size(row["payload_bytes"])]
                for row in report["namespaces"]
            ],
        )
    )
    for row in report["namespaces"]:
        fields = ", ".join(f"{name}={value}" for name, value in row["fields"].items())
        console.print(f"{row['fingerprint']}: {fields}", markup=False)
    console.print(
        _table(
            "size class",
            ["slot", "extents", "blocks"],
            [[_size(row["stride_bytes"]), str(row["extents"]), str(row["blocks"])] for row in report["size_classes"]],
        )
    )
    sample = report["sample"]
    console.print(f"{sample['verified']} blocks verified, {sample['corrupt']} corrupt")
    for finding in report["findings"][:_FINDINGS_SHOWN]:
        console.print(f"damage: {finding}", markup=False)
    if len(report["findings"]) > _FINDINGS_SHOWN:
        console.print(f"... and {len(report['findings']) - _FINDINGS_SHOWN} more findings")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=f"by {title}", title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _size(length_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if length_bytes >= unit:
            return f"{length_bytes / unit:.1f} {name}"
    return f"{length_bytes} B"
