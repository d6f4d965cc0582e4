"""What was replayed, and what one tier found, for people. Owns no state. Units: percent."""

from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from kvtier.cli.paper import new_table, print_whole
from kvtier.sim.flat import BELADY, ORDERS, FlatJob, FlatRun
from kvtier.sim.trace import Trace


def show_trace(console: Console, trace: Trace) -> None:
    """What is replayed."""
    span = timedelta(seconds=round(trace.span_s))
    console.print(
        f"{trace.name}: {len(trace.requests)} requests in {span}, {trace.accesses} blocks of {trace.block_tokens} "
        f"tokens, {trace.unique_blocks} of them different",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def show_flat(console: Console, trace: Trace, runs: Sequence[FlatRun]) -> None:
    """A row for each policy, two columns for each size."""
    sizes = sorted({run.job.blocks for run in runs})
    table = table_of("Found in one tier: % of prefix tokens (% of blocks)", ["policy"], [f"{n}\nblocks" for n in sizes])
    for policy in dict.fromkeys(run.job.policy for run in runs):
        cells = {run.job.blocks: run for run in runs if run.job.policy == policy}
        table.add_row(policy, *(_flat_cell(trace, cells[size]) for size in sizes))
    print_whole(console, table)
    if told := unusual(runs[0].job):
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    if any(run.job.policy == BELADY for run in runs):
        console.print("belady: the most that any policy could find, with the future known", highlight=False)


def unusual(job: FlatJob) -> str:
    """How runs differ from the usual ones."""
    flat, hinted = job.order != ORDERS[0], job.hints is not None
    return ", ".join(["in flat order"] * flat + [f"with hints: {job.hints}"] * hinted)


def _flat_cell(trace: Trace, run: FlatRun) -> str:
    return (
        f"{percent(run.found.prefix_tokens / trace.input_tokens)} ({percent(run.found.hits / max(1, trace.accesses))})"
    )


def percent(share: float) -> str:
    """With one decimal."""
    return f"{100 * share:.1f}"


def table_of(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table: columns that begin on the left, then figures."""
    table = new_table(title)
    table.title_justify = "left"
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
