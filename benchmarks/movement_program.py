"""What the benchmarks of movement share: options from a record of sizes, a folder on the measured disk, a report.

Owns no state. Always: the folder is gone at the end, and the report shows machine and command. Units: those of the
part's sizes; bytes on the disk.
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier.cli.bench.folder import scratch
from kvtier.cli.bench.report import Report
from kvtier.errors import KvtierError

DISK_BYTES_LEAST = 64 << 20


def program(part: Any, arguments: list[str] | None = None) -> int:
    """Run a part as a program. It has `NAME`, `Sizes`, `disk_bytes(sizes)` and `measure(report, sizes, folder)`."""
    parser = argparse.ArgumentParser(description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in fields(part.Sizes):
        option = f"--{size.name.replace('_', '-')}"
        help_text = f"{size.metadata['help']} (default: {size.default})"
        parser.add_argument(option, type=_positive, default=size.default, metavar="N", help=help_text)
    parser.add_argument("--path", type=Path, metavar="DIR", help="a folder on the disk to be measured (default: here)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = vars(parser.parse_args(arguments))
    path, as_json = options.pop("path"), options.pop("json")
    try:
        report = measured(part, part.Sizes(**options), path)
    except (OSError, KvtierError) as error:
        parser.error(str(error))
    if as_json:
        print(json.dumps(report.record()))
    else:
        report.show(Console())
    return 0


def measured(part: Any, sizes: Any, path: Path | None) -> Report:
    """What a part finds on the disk of `path`."""
    report = Report(part.NAME, asdict(sizes), path or Path.cwd())
    with scratch(path, max(DISK_BYTES_LEAST, part.disk_bytes(sizes))) as folder:
        part.measure(report, sizes, folder)
    return report


def main(part_name: str) -> None:
    sys.exit(program(sys.modules[part_name]))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on")
    return int(text)
