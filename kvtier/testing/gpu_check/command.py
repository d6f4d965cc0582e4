"""The command: which parts, on which device, how thoroughly, and where the report goes.

    python -m kvtier.testing.gpu_check [--json OUT] [--only part,part] [--quick] [--device N]

Exit codes: 0 all parts ok (or skipped with a reason), 1 at least one finding, 2 wrong usage or no device. Missed
targets are told and are no findings. Always: no part is started after `BUDGET_S`; it is skipped then, and says so.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier.errors import ConfigError, KvtierError
from kvtier.registry import suggestion
from kvtier.testing.gpu_check import report
from kvtier.testing.gpu_check.card import Card
from kvtier.testing.gpu_check.child import run_in_child
from kvtier.testing.gpu_check.parts import PARTS
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.scale import SCALES

BUDGET_S = 225.0  # leaves room to write the report within 4 minutes
PART_S = 75.0
MODULE = "kvtier.testing.gpu_check"

RunPart = Callable[[str, int, str, float], Record]


def main(arguments: Sequence[str] | None = None, run_part: RunPart = run_in_child) -> int:
    """Run the command; returns the exit code. run_part: name, device, scale's name, patience in seconds -> record."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    wrong = _wrong_usage(options)
    if wrong:
        return _refuse(wrong)
    try:
        card = _card_facts(options.device)
    except ConfigError as error:
        return _refuse(f"there is no device to check: {error.problem}")
    except KvtierError as error:
        return _refuse(f"the device cannot be used: {error}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    records = _run(options.only, options.device, "quick" if options.quick else "full", run_part)
    told = report.assembled(records, card, shlex.join(["python", "-m", MODULE, *given]), date)
    report.show(told, Console())
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            return _refuse(f"--json {options.json}: {error.strerror}; the tables above are all there is")
    return 0 if told["ok"] else 1


def _run(parts: Sequence[str], device: int, scale: str, run_part: RunPart) -> dict[str, Record]:
    records: dict[str, Record] = {}
    start = time.monotonic()
    for part in parts:
        left_s = BUDGET_S - (time.monotonic() - start)
        if left_s <= 0:
            records[part] = Record(part, skipped=f"no time was left of {BUDGET_S:.0f} s")
            continue
        sys.stderr.write(f"{part}: {PARTS[part]}\n")
        records[part] = run_part(part, device, scale, min(PART_S, left_s))
    return records


def _card_facts(device: int) -> dict[str, Any]:
    """What the card is. The hold on it is given up again, so that the parts have all of it. Raises ConfigError."""
    card = Card(device, SCALES["quick"])
    try:
        return card.facts()
    finally:
        card.close()


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:15} {what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Checks and measures the GPU tier on a card, in under 4 minutes. No network is used.",
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the whole report to this file")
    parser.add_argument("--only", type=_names, default=list(PARTS), metavar="PART,PART", help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the device's number")
    return parser


def _names(text: str) -> list[str]:
    """Part names, in the order in which they run."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}. {suggestion(name, PARTS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"no part is named. Known: {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def _wrong_usage(options: argparse.Namespace) -> str | None:
    """What would fail only after minutes."""
    if options.device < 0:
        return f"--device {options.device}: use 0 or more"
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        return f"--json {options.json}: name a file in a folder that exists"
    return None


def _refuse(problem: str) -> int:
    sys.stderr.write(f"gpu_check: {problem}\n")
    return 2
