"""Time to first token by prefix length: cold, restored from disk, and the floor that no store can beat.

    python benchmarks/demo_sweep.py [--prefix-tokens 1024 2048 4096] [--json]

Runs `kvtier demo`, longest prefix first; a run measures its halves as well, so one run is usually enough. Figures are
medians of CPU seconds over the demo's questions; restored answers come out of tiers that are empty above the store.
Targets are printed beside the ratios and never enforced. 4096 tokens are computed cold several times: on one core
of a small machine that takes minutes.
"""

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.cli.machine import machine_line

SPEEDUP_TARGETS = {1024: 12.0, 2048: 18.0, 4096: 20.0}  # cold / restored
FLOOR_TARGET = 1.4  # restored / floor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=list(SPEEDUP_TARGETS), metavar="N")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args()
    points: dict[int, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    for length in sorted(set(options.prefix_tokens), reverse=True):
        if length not in points:
            done = demo(length)
            if done is None:
                return 2
            facts = done["machine"]
            points |= {
                point["prefix_tokens"]: point for point in done["lengths"] if point["prefix_tokens"] not in points
            }
    rows = [row_of(points[length]) for length in sorted(set(options.prefix_tokens))]
    command = shlex.join(["python", *sys.argv])
    if options.json:
        print(json.dumps({"command": command, "machine": facts, "lengths": rows}))
    else:
        show(rows, facts, command)
    return 0


def demo(length: int) -> dict[str, Any] | None:
    """The demo's own JSON; None if it could not run (it has said why on stderr)."""
    command = [sys.executable, "-c", "from kvtier.cli.main import main; main()"]
    done = subprocess.run(
        [*command, "demo", "--prefix-tokens", str(length), "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return None
    return None if "error" in found else found


def row_of(point: dict[str, Any]) -> dict[str, Any]:
    """Seconds are CPU seconds of all threads."""
    return {
        "prefix_tokens": point["prefix_tokens"],
        "cold_s": point["ttft_cold_s"],
        "restored_s": point["ttft_restored_s"],
        "floor_s": point["ttft_floor_s"],
        "load_s": point["load_s"],
        "count": point["count"],
        "tokens_identical": point["tokens_identical"],
        "speedup": point["speedup"],
        "speedup_target": SPEEDUP_TARGETS.get(point["prefix_tokens"]),
        "restored_over_floor": point["restored_over_floor"],
        "restored_over_floor_target": FLOOR_TARGET,
    }


def show(rows: list[dict[str, Any]], facts: dict[str, Any], command: str) -> None:
    title = "CPU seconds to the first token, medians"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for name in ("prefix", "cold", "restored", "load", "floor", "c/r", "target", "r/f", "target", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        wanted = row["speedup_target"]
        table.add_row(
            str(row["prefix_tokens"]),
            *(f"{row[name]:.3f}" for name in ("cold_s", "restored_s", "load_s", "floor_s")),
            f"{row['speedup']:.1f}",
            f">= {wanted:g}" if wanted else "",
            f"{row['restored_over_floor']:.2f}",
            f"<= {FLOOR_TARGET:g}",
            "yes" if row["tokens_identical"] else "NO",
        )
    console = Console()
    console.print(table)
    for line in (
        f"{rows[0]['count']} prompts each; c/r: cold / restored (load included), r/f: restored / floor, same: tokens",
        machine_line(facts),
        f"$ {command}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
