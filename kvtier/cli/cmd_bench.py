"""`kvtier bench host|nvme|engine`: how fast this machine is with kvtier, and without it.

Contestants run in turns, figures are medians with their quartiles, and the machine and the command stand below them.
Targets are printed and never enforced: the exit code is 0 when the bench has run, 2 when it could not.

    host     blocks between the gpu tier (on host memory) and the host tier; against torch's copy_ or C's memmove
    nvme     an lmdb tier on a fresh ext4; against raw O_DIRECT I/O, one file per block, and payload: inline
    engine   verbs, opening a store, flush and promotion, RAM

JSON (keys are stable; GB are 10**9 bytes):
    bench, command, settings {what was asked for}, notes [text]
    machine    {cpu, cores, kernel, python, numpy, lmdb, torch (null: not installed), filesystem (nvme, engine)}
    races      [{what, blocks, block_bytes, gbs {contestant: {median, q1, q3}}, cpu_s_per_gb {contestant: seconds},
                 ratios {rival: our speed by its}, best_rival, ratio (to it), target (or null)}]; ours is "kvtier"
    costs      [{what, unit (ms, bytes, MB), median, q1, q3, target (or null)}]
nvme prints its ratios by name before these (kvtier/cli/bench/nvme/goals.py), and with them
    goals      {name: {target, at_most (else at least), met}}
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvtier.cli.bench import engine as engine_bench
from kvtier.cli.bench import host as host_bench
from kvtier.cli.bench import progress
from kvtier.cli.bench.nvme import course as nvme_course
from kvtier.cli.bench.nvme import plan as nvme_plan
from kvtier.cli.bench.report import Report
from kvtier.errors import UsageError
from kvtier.tiers.lmdb.index import SYNC_MODES
from kvtier.tiers.lmdb.layout import LENGTH_BYTES_MAX

ROUNDS_MAX = 100_000
NVME_ROUNDS_MAX = 40  # what the stores that are filled for them have room for
BLOCKS_MAX = 1_000_000
KEYS_MAX = 100_000_000


def host(block_bytes: int, blocks: int, rounds: int, json_output: bool) -> int:
    """Copies between memory tiers. Raises UsageError for what cannot be measured; returns the exit code."""
    _check_within("--block-bytes", block_bytes, LENGTH_BYTES_MAX)
    _check_within("--blocks", blocks, BLOCKS_MAX)
    _check_within("--rounds", rounds, ROUNDS_MAX)
    return _show(lambda: host_bench.measure(block_bytes, blocks, rounds), json_output)


def nvme(
    path: Path | None,
    rounds: int | None,
    records: int | None,
    durability: str,
    json_output: bool,
    *,
    quick: bool = False,
    in_place: bool = False,
) -> int:
    """The store on a disk, against its goals. Raises UsageError; returns the exit code."""
    if durability not in SYNC_MODES:
        raise UsageError(f"--durability {durability}: use one of {', '.join(SYNC_MODES)}")
    plan = nvme_plan.quick(nvme_plan.Plan()) if quick else nvme_plan.Plan()
    rounds = plan.rounds if rounds is None else rounds
    records = plan.records if records is None else records
    _check_within("--rounds", rounds, NVME_ROUNDS_MAX)
    _check_within("--records", records, KEYS_MAX)
    plan = replace(plan, rounds=rounds, records=records, durability=durability)
    return _show(lambda: _measured(path, plan, quick, fresh=not in_place), json_output)


def _measured(path: Path | None, plan: nvme_plan.Plan, quick: bool, fresh: bool) -> nvme_course.Findings:
    findings = nvme_course.measure(path, plan, fresh=fresh, say=_progress)
    if quick:
        findings.report.notes.insert(0, "quick: these figures show that the bench runs, and nothing about speed")
    return findings


def _progress(text: str) -> None:
    """A run takes minutes: whoever watches is told what it does."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


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
    with progress.shown() as begin:
        return _show(lambda: engine_bench.measure(path, sizes, begin), json_output)


def _check_within(option: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: use {least} to {most}")


def _show(measure: Callable[[], Report | nvme_course.Findings], json_output: bool) -> int:
    report = measure()
    if json_output:
        print(json.dumps(report.record()))
    else:
        report.show(Console())
    return 0
