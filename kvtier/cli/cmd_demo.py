"""`kvtier demo`: a real model answers questions cold; a new process answers them from what kvtier kept.

Always: each half runs in a process of its own, and nothing but the store passes between their caches. This process
loads neither torch nor transformers. Units: tokens, threads.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvtier.cli.demo import summary, table, text, tiers, weights
from kvtier.cli.demo.steps import StepFailed, Steps
from kvtier.errors import UsageError

RESULTS_FILE = "results.json"
STORE_FOLDER = "store"


def demo(config: Path | None, prefix_tokens: int, threads: int, out: Path | None, keep: bool, json_output: bool) -> int:
    """Run it and print the result.

    Returns 0 if all tokens are those of stock generate() and the second process restored from the store, 2 if
    something must be installed first, else 1. Raises UsageError or ConfigError for what cannot work.
    """
    model_folder = weights.model_folder(os.environ)
    own = tiers.own_tiers(config) if config else None
    _check_numbers(prefix_tokens, threads, own.model.block_tokens if own else tiers.BLOCK_TOKENS)
    if commands := weights.missing_installs(model_folder):
        print("kvtier demo needs a model to run; install it first:", *commands, sep="\n  ", file=sys.stderr)
        return 2
    try:
        with _folder(out, keep) as folder:
            steps = Steps(folder, model_folder)
            steps.convert()
            book = text.Book(model_folder)
            prompts = book.prompts(prefix_tokens)
            used = own or tiers.small_tiers(model_folder, prefix_tokens, folder / STORE_FOLDER)
            filled, restored = steps.answer_twice(prompts, used, threads)
            said = [book.said(answer.tokens) for answer in restored.answers]
            rows = summary.rows_of(prompts, said, filled, restored)
            store_tier = tiers.persistent_name(used)
            result = summary.Summary(rows, prefix_tokens, threads, store_tier, filled.written_blocks)
            return _report(result, folder, json_output)
    except StepFailed as error:
        print(f"kvtier demo: {error}", file=sys.stderr)
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


def _report(result: summary.Summary, folder: Path, json_output: bool) -> int:
    record = result.record()
    (folder / RESULTS_FILE).write_text(json.dumps(record, indent=2))
    table.show(Console(stderr=json_output), result)
    if result.verdict:
        print(f"kvtier demo: {result.verdict}", file=sys.stderr)
    if json_output:
        print(json.dumps(record))
    return 1 if result.verdict else 0
