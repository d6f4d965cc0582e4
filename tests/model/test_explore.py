"""The explorer over many seeds: no schedule of operations and faults leaves a wrong byte, a leak, or somebody waiting.

200 seeds here, 2000 in `make soak`. What fails is replayed with the command that the message shows.
"""

import pytest

from kvtier.testing import explore
from kvtier.testing.exploring.coverage import Coverage
from kvtier.testing.exploring.run import explore as run_seed

CHUNK, COUNTED = 25, 75
SOON = [range(first, first + CHUNK) for first in range(COUNTED, 200, CHUNK)]  # the first ones are run below
REACHED = (
    *("restored_tokens", "deadline_cuts", "failed_cuts", "breaker_cuts", "duplicate_blocks"),
    *("stale_commits", "late_results", "no_room", "matches_expired", "prefetched_blocks", "prefetch_useful"),
    *("prefetch_wasted", "gpu.dropped_dirty", "gpu.reclaimed", "host.reclaimed", "host.restored_tokens"),
    *("disk.restored_tokens", "disk.evicted", "disk.gave_way", "disk.corrupt", "disk.missing", "disk.read_failed"),
    *("disk.write_failed", "disk.no_room", "gpu.device_lost"),
    *("hints", "unknown_sessions", "ends_wrong", "distrusted_hints", "gpu.hinted_blocks", "host.hinted_blocks"),
    *("gpu.pins_refused", "disk.pins_refused", "gpu.not_kept", "host.not_kept", "host.not_admitted"),
    *("disk.not_admitted", "disk.over_budget_bytes", "disk.scrubbed_corrupt", "disk.scrub_passes"),
    *("sleeps", "slept_dropped", "rewarmed_blocks", "rewarm_skipped"),
)


def run(seeds):
    """Returns what they covered."""
    coverage = Coverage()
    for seed in seeds:
        result = run_seed(seed)
        at = "" if result.failed_at is None else f" --steps {result.failed_at}"
        replay = f"python -m kvtier.testing.explore --seed {seed}{at} --trace"
        assert not result.failure, f"{result.failure}\nto see it: {replay}"
        coverage.add(result.coverage)
    return coverage


@pytest.mark.parametrize("seeds", SOON, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_no_seed_fails(seeds):
    """A wrong byte, a leaked slot, a ticket without an answer or a broken invariant, in some order of events."""
    run(seeds)


def test_a_few_seeds_count_everything_that_can_go_wrong():
    """The runs no longer get to where it hurts."""
    counters = run(range(COUNTED)).counters
    assert not [name for name in REACHED if not counters[name]], counters


@pytest.mark.soak
def test_two_thousand_seeds_pass_and_reach_every_row(capsys):
    """A move of the transitions table, or a point at which one can cancel, is never tried."""
    assert explore.main(["--seeds", "0:2000", "--jobs", "2"]) == 0, capsys.readouterr().out
