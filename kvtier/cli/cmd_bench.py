"""`kvtier bench host|nvme|engine`: how fast this machine is with kvtier, and without it.

Contestants run in turns, figures are medians with their quartiles, and the machine and the command stand below them.
Targets are printed and never enforced: the exit code is 0 when the bench has run, 2 when it could not.

    host     blocks between the gpu tier (on host memory) and the host tier; against torch's copy_ or C's memmove
    nvme     batches into an lmdb tier and out of it; against O_DIRECT I/O on one thread and on four
    engine   verbs, opening a store, flush and promotion, RAM

JSON (keys are stable; GB are 10**9 bytes):
    bench, command, settings {what was asked for}, notes [text]
    machine    {cpu, cores, kernel, python, numpy, lmdb, torch (null: not installed), filesystem (nvme, engine)}
    races      [{what, blocks, block_bytes, gbs {contestant: {median, q1, q3}}, cpu_s_per_gb {contestant: seconds},
                 ratios {rival: our speed by its}, best_rival, ratio (to it), target (or null)}]; ours is "kvtier"
    costs      [{what, unit (ms, bytes, MB), median, q1, q3, target (or null)}]
"""

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from kvtier.cli.bench import engine as engine_bench
from kvtier.cli.bench import host as host_bench
from kvtier.cli.bench import nvme as nvme_bench
from kvtier.cli.bench.report import Report
from kvtier.errors import UsageError
from kvtier.tiers.lmdb.index import SYNC_MODES
from kvtier.tiers.lmdb.layout import LENGTH_BYTES_MAX

ROUNDS_MAX = 100_000
BLOCKS_MAX = 1_000_000
KEYS_MAX = 100_000_000


def host(block_bytes: int, blocks: int, rounds: int, json_output: bool) -> int:
    """Copies between memory tiers. Raises UsageError for what cannot be measured; returns the exit code."""
    _check_within("--block-bytes", block_bytes, LENGTH_BYTES_MAX)
    _check_within("--blocks", blocks, BLOCKS_MAX)
    _check_within("--rounds", rounds, ROUNDS_MAX)
    return _show(lambda: host_bench.measure(block_bytes, blocks, rounds), json_output)


def nvme(
    path: Path | None, block_bytes: int | None, blocks: int | None, rounds: int, durability: str, json_output: bool
) -> int:
    """Batches to disk and back: two shapes unless one is asked for. Raises UsageError; returns the exit code."""
    if durability not in SYNC_MODES:
        raise UsageError(f"--durability {durability}: use one of {', '.join(SYNC_MODES)}")
    _check_within("--rounds", rounds, ROUNDS_MAX)
    shapes = list(nvme_bench.SHAPES)
    if block_bytes is not None or blocks is not None:
        usual_bytes, usual_blocks = nvme_bench.SHAPES[0]
        shapes = [(usual_bytes if block_bytes is None else block_bytes, usual_blocks if blocks is None else blocks)]
    for shape_bytes, shape_blocks in shapes:
        _check_within("--block-bytes", shape_bytes, LENGTH_BYTES_MAX)
        _check_within("--blocks", shape_blocks, BLOCKS_MAX)
    return _show(lambda: nvme_bench.measure(path, shapes, rounds, durability), json_output)


def engine(
    path: Path | None, blocks: int, store_blocks: int, keys: int, move_blocks: int, rounds: int, json_output: bool
) -> int:
    """A whole cache. Raises UsageError for what cannot be measured; returns the exit code."""
    _check_within("--blocks", blocks, BLOCKS_MAX)
    _check_within("--store-blocks", store_blocks, BLOCKS_MAX)
    _check_within("--keys", keys, KEYS_MAX, engine_bench.KEYS_MIN)
    _check_within("--move-blocks", move_blocks, BLOCKS_MAX)
    _check_within("--rounds", rounds, ROUNDS_MAX)
    sizes = engine_bench.Sizes(blocks, store_blocks, keys, move_blocks, rounds)
    return _show(lambda: engine_bench.measure(path, sizes), json_output)


def _check_within(option: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: use {least} to {most}")


def _show(measure: Callable[[], Report], json_output: bool) -> int:
    report = measure()
    if json_output:
        print(json.dumps(report.record()))
    else:
        report.show(Console())
    return 0
