"""One run of `kvtier bench nvme`, stage by stage, and what came out of it.

Owns: the volume while it runs, and the figures. Always: a stage's files are gone before the next one begins, so that
the run fits on a small disk. Units: blocks, bytes; GB are 10**9 bytes.
"""

import asyncio
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier.cli.bench import host, lag
from kvtier.cli.bench.folder import emptied
from kvtier.cli.bench.nvme import churn, gets, lookups, records
from kvtier.cli.bench.nvme.goals import BY_NAME, GOALS, judged
from kvtier.cli.bench.nvme.plan import Plan, Shape
from kvtier.cli.bench.nvme.puts import FILES, RAW, Stand, ratio
from kvtier.cli.bench.nvme.volume import Volume, volume
from kvtier.cli.bench.report import Cost, Report
from kvtier.cli.paper import new_table, print_whole

HOST_BLOCK_BYTES = 360 * 1024

Figures = dict[str, float]


@dataclass(slots=True)
class Findings:
    """A report, and the figures that have goals."""

    report: Report
    figures: Figures

    def record(self) -> dict[str, Any]:
        """For programs: figures by name, then what they were made of."""
        return {**self.figures, "goals": judged(self.figures), **self.report.record()}

    def show(self, console: Console) -> None:
        """For people: every figure beside its goal, then the races."""
        table = new_table("kvtier bench nvme")
        table.title_justify = "left"
        for column, justify in (("", "left"), ("measured", "right"), ("target", "left"), ("met", "left")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for goal in GOALS:
            figure = f"{self.figures[goal.name]:.3f}{' ' if goal.unit else ''}{goal.unit}"
            table.add_row(f"{goal.name}\n  {goal.what}", figure, goal.bound, "yes" if goal.met(self.figures) else "NO")
        print_whole(console, table)
        self.report.show(console)


def measure(path: Path | None, plan: Plan, *, fresh: bool, say: Callable[[str], None]) -> Findings:
    """Run every stage. `fresh`: on a new filesystem where that can be had. `say` hears what is measured now.

    Raises UsageError if the disk cannot be measured. Nothing that was written stays.
    """
    report = Report("nvme", asdict(plan), path or Path.cwd())
    figures: Figures = {}
    say("making a filesystem")
    with volume(path, plan.image_bytes, fresh) as place:
        report.notes.append(place.note)
        for stage in (_large, _middle, _small, _churn, _records, _lookups, _lag):
            say(f"measuring: {stage.__name__.strip('_')}")
            with emptied(place.folder / "stage") as folder:
                figures |= stage(folder, plan, report, place)
    say("measuring: host")
    figures |= _host(plan, report)
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    report.notes.append(f"load of the machine at the end: {load}; durability {plan.durability}, checksums on")
    return Findings(report, {name: figures[name] for name in BY_NAME})


# ---------------------------------------------------------------- stages, in their order


def _large(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    with ExitStack() as undo:
        stand, figures = _put(folder, plan, plan.large, report, undo, "2m")
        figures["put_2m_vs_raw"] = ratio(report.races[-1], RAW)
        race, found = gets.whole_batches(folder, plan, stand, undo)
        report.races.append(race)
    return figures | found


def _middle(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    with ExitStack() as undo:
        return _put(folder, plan, plan.middle, report, undo, "360k")[1]


def _small(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    with ExitStack() as undo:
        stand, figures = _put(folder, plan, plan.small, report, undo, "64k")
        figures["put_64k_vs_raw"] = ratio(report.races[-1], RAW)
        race, found = gets.scattered(plan, stand)
        report.races.append(race)
    return figures | found


def _put(folder: Path, plan: Plan, shape: Shape, report: Report, undo: ExitStack, size: str) -> tuple[Stand, Figures]:
    stand = Stand(folder, plan, shape, undo)
    race = stand.race(plan.rounds)
    report.races.append(race)
    return stand, {f"put_{size}_vs_files": ratio(race, FILES)}


def _churn(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    race, figures = churn.measure(folder, plan)
    report.races.append(race)
    return figures


def _records(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    race, figures = records.measure(place, folder, plan)
    report.races.append(race)
    counted = "the device's count" if place.device else "the kernel's count for this process"
    report.notes.append(f"write_amplification and cpu_vs_entries: {plan.records:,} blocks; bytes written: {counted}")
    return figures


def _lookups(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    target_ms = BY_NAME["lookup_ms_per_1000"].target
    costs, figures = lookups.measure(folder, plan.lookup_blocks, plan.rounds, target_ms)
    report.costs += costs
    return figures


def _lag(folder: Path, plan: Plan, report: Report, place: Volume) -> Figures:
    lags = asyncio.run(lag.measure(folder, plan.lag_blocks, plan.lag_rounds))
    target_ms = BY_NAME["loop_lag_ms"].target
    report.costs.append(Cost("p99 of the loop's lag, idle", "ms", lags.idle_p99_ms))
    report.costs.append(Cost("p99 of the loop's lag, putting, above idle", "ms", lags.above_ms, target_ms))
    return {"loop_lag_ms": statistics.median(lags.above_ms)}


def _host(plan: Plan, report: Report) -> Figures:
    found = host.measure(HOST_BLOCK_BYTES, plan.host_blocks, plan.rounds, with_torch=False)
    (race,) = [race for race in found.races if race.what == "host -> gpu, scattered"]
    report.races.append(race)
    return {
        "host_warm_get": race.gbs("kvtier")["median"],
        "host_warm_get_vs_memcpy": ratio(race, "memmove"),
    }
