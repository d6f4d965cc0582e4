"""`kvtier drop`: makes a store forget namespaces, at once. docs/store.md says what happens to their blocks.

Always: what would go is shown before it goes, and only an answer or `--yes` lets it go; all of it in one transaction.
Exit codes: 0 done, 2 nothing was changed.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.inspect.show import size
from kvtier.cli.paper import plain
from kvtier.cli.store.choice import chosen, name_of
from kvtier.cli.store.target import folder_of
from kvtier.errors import UsageError
from kvtier.tiers.lmdb.index import Change
from kvtier.tiers.lmdb.layout import ID_KEY
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.upkeep import Upkeep


def drop(path: Path, namespaces: Sequence[str], yes: bool = False, json_output: bool = False) -> int:
    """Drop namespaces of the store in `path` (or of a YAML file), named by fingerprint or name.

    Raises UsageError for a name that is unknown or means several, or if nobody agreed; StoreLocked, naming the
    process, if the store is in use; StoreError.
    """
    folder = folder_of(path)
    with Upkeep.open(folder) as upkeep:
        ids = chosen(upkeep.reader.namespaces(), namespaces)
        rows = _shown(upkeep.reader, ids)
        said = [_line(row) for row in rows]
        if not yes:
            _ask(folder, said)
        upkeep.commit(Change(namespaces={ID_KEY.pack(tier_id): None for tier_id in ids}))
        unknown = upkeep.reader.unknown_records
    if json_output:
        print(json.dumps({"path": str(folder), "dropped": rows, "unknown_records": unknown}))
        return 0
    for line in said:
        print(f"dropped {line}")
    if unknown:
        print(f"{unknown} records are of a version that this kvtier does not read, and stay")
    return 0


def _shown(reader: StoreReader, ids: Sequence[int]) -> list[dict[str, Any]]:
    """What these namespaces hold now."""
    blocks: Counter[int] = Counter()
    payload_bytes: Counter[int] = Counter()
    for stored in reader.records():
        blocks[stored.record.namespace] += 1
        payload_bytes[stored.record.namespace] += stored.record.length_bytes
    rows = []
    for tier_id in ids:
        fingerprint, description = reader.names[tier_id]
        row = {"fingerprint": fingerprint.hex(), "name": name_of(description)}
        rows.append(row | {"blocks": blocks[tier_id], "payload_bytes": payload_bytes[tier_id]})
    return rows


def _line(row: dict[str, Any]) -> str:
    name = f" {plain(row['name'])}" if row["name"] else ""
    return f"{row['fingerprint']}{name}: {row['blocks']:,} blocks, {size(row['payload_bytes'])}"


def _ask(folder: Path, said: Sequence[str]) -> None:
    """Show what goes, and raise UsageError unless somebody at a terminal agrees."""
    for line in said:
        print(line, file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("nothing was dropped: nobody is there to ask; give --yes")
    print(f"Drop this from {folder}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was dropped")
