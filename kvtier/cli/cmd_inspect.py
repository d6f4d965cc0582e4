"""`kvtier inspect`: what a store on disk holds, and whether a sample of it, or all of it, is sound.

Read-only, and safe beside a live writer. Exit codes: 0 sound, 1 damage found, 2 not a store, or not readable. What
it prints, and the keys of its JSON, are in docs/inspect.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier.cli.inspect import report as reports
from kvtier.cli.inspect import show
from kvtier.cli.inspect.bar import progress_bar
from kvtier.cli.inspect.pace import parse_rate
from kvtier.cli.inspect.report import SAMPLE_BLOCKS, Look
from kvtier.cli.store.target import folder_of
from kvtier.errors import StoreError, UsageError
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.index import DamagedStore
from kvtier.tiers.lmdb.offline import StoreReader

SOUND, DAMAGED, USAGE = 0, 1, 2


def inspect(
    path: Path,
    json_output: bool = False,
    sample: int | None = None,
    verify: bool = False,
    rate: str | None = None,
) -> int:
    """Print what the store in `path` holds and return the exit code.

    path: the folder, or a kvtier YAML file with an lmdb tier. sample: blocks to read and check; verify: all of them.
    rate: bytes a second at most. Raises UsageError or ConfigError.
    """
    if verify and sample is not None:
        raise UsageError("--verify checks every block; leave --sample out")
    wanted = SAMPLE_BLOCKS if sample is None else sample
    look = Look(None if verify else wanted, None if rate is None else parse_rate(rate))
    folder = path
    try:
        folder = folder_of(path)
        report = _look(folder, look, quiet=json_output)
    except StoreError as error:
        return _refuse(folder, str(error), json_output, DAMAGED if isinstance(error, DamagedStore) else USAGE)
    except OSError as error:
        problem = f"{error.filename or folder}: cannot be read: {error.strerror or error}"
        return _refuse(folder, problem, json_output, USAGE)
    if json_output:
        print(json.dumps(report))
    else:
        show.show(Console(highlight=False, markup=False, emoji=False), report)
    return DAMAGED if reports.is_damaged(report) else SOUND


def _look(folder: Path, look: Look, quiet: bool) -> dict[str, Any]:
    """Describe the store; once more, as beside a writer, if one appeared meanwhile."""
    try:
        return _look_once(folder, look, quiet, live=False)
    except Overtaken:
        return _look_once(folder, look, quiet, live=True)


def _look_once(folder: Path, look: Look, quiet: bool, live: bool) -> dict[str, Any]:
    reader = StoreReader.open(folder, live)
    try:
        with progress_bar(quiet, reading="checking") as progress:
            return reports.describe(reader, look, progress)
    finally:
        reader.close()


def _refuse(folder: Path, problem: str, json_output: bool, code: int) -> int:
    if json_output:
        print(json.dumps({"path": str(folder), "error": problem}))
    print(f"error: {problem}", file=sys.stderr)
    return code
