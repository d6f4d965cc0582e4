"""What a simulation with several tiers found, in figures.

Owns no state. Always: shares are of the trace's input tokens or blocks; a tier's part is what lay there when the
request's turn came. Figures of disks are per day of the trace's own time. Units: tokens, blocks, bytes, seconds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from kvtier.cache.level import Level
from kvtier.policies.belady import belady_by_request
from kvtier.sim.replay import Observed, Progress, Replay
from kvtier.sim.setup import Setup
from kvtier.sim.trace import Trace

DAY_S = 86_400
BUSY = 0.9  # above it the engine itself is what requests wait for


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier. capacity_blocks: of all groups together. evicted: copies whose place was taken, dropped: those of them
    that no tier below had; 0 in the lowest one, whose copies are not meant to go on. not_admitted: blocks that it did
    not let in, each time.

    written_bytes_per_day and capacities_per_day tell the wear of a disk; None for memory.
    """

    name: str
    capacity_blocks: int
    capacity_bytes: int
    prefix_tokens: int
    prefix_hit_rate: float
    block_hits: int
    block_hit_rate: float
    read_bytes: int
    written_bytes: int
    evicted: int
    dropped: int
    not_admitted: int
    written_bytes_per_day: float | None
    capacities_per_day: float | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One run. optimum_hit_rate: Belady's bound for one tier as large as all together; None: not asked for.

    declined_tokens: found, and computed nevertheless, for that was faster or the deadline was near. uncached: requests
    that the top tier is too small for. busy: the part of the time in which the engine computed. hinted: which hints
    were made up of the trace's future, or `recorded`; None: none. hints: said of sessions, ends_wrong: ends of those
    that came back, distrusted_hints: ends that nobody believed.
    """

    trace: str
    policy: str
    requests: int
    accesses: int
    input_tokens: int
    prefix_tokens: int
    prefix_hit_rate: float
    block_hit_rate: float
    optimum_hit_rate: float | None
    ttft_p50_s: float
    ttft_p99_s: float
    moved_bytes: int
    declined_tokens: int
    uncached: int
    busy: float
    hinted: str | None
    hints: int
    ends_wrong: int
    distrusted_hints: int
    tiers: tuple[TierReport, ...]

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """What more room in one tier brings: the hit rate with `more_bytes` added, and what that is per GB."""

    tier: str
    more_bytes: int
    prefix_hit_rate: float
    gain_per_gb: float
    ttft_p50_s: float


@dataclass(frozen=True, slots=True)
class TieredJob:
    """A run. bound: compute Belady's, too."""

    setup: Setup
    bound: bool = False

    def run(self, trace: Trace, progress: Progress | None = None) -> ReplayReport:
        """Raises ConfigError for a tier without room for a few blocks."""
        replay = Replay(trace, self.setup)
        replay.run(progress)
        report = report_of(trace, replay)
        if not self.bound:
            return report
        blocks = sum(tier.capacity_blocks for tier in report.tiers) // sum(self.setup.parts)
        return replace(report, optimum_hit_rate=optimum(trace, blocks))


def report_of(trace: Trace, run: Replay) -> ReplayReport:
    """The figures of a run that has ended."""
    observed, stats = run.observed, run.core.stats()
    tiers = tuple(
        _tier_report(trace, observed, level, stats["tiers"][level.name]) for level in run.core.residency.levels
    )
    ttft_s = sorted(observed.ttft_s)
    prefix_tokens = sum(tier.prefix_tokens for tier in tiers)
    return ReplayReport(
        trace=trace.name,
        policy=",".join(dict.fromkeys(level.policy_name for level in run.core.residency.levels)),
        requests=len(trace.requests),
        accesses=trace.accesses,
        input_tokens=trace.input_tokens,
        prefix_tokens=prefix_tokens,
        prefix_hit_rate=prefix_tokens / trace.input_tokens,
        block_hit_rate=sum(tier.block_hits for tier in tiers) / max(1, observed.blocks_asked),
        optimum_hit_rate=None,
        ttft_p50_s=_quantile(ttft_s, 0.50),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        moved_bytes=sum(tier.written_bytes for tier in tiers),
        declined_tokens=stats["declined_tokens"],
        uncached=observed.uncached,
        busy=run.prefill.busy_s / observed.end_s if observed.end_s else 0.0,
        hinted=run.hinted,
        hints=stats["hints"],
        ends_wrong=stats["ends_wrong"],
        distrusted_hints=stats["distrusted_hints"],
        tiers=tiers,
    )


def optimum(trace: Trace, blocks: int) -> float:
    """The prefix hit rate that no policy exceeds with so many blocks, if only whole blocks count. As in the product, a
    prompt's last token is computed: a last block that ends with it is stored, and not found by this prompt."""
    size = trace.block_tokens
    whole = [request.blocks[: request.tokens_in // size] for request in trace.requests]
    sought = [(request.tokens_in - 1) // size for request in trace.requests]
    return sum(found.leading for found in belady_by_request(whole, blocks, sought)) * size / trace.input_tokens


def growth(before: ReplayReport, after: ReplayReport, tier: str, more_bytes: int) -> Growth:
    """Compare a run with one whose tier is larger."""
    gained = after.prefix_hit_rate - before.prefix_hit_rate
    return Growth(tier, more_bytes, after.prefix_hit_rate, gained / (more_bytes / 1e9), after.ttft_p50_s)


def more_bytes_of(setup: Setup, tier: str) -> int:
    """By how much to enlarge a tier to see what one GB brings: a part of it that shows, and one GB at least."""
    (capacity_bytes,) = (each.capacity_bytes for each in setup.config.tiers if each.name == tier)
    return max(10**9, capacity_bytes // 16)


def _tier_report(trace: Trace, observed: Observed, level: Level, stats: dict[str, Any]) -> TierReport:
    """The writes of a disk are spread over the time from the first arrival until all has ended."""
    name, dropped, end_s = level.name, stats["dropped_dirty"] + stats["not_kept"], observed.end_s
    per_day = stats["written_bytes"] / end_s * DAY_S if level.persistent and end_s else None
    return TierReport(
        name=name,
        capacity_blocks=level.policy_blocks,
        capacity_bytes=stats["capacity_bytes"],
        prefix_tokens=observed.tokens[name],
        prefix_hit_rate=observed.tokens[name] / trace.input_tokens,
        block_hits=observed.blocks[name],
        block_hit_rate=observed.blocks[name] / max(1, observed.blocks_asked),
        read_bytes=stats["read_bytes"],
        written_bytes=stats["written_bytes"],
        evicted=stats["reclaimed"] + stats["evicted"] + dropped,
        dropped=dropped,
        not_admitted=stats["not_admitted"],
        written_bytes_per_day=per_day,
        capacities_per_day=None if per_day is None else per_day / stats["capacity_bytes"],
    )


def _quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return ascending[max(0, ceil(share * len(ascending)) - 1)] if ascending else 0.0
