"""`kvtier demo`: a real model answers questions cold; a new process answers them from what kvtier kept.

Always: each half runs in a process of its own, the first of which is killed, and nothing but the store passes between
their caches. This process loads neither torch nor transformers. Units: tokens, threads, bytes.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvtier.cli.demo import plot, summary, table, text, tiers, weights
from kvtier.cli.demo.steps import StepFailed, Steps
from kvtier.config import Config
from kvtier.errors import UsageError

RESULTS_FILE = "results.json"
PLOT_FILE = "demo.png"
STORE_FOLDER = "store"
LOG_BYTES = 1 << 20  # what the demo writes beside its store: jobs, findings, logs, the plot


def demo(config: Path | None, prefix_tokens: int, threads: int, out: Path | None, keep: bool, json_output: bool) -> int:
    """Run it and print the result.

    Returns 0 if all tokens are those of stock generate() and the second process restored from the store, 2 if
    something must be installed first, else 1. Raises UsageError or ConfigError for what cannot work.
    """
    model_folder = weights.model_folder(os.environ)
    own = tiers.own_tiers(config) if config else None
    block_tokens = own.model.block_tokens if own else tiers.BLOCK_TOKENS
    _check_numbers(prefix_tokens, threads, block_tokens)
    weights.check_readable(model_folder)
    if commands := weights.missing_installs(model_folder):
        needs = "kvtier demo needs a model to run; install it first:"
        print(needs, *commands, sep="\n  ", file=sys.stderr)
        if json_output:
            print(json.dumps({"error": f"{needs} {' && '.join(commands)}"}))
        return 2
    try:
        with _folder(out, keep) as folder:
            steps = Steps(folder, model_folder)
            steps.convert()
            book = text.Book(model_folder)
            asks = book.asks(prefix_tokens, block_tokens)
            used = own or tiers.small_tiers(model_folder, prefix_tokens, folder / STORE_FOLDER)
            if own is None:
                _check_disk(folder, used)
            filled, killed_after_s = steps.fill(asks, used, threads)
            restored = steps.restore(asks, threads)
            result = summary.summary_of(
                asks, book, filled, restored, killed_after_s, threads, tiers.persistent_name(used)
            )
            return _report(result, folder, _plot_file(folder, out, keep, model_folder), json_output)
    except StepFailed as error:
        print(f"kvtier demo: {error}", file=sys.stderr)
        if json_output:
            print(json.dumps({"error": str(error)}))
        return 1


def _check_numbers(prefix_tokens: int, threads: int, block_tokens: int) -> None:
    """What can be refused before any model is there; the text's own length is checked with its tokens."""
    most = weights.CONTEXT_TOKENS - text.QUESTION_TOKENS_MAX - text.NEW_TOKENS
    if not block_tokens <= prefix_tokens <= most:
        raise UsageError(
            f"--prefix-tokens {prefix_tokens}: use {block_tokens} (one block) to {most} (the model's context)"
        )
    cores = len(os.sched_getaffinity(0))
    if not 1 <= threads <= cores:
        raise UsageError(f"--threads {threads}: use 1 to {cores}, the cores of this machine")


@contextmanager
def _folder(out: Path | None, keep: bool) -> Iterator[Path]:
    """Where everything lies: the user's folder, or a temporary one that goes away unless it is to be kept."""
    if out is None and not keep:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as name:
            yield Path(name)
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-")) if out is None else out.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
    if used:
        raise UsageError(f"--out {out}: the folder is not empty; name a new one, so that nothing of yours is replaced")
    yield folder
    print(f"store, configuration and results: {folder}", file=sys.stderr)


def _check_disk(folder: Path, config: Config) -> None:
    """A full disk would be a miss to kvtier, and a strange demo."""
    store = next(tier for tier in config.tiers if tier.name == tiers.persistent_name(config))
    needed_mb, free_mb = ((store.capacity_bytes + LOG_BYTES) / 1e6, shutil.disk_usage(folder).free / 1e6)
    if free_mb < needed_mb:
        raise UsageError(
            f"{folder} has {free_mb:.0f} MB free, and the demo's store can take {needed_mb:.0f} MB; "
            "name a folder on another disk with --out, or ask for fewer --prefix-tokens"
        )


def _plot_file(folder: Path, out: Path | None, keep: bool, model_folder: Path) -> Path:
    """Beside the results; where those go away, beside the model, so that there is something to look at."""
    return (folder if out or keep else model_folder.parent) / PLOT_FILE


def _report(result: summary.Summary, folder: Path, plot_file: Path, json_output: bool) -> int:
    record = result.record()
    (folder / RESULTS_FILE).write_text(json.dumps(record, indent=2))
    table.show(Console(stderr=json_output), result)
    print(plot.draw(result, plot_file), file=sys.stderr if json_output else sys.stdout)
    if result.verdict:
        print(f"kvtier demo: {result.verdict}", file=sys.stderr)
    if json_output:
        print(json.dumps(record))
    return 1 if result.verdict else 0
