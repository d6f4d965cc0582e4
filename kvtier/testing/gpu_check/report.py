"""The report: everything as JSON, and for people as tables.

Owns no state. JSON keys are stable: command, date (UTC), machine, card, versions, ok, seconds, parts [{part, ok,
figures [{name, value, unit}], findings [text], notes [text], aims {target: value}, skipped (or null), seconds}],
targets [{name, text, wanted, measured (or null), unit, met (true, false, null), reason (or null)}].
"""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier import __version__
from kvtier.testing.gpu_check.record import Record
from kvtier.testing.gpu_check.targets import verdicts

PACKAGES = ("cuda-bindings", "cupy-cuda13x", "nvidia-cuda-nvrtc", "torch", "numpy", "lmdb")
CPUINFO = Path("/proc/cpuinfo")


def assembled(records: Mapping[str, Record], card: dict[str, Any], command: str, date: str) -> dict[str, Any]:
    """The whole report, for JSON."""
    return {
        "command": command,
        "date": date,
        "machine": _machine(),
        "card": card,
        "versions": {"kvtier": __version__, **{package: _version(package) for package in PACKAGES}},
        "ok": all(record.ok for record in records.values()),
        "seconds": round(sum(record.seconds for record in records.values()), 1),
        "parts": [record.as_json() for record in records.values()],
        "targets": verdicts(records),
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """For people: every figure, then the targets, then what is wrong."""
    for part in report["parts"]:
        if part["figures"]:
            console.print(_part_table(part))
    console.print(_target_table(report["targets"]))
    for part in report["parts"]:
        for finding in part["findings"]:
            _line(console, f"FINDING  {part['part']}: {finding}")
        for note in part["notes"]:
            _line(console, f"note     {part['part']}: {note}")
        if part["skipped"]:
            _line(console, f"skipped  {part['part']}: {part['skipped']}")
    card = report["card"]
    _line(console, f"{card['name']}, {card['architecture']}, driver {card['driver_version']}; {report['date']}")
    _line(console, f"$ {report['command']}")


def _part_table(part: Mapping[str, Any]) -> Table:
    verdict = "skipped" if part["skipped"] else "ok" if part["ok"] else "FINDINGS"
    table = Table(title=f"{part['part']}: {verdict}, {part['seconds']:.1f} s", box=SIMPLE_HEAD, title_justify="left")
    for column, where in (("", "left"), ("measured", "right"), ("unit", "left")):
        table.add_column(column, justify=where)  # type: ignore[arg-type]
    for figure in part["figures"]:
        table.add_row(figure["name"], _text(figure["value"]), figure["unit"])
    return table


def _target_table(targets: list[dict[str, Any]]) -> Table:
    table = Table(title="Targets", box=SIMPLE_HEAD, title_justify="left")
    for column in ("target", "wanted", "measured", "verdict"):
        table.add_column(column)
    for target in targets:
        measured = "not measured" if target["measured"] is None else f"{target['measured']:.4g} {target['unit']}"
        verdict = {True: "met", False: "MISSED", None: target["reason"]}[target["met"]]
        table.add_row(target["text"], target["wanted"], measured, verdict)
    return table


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    for line in CPUINFO.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
