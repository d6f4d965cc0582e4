"""What several tiers found, for people. Owns no state. Units: percent, seconds; GB are 10**9 bytes."""

from collections.abc import Sequence

from rich.console import Console

from kvtier.cli.paper import print_whole
from kvtier.cli.simulate.tables import percent, table_of
from kvtier.sim.report import BUSY, Growth, ReplayReport


def show_replay(console: Console, report: ReplayReport, growths: Sequence[Growth]) -> None:
    """One run: a row for each tier, and what was measured of the whole."""
    title = f"Policy {report.policy}: found in each tier"
    names = ["blocks", "prefix\n%", "blocks\n%", "read\nGB", "written\nGB", "evicted", "dropped", "GB/day", "wear/day"]
    more = {growth.tier: growth for growth in growths}
    table = table_of(title, ["tier"], [*names, *(["+1 GB\nprefix %"] if more else [])])
    for tier in report.tiers:
        wear = tier.written_bytes_per_day, tier.capacities_per_day
        table.add_row(
            tier.name,
            str(tier.capacity_blocks),
            percent(tier.prefix_hit_rate),
            percent(tier.block_hit_rate),
            _giga(tier.read_bytes),
            _giga(tier.written_bytes),
            str(tier.evicted),
            str(tier.dropped),
            "" if wear[0] is None else _giga(wear[0]),
            "" if wear[1] is None else f"{wear[1]:.2f}x",
            *([f"{100 * more[tier.name].gain_per_gb:+.3f}"] if more else []),
        )
    print_whole(console, table)
    for line in _sentences(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()


def _sentences(report: ReplayReport) -> list[str]:
    bound = "" if report.optimum_hit_rate is None else f" (at most {percent(report.optimum_hit_rate)} % possible)"
    lines = [
        f"prefix tokens found: {percent(report.prefix_hit_rate)} %{bound}; time to first token: "
        f"{_seconds(report.ttft_p50_s)} at the median, {_seconds(report.ttft_p99_s)} at 99 %; moved "
        f"{_giga(report.moved_bytes)} GB"
    ]
    if report.declined_tokens:
        lines.append(f"computed although found, for that was faster: {report.declined_tokens} tokens")
    lines += [
        f"not written to {tier.name}, as its admission and wear budget have it: {tier.not_admitted} blocks"
        for tier in report.tiers
        if tier.not_admitted
    ]
    if report.hinted:
        lines.append(
            f"with hints: {report.hinted}; said: {report.hints}; "
            f"ends of sessions that came back: {report.ends_wrong}; ends not believed: "
            f"{report.distrusted_hints}"
        )
    if report.uncached:
        lines.append(f"served without the cache, for the fastest tier is too small: {report.uncached} requests")
    if report.busy >= BUSY:
        lines.append(f"the engine computed {100 * report.busy:.0f} % of the time: requests wait for it, not for KV")
    return lines


def _giga(length_bytes: float) -> str:
    return f"{length_bytes / 1e9:.1f}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
