"""`kvtier fsck`: compares a store's index with itself, its slab and its disk, and takes out what cannot be believed.

Read-only without `--repair`, and then also beside a live writer. Exit codes: 0 sound, 1 findings (also if they were
repaired), 2 not a store, or nothing could be done. docs/store.md has what it looks at and the keys of its JSON.
"""

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.cli.inspect.bar import Advance, progress_bar
from kvtier.cli.inspect.notes import read_notes
from kvtier.cli.inspect.pace import Pace, parse_rate
from kvtier.cli.inspect.report import CONDEMNED_KEPT, condemned_entry
from kvtier.cli.inspect.show import SHOWN_MAX, size
from kvtier.cli.store.quarantine import quarantine_rows
from kvtier.cli.store.target import folder_of
from kvtier.tiers.lmdb.audit import BATCH_BYTES, Verdict
from kvtier.tiers.lmdb.examine import Examination, Examined
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.index import DamagedStore
from kvtier.tiers.lmdb.offline import StoreReader
from kvtier.tiers.lmdb.repair import repair
from kvtier.tiers.lmdb.upkeep import Upkeep

SOUND, FINDINGS = 0, 1


def fsck(path: Path, mend: bool = False, rate: str | None = None, json_output: bool = False) -> int:
    """Examine the store in `path` (or of a YAML file), and print what is wrong with it.

    mend: also remove it; raises StoreLocked, naming the process, if the store is in use. rate: bytes a second at
    most. Raises UsageError, ConfigError or StoreError.
    """
    pace = Pace(None if rate is None else parse_rate(rate))
    folder = folder_of(path)
    try:
        report = _mended(folder, pace, json_output) if mend else _looked(folder, pace, json_output)
    except DamagedStore as error:
        print(f"error: {error}", file=sys.stderr)
        if json_output:
            print(json.dumps({"path": str(folder), "error": str(error)}))
        return FINDINGS
    if json_output:
        print(json.dumps(report))
    else:
        _show(report)
    return FINDINGS if _is_damaged(report) else SOUND


def _looked(folder: Path, pace: Pace, quiet: bool) -> dict[str, Any]:
    """Look at the store; once more, as beside a writer, if one appeared meanwhile."""
    for live in (False, True):
        try:
            with closing(StoreReader.open(folder, live)) as reader:
                found, seconds = _examined(reader, pace, quiet)
                return _report(reader, found, seconds, repaired=0)
        except Overtaken:
            continue
    raise AssertionError("beside a writer nothing is overtaken")


def _mended(folder: Path, pace: Pace, quiet: bool) -> dict[str, Any]:
    with Upkeep.open(folder) as upkeep:
        reader = upkeep.reader
        reader.damaged_rows = set()
        found, seconds = _examined(reader, pace, quiet)
        change = repair(reader, found)
        change.sidecar = {**change.sidecar, **quarantine_rows(reader, found.bad)}
        repaired = len(reader.damaged_rows) + len(found.bad)
        if repaired:
            upkeep.commit(change)
        return _report(reader, found, seconds, repaired + upkeep.renew_state())


def _examined(reader: StoreReader, pace: Pace, quiet: bool) -> tuple[Examined, float]:
    started = time.monotonic()
    blocks_about = reader.records_about()
    with progress_bar(quiet, reading="checking") as advance:
        examination = Examination(reader, pace.batch_bytes(BATCH_BYTES))

        def spent(batch_bytes: int) -> None:
            _advance(advance, examination.found, blocks_about)
            pace.spend(batch_bytes)

        found = examination.run(spent)
    read_notes(reader)  # for its findings
    return found, time.monotonic() - started


def _advance(advance: Advance, found: Examined, blocks_about: int) -> None:
    advance(found.verdicts.total(), blocks_about, found.read_bytes)


def _report(reader: StoreReader, found: Examined, seconds: float, repaired: int) -> dict[str, Any]:
    now_ms = time.time_ns() // 10**6
    verdicts = {verdict.value: found.verdicts[verdict] for verdict in Verdict}
    return {
        "path": str(reader.folder),
        "live": reader.live,
        "blocks": found.verdicts.total(),
        **verdicts,
        "read_bytes": found.read_bytes,
        "seconds": round(seconds, 3),
        "findings": sorted(reader.findings),
        "findings_left_out": reader.findings_left_out,
        "condemned": [condemned_entry(reader, audited, "fsck", now_ms) for audited in found.bad[:CONDEMNED_KEPT]],
        "condemned_left_out": max(0, len(found.bad) - CONDEMNED_KEPT),
        "leftovers": asdict(found.leftovers),
        "repaired": repaired,
    }


def _is_damaged(report: dict[str, Any]) -> bool:
    return bool(report["findings"] or report["condemned"])


def _show(report: dict[str, Any]) -> None:
    moved = f", {report['moved']:,} moved meanwhile" if report["moved"] else ""
    print(f"{report['path']}: {report['sound']:,} of {report['blocks']:,} blocks are sound{moved}")
    said = [f"damage: {finding}" for finding in report["findings"]]
    said += [f"block {e['key']} at byte {e['place'] * 4096} of the slab: {e['detail']}" for e in report["condemned"]]
    for line in said[:SHOWN_MAX]:
        print(line)
    more = len(said) - SHOWN_MAX + report["findings_left_out"] + report["condemned_left_out"]
    if more > 0:
        print(f"... and {more:,} more; --json lists up to 1000 of each kind")
    if report["repaired"]:
        print(f"repaired: {report['repaired']:,} rows were removed or written anew; the rest is as it was")
    elif said:
        print("kvtier fsck --repair removes what cannot be believed")
    for name, value in report["leftovers"].items():
        if value:
            words = name.removesuffix("_bytes").replace("_", " ")
            print(f"{words}: {size(value) if name.endswith('_bytes') else f'{value:,}'}")
    sweepable = {name: value for name, value in report["leftovers"].items() if name != "unknown_records"}
    if any(sweepable.values()):
        print("that is no damage; kvtier gc gives it back")
