"""Runs of `kvtier simulate` with one tier: each a policy and a size. Owns no state. Units: blocks, tokens."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from kvtier.cli.simulate import asked, progress, tables
from kvtier.cli.simulate.asked import Options
from kvtier.sim.flat import ORDERS, FlatJob, FlatRun
from kvtier.sim.jobs import run_all
from kvtier.sim.trace import Trace


def show(trace: Trace, policies: Sequence[str], order: str, options: Options, json_output: bool) -> None:
    """Run them, and print each as it ends, or all as a table. Raises UsageError for a size that is none."""
    sizes = asked.capacities_of(options, trace, asked.block_bytes_of(options, trace))
    hints = asked.hints_of(options)
    jobs = [FlatJob(policy, blocks, order, hints) for policy in policies for blocks in sizes]
    asked.check_runs(len(jobs))
    runs = []
    with progress.shown(len(trace.requests) * len(jobs)) as served:
        for run in run_all(trace, jobs, served):
            runs.append(run)
            if json_output:
                print(json.dumps(record(trace, run)), flush=True)
    if not json_output:
        console = Console()
        tables.show_trace(console, trace)
        tables.show_flat(console, trace, runs)
    if options.plot:
        from kvtier.cli.simulate import plot, plot_flat

        plot.draw(options.plot, trace, lambda axes: plot_flat.draw(axes, trace, runs), sizes)


def record(trace: Trace, run: FlatRun) -> dict[str, Any]:
    """As plain data; `cmd_simulate` says what the keys mean."""
    unusual: dict[str, Any] = {}
    if run.job.order != ORDERS[0]:
        unusual["order"] = run.job.order
    if run.job.hints and asked.uses_hints(run.job.policy):
        unusual["hinted"] = str(run.job.hints)
    return {
        "trace": trace.name,
        "policy": run.job.policy,
        "capacity_blocks": run.job.blocks,
        "accesses": trace.accesses,
        "hits": run.found.hits,
        "prefix_tokens": run.found.prefix_tokens,
        "input_tokens": trace.input_tokens,
        "prefix_hit_rate": run.found.prefix_tokens / trace.input_tokens,
        "seconds": round(run.seconds, 3),
        **unusual,
    }
