"""`kvtier inspect`: what a store on disk holds, and whether a sample of it, or all of it, is sound.

Read-only, and safe beside a live writer. Exit codes: 0 sound, 1 damage found, 2 not a store, or not readable. What
it prints, and the keys of its JSON, are in docs/inspect.md.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.cli.inspect import report as reports
from kvtier.cli.inspect import show
from kvtier.cli.inspect.pace import parse_rate
from kvtier.cli.inspect.report import SAMPLE_BLOCKS, Look
from kvtier.config import LmdbTierConfig, load_config
from kvtier.errors import StoreError, UsageError
from kvtier.tiers.lmdb.foreign import Overtaken
from kvtier.tiers.lmdb.index import DamagedStore
from kvtier.tiers.lmdb.offline import StoreReader

SOUND, DAMAGED, USAGE = 0, 1, 2
_YAML = (".yaml", ".yml")


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
        if path.suffix in _YAML and path.is_file():
            folder = store_of(path)
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


def store_of(file: Path) -> Path:
    """The folder of the lmdb tier that a YAML file configures. Raises ConfigError, UsageError if it has none."""
    config = load_config(file, overrides={"model.weights_epoch": "any"})  # the weights need not be here
    for tier in config.tiers:
        if isinstance(tier, LmdbTierConfig):
            return tier.path
    raise UsageError(f"{file}: it has no tier of type lmdb, and so no store to look at")


def _look(folder: Path, look: Look, quiet: bool) -> dict[str, Any]:
    """Describe the store; once more, as beside a writer, if one appeared meanwhile."""
    try:
        return _look_once(folder, look, quiet, live=False)
    except Overtaken:
        return _look_once(folder, look, quiet, live=True)


def _look_once(folder: Path, look: Look, quiet: bool, live: bool) -> dict[str, Any]:
    reader = StoreReader.open(folder, live)
    try:
        with _progress(quiet) as progress:
            return reports.describe(reader, look, progress)
    finally:
        reader.close()


@contextmanager
def _progress(quiet: bool) -> Iterator[reports.Progress]:
    """A bar on stderr, if that is a terminal, which is gone when all is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("reading the index", total=None, done="")

        def advance(blocks: int, blocks_about: int, read_bytes: int) -> None:
            total = max(blocks, blocks_about)
            done = f"{blocks:,} of {total:,} blocks, {show.size(read_bytes)}"
            bar.update(task, description="checking", completed=blocks, total=total, done=done)

        yield advance


def _refuse(folder: Path, problem: str, json_output: bool, code: int) -> int:
    if json_output:
        print(json.dumps({"path": str(folder), "error": problem}))
    print(f"error: {problem}", file=sys.stderr)
    return code
