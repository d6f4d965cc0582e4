"""What a bench found: races between ways to move the same bytes, and costs beside their targets.

Owns no state. Always: figures are medians with their quartiles, and a ratio is one of medians (above 1: kvtier is
faster). Targets are printed, never enforced. Units: GB are 10**9 bytes; each cost names its unit.
"""

import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.cli.bench.timing import Timed, quartiles
from kvtier.cli.machine import machine, machine_line
from kvtier.cli.paper import new_table, print_whole

OURS = "kvtier"


@dataclass(frozen=True, slots=True)
class Race:
    """Several ways to move `blocks` blocks of `block_bytes`: ours (`kvtier`) and its rivals. `target`: a ratio."""

    what: str
    blocks: int
    block_bytes: int
    timed: Mapping[str, Timed]
    target: float | None = None

    def gbs(self, name: str) -> dict[str, float]:
        """Speed in GB/s: median and quartiles."""
        giga = self.blocks * self.block_bytes / 1e9
        fast_s, slow_s = self.timed[name].quartiles_s
        return {"median": giga / self.timed[name].median_s, "q1": giga / slow_s, "q3": giga / fast_s}

    def cpu_s_per_gb(self, name: str) -> float:
        return self.timed[name].cpu_median_s / (self.blocks * self.block_bytes / 1e9)

    @property
    def ratios(self) -> dict[str, float]:
        """Our speed by each rival's."""
        ours_s = self.timed[OURS].median_s
        return {name: timed.median_s / ours_s for name, timed in self.timed.items() if name != OURS}

    @property
    def best(self) -> str:
        """The fastest rival: the one that the target is about."""
        return min(self.ratios, key=self.ratios.__getitem__)

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "blocks": self.blocks,
            "block_bytes": self.block_bytes,
            "gbs": {name: self.gbs(name) for name in self.timed},
            "cpu_s_per_gb": {name: self.cpu_s_per_gb(name) for name in self.timed},
            "ratios": self.ratios,
            "best_rival": self.best,
            "ratio": self.ratios[self.best],
            "target": self.target,
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Something that should be small: every value measured, in `unit`. `target`: not above it."""

    what: str
    unit: str
    values: list[float]
    target: float | None = None

    @classmethod
    def of(cls, what: str, timed: Timed, target_ms: float | None = None) -> "Cost":
        """Wall time in milliseconds."""
        return cls(what, "ms", [seconds * 1e3 for seconds in timed.wall_s], target_ms)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def record(self) -> dict[str, Any]:
        first, third = quartiles(self.values)
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "q1": first,
            "q3": third,
            "target": self.target,
        }


@dataclass(slots=True)
class Report:
    """One run of a bench. `settings` are what was asked for, `notes` what must be known to read the figures."""

    bench: str
    settings: dict[str, Any]
    path: Path | None = None
    races: list[Race] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "command": command(),
            "machine": machine(self.path),
            "settings": self.settings,
            "races": [race.record() for race in self.races],
            "costs": [cost.record() for cost in self.costs],
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        """For people."""
        if self.races:
            print_whole(console, _races(self.races))
        if self.costs:
            print_whole(console, _costs(self.costs))
        for line in (*self.notes, machine_line(machine(self.path)), f"$ {command()}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def command() -> str:
    """What was typed."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def counted(number: int, what: str = "block") -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number} {what}{'s' * (number != 1)}"


def _races(races: list[Race]) -> Table:
    table = _table("Speed: median (quartiles)", ("", "by", "GB/s", "CPU\ns/GB", "ratio", "target"))
    for race in races:
        titles = [race.what, f"{race.blocks} x {race.block_bytes:,} B", *[""] * len(race.timed)]
        for title, name in zip(titles, race.timed, strict=False):
            speed = race.gbs(name)
            rival = name != OURS
            wanted = race.target if name == race.best else None
            table.add_row(
                title,
                name,
                f"{speed['median']:.2f} ({speed['q1']:.2f}-{speed['q3']:.2f})",
                f"{race.cpu_s_per_gb(name):.3f}",
                f"{race.ratios[name]:.2f}" if rival else "",
                "" if wanted is None else f">= {wanted:g}",
            )
        table.add_section()
    return table


def _costs(costs: list[Cost]) -> Table:
    table = _table("Costs: median (quartiles)", ("", "cost", "unit", "target"))
    for cost in costs:
        first, third = quartiles(cost.values)
        spread = "" if len(cost.values) == 1 else f" ({_figure(first)}-{_figure(third)})"
        wanted = "" if cost.target is None else f"<= {cost.target:g}"
        table.add_row(cost.what, f"{_figure(cost.median)}{spread}", cost.unit, wanted)
    return table


def _figure(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = new_table(title)
    table.title_justify = "left"
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "by", "unit") else "right", no_wrap=True)
    return table
