"""Runs of `kvtier simulate` with the tiers of a configuration: each a policy for all of them, or the file's own.

Owns no state. Always: a run is followed by those in which one of its tiers is larger, if growth is asked for; the
model's weights need not be there. Units: bytes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from kvtier.cli.simulate import asked, progress, tables, tier_tables
from kvtier.cli.simulate.asked import Options
from kvtier.cli.simulate.speeds import prefill_of, speeds_of
from kvtier.config import load_config
from kvtier.sim.flat import BELADY
from kvtier.sim.jobs import run_all
from kvtier.sim.report import Growth, ReplayReport, TieredJob, growth, more_bytes_of
from kvtier.sim.setup import Setup
from kvtier.sim.trace import Trace

SIMULATED_EPOCH = {"model.weights_epoch": "simulated"}


@dataclass(frozen=True, slots=True)
class _Planned:
    """A run, and the tiers that others enlarge to be compared with it: (name, by how much)."""

    setup: Setup
    enlarged: tuple[tuple[str, int], ...]

    def jobs(self, bound: bool) -> list[TieredJob]:
        larger = [TieredJob(self.setup.with_more(tier, more_bytes)) for tier, more_bytes in self.enlarged]
        return [TieredJob(self.setup, bound), *larger]

    def compared(self, results: Iterator[ReplayReport]) -> tuple[ReplayReport, list[Growth]]:
        """The run's own result, and what those behind it tell of more room."""
        report = next(results)
        return report, [growth(report, next(results), tier, more_bytes) for tier, more_bytes in self.enlarged]


def show(trace: Trace, policies: Sequence[str], file: Path, options: Options, json_output: bool) -> None:
    """Run them, and print each as it ends. Raises ConfigError, UsageError for what cannot be simulated."""
    planned = _planned(trace, policies, file, options)
    jobs = [job for each in planned for job in each.jobs(BELADY in policies)]
    asked.check_runs(len(jobs))
    reports: list[ReplayReport] = []
    console = Console()
    if not json_output:
        tables.show_trace(console, trace)
    with progress.shown(len(trace.requests) * len(jobs)) as served:
        results = run_all(trace, jobs, served)
        for each in planned:
            report, growths = each.compared(results)
            reports.append(report)
            if json_output:
                print(json.dumps(report.record() | {"growth": [asdict(each) for each in growths]}), flush=True)
            else:
                tier_tables.show_replay(console, report, growths)
    if options.plot:
        from kvtier.cli.simulate import plot, plot_tiers

        plot.draw(options.plot, trace, lambda axes: plot_tiers.draw(axes, reports), ())


def _planned(trace: Trace, policies: Sequence[str], file: Path, options: Options) -> list[_Planned]:
    config = load_config(file, overrides=SIMULATED_EPOCH)
    speeds, prefill_tokens_per_s = speeds_of(options, config), prefill_of(options)
    hints, recorded = asked.hints_of(options), options.hints != asked.NO_HINTS
    names: list[str | None] = [name for name in policies if name != BELADY]
    planned = []
    for name in names or [None]:
        setup = Setup(
            config, trace.block_tokens, name, speeds, prefill_tokens_per_s, hints=hints, recorded_hints=recorded
        )
        setup.tiers()  # refuses at once what cannot be
        enlarged = [(tier.name, more_bytes_of(setup, tier.name)) for tier in config.tiers] if options.growth else []
        planned.append(_Planned(setup, tuple(enlarged)))
    return planned
