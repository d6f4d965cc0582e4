"""`kvtier gc`: gives back what a store keeps and nobody needs, and says how much of the disk that was.

Exit codes: 0 done, 2 nothing could be done. docs/store.md has what it takes out, and the keys of its JSON.
"""

import json
from dataclasses import asdict
from pathlib import Path

from kvtier.cli.inspect.show import size
from kvtier.cli.store.quarantine import surplus
from kvtier.cli.store.target import folder_of
from kvtier.tiers.lmdb.sweep import sweep
from kvtier.tiers.lmdb.upkeep import Upkeep


def gc(path: Path, json_output: bool = False) -> int:
    """Sweep the store in `path` (or of a YAML file).

    Raises StoreLocked, naming the process, if the store is in use; ConfigError or StoreError.
    """
    folder = folder_of(path)
    with Upkeep.open(folder) as upkeep:
        swept = sweep(upkeep, surplus(upkeep.reader, beside={}))
        findings = len(upkeep.reader.findings) + upkeep.reader.findings_left_out
    disk_bytes = swept.disk_bytes or {}
    if json_output:
        print(json.dumps({"path": str(folder)} | asdict(swept) | {"damaged_rows": findings}))
        return 0
    freed = ", ".join(f"{size(given)} of the {name}" for name, given in disk_bytes.items())
    print(f"{folder}: given back: {freed}")
    for name in ("dropped_records", "superseded_records", "namespaces", "extents", "sidecar_rows"):
        if count := getattr(swept, name):
            print(f"{name.replace('_', ' ')}: {count:,}")
    if swept.unknown_records:
        print(f"{swept.unknown_records:,} records are of a version that this kvtier does not read, and stay")
    if findings:
        print(f"{findings:,} rows are damaged and were left alone: see kvtier fsck")
    return 0
