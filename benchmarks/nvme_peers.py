"""kvtier's store beside vLLM's filesystem tier: put and cold load, GB/s and CPU.

    VLLM_PYTHON benchmarks/nvme_peers.py [--dir DIR] [--rounds 15] [--json]

To be run by a Python that has vLLM 0.32 and kvtier. Both take the same batches in turns, on a fresh ext4 where that can
be had (`kvtier bench nvme` says how). kvtier's store is full, evicts, syncs every batch and verifies what it reads;
vLLM's tier syncs nothing, verifies nothing and never evicts. Ratios are kvtier's by vLLM's, round by round, medians.
"""

import argparse
import json
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvtier.cli.bench.folder import emptied
from kvtier.cli.bench.nvme.buffers import Buffers
from kvtier.cli.bench.nvme.plan import Plan, Shape, quick
from kvtier.cli.bench.nvme.store_ring import StoreRing
from kvtier.cli.bench.nvme.volume import volume
from kvtier.cli.bench.report import OURS, Race, Report
from kvtier.cli.bench.timing import interleave, prepared, speed_ratio
from kvtier.cli.paper import new_table, print_whole

VLLM = "vLLM fs"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Speed and CPU by vLLM's: at least, and at most. None: nothing was promised."""

    speed: float
    cpu: float | None


WANTED = {  # by size and move
    "put_64k": Wanted(2.0, 1 / 5),
    "load_64k": Wanted(2.0, 1 / 3),
    "put_360k": Wanted(1.0, 1 / 2),
    "load_360k": Wanted(1.0, None),
    "put_2m": Wanted(1.0, None),
    "load_2m": Wanted(1.0, None),
}


def measure(path: Path | None, plan: Plan) -> tuple[Report, dict[str, dict[str, float]]]:
    """By size and move: `speed` and `cpu` by vLLM's. Raises UsageError if the disk cannot be measured."""
    report = Report("nvme peers", {"rounds": plan.rounds, "durability": plan.durability}, path or Path.cwd())
    figures = {}
    with volume(path, plan.image_bytes, fresh=True) as place:
        report.notes.append(place.note)
        for name, shape in (("64k", plan.small), ("360k", plan.middle), ("2m", plan.large)):
            with emptied(place.folder / name) as folder:
                for move, race in races(folder, plan, shape).items():
                    report.races.append(race)
                    figures[f"{move}_{name}"] = ratios(race)
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return report, figures


def races(folder: Path, plan: Plan, shape: Shape) -> dict[str, Race]:
    """Put, then load what was put."""
    from nvme_peers_vllm import VllmRing

    with ExitStack() as undo:
        buffers = Buffers(shape, undo)
        options = {"durability": plan.durability}
        ours = StoreRing(folder / "kvtier", shape, plan.ring_batches(shape), buffers, undo, **options)
        ours.fill()
        theirs = VllmRing(folder / "vllm", shape)
        undo.callback(theirs.close)
        put = interleave({OURS: prepared(ours.put), VLLM: prepared(theirs.put)}, plan.rounds)
        load = interleave({OURS: prepared(ours.get), VLLM: prepared(theirs.get)}, plan.rounds)
    return {move: Race(move, shape.blocks, shape.block_bytes, timed) for move, timed in (("put", put), ("load", load))}


def ratios(race: Race) -> dict[str, float]:
    ours, theirs = race.timed[OURS], race.timed[VLLM]
    cpu = statistics.median(mine / other for mine, other in zip(ours.cpu_s, theirs.cpu_s, strict=True))
    return {"speed": speed_ratio(ours, theirs), "cpu": cpu}


def show(report: Report, figures: dict[str, dict[str, float]]) -> None:
    table = new_table("kvtier by vLLM's fs tier")
    for column in ("", "speed", "target", "CPU", "target", "met"):
        table.add_column(column, no_wrap=True)
    for name, found in figures.items():
        wanted = WANTED[name]
        met = found["speed"] >= wanted.speed and (wanted.cpu is None or found["cpu"] <= wanted.cpu)
        cpu = "" if wanted.cpu is None else f"<= {wanted.cpu:.2f}"
        row = (f"{found['speed']:.2f}", f">= {wanted.speed:g}", f"{found['cpu']:.2f}", cpu, "yes" if met else "NO")
        table.add_row(name, *row)
    console = Console()
    print_whole(console, table)
    report.show(console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="on the disk to be measured (default: the current one)")
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--quick", action="store_true", help="show that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    plan = quick(Plan()) if asked.quick else Plan(rounds=asked.rounds)
    report, figures = measure(asked.dir, plan)
    if asked.json:
        print(json.dumps({**figures, **report.record()}))
    else:
        show(report, figures)


if __name__ == "__main__":
    main()
