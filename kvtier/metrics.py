"""Counters of what happened, each with its denominator, per tier where it is a tier's.

Owns plain integers; reading them never changes them. A counter only grows.
"""

from collections.abc import Sequence

ENGINE_COUNTERS = (
    "lookups",  # match calls
    "lookup_tokens",  # tokens asked for by match
    "hit_tokens",  # tokens found by match
    "reserves",  # leases asked for
    "no_room",  # of these, refused
    "restored_tokens",  # tokens that leases could use without computing
    "deadline_cuts",  # leases that did not wait for the rest of their prefix
    "failed_cuts",  # leases whose prefix was cut by a failed load
    "declined_tokens",  # found, and not loaded because computing them is faster or the deadline is too near
    "declined_loads",  # leases for which nothing was loaded for that reason
    "cut_loads",  # leases for which a part was
    "breaker_cuts",  # leases that did not wait for a tier that began to fail or hang
    "prefill_saved_ms",  # computing that restored tokens made unnecessary, as far as its speed is known
    "committed_blocks",
    "duplicate_blocks",  # committed while the key had a copy already
    "stale_commits",  # not published: the weights had changed under the lease
    "prefetched_blocks",  # brought up for a hint: each is one of the next three, or still waits for its request
    "prefetch_useful",  # in memory when a reservation came for them
    "prefetch_late",  # still under way then
    "prefetch_wasted",  # nobody came in time, or the load failed
    "prefetch_refused",  # hints that budget, slots or lookahead did not let be worked for as a whole
    "hints",  # said of sessions
    "unknown_sessions",  # of these, about sessions that nobody has named lately
    "ends_wrong",  # sessions that came back though they were said to have ended
    "distrusted_hints",  # ends that no policy was told, for too many were wrong before
    "sessions_forgotten",  # for want of room, the quietest first
    "traced_requests",  # handed to the recorder
    "traces_lost",  # of these, those that it could not write
    "matches_expired",
    "sleeps",  # times the fastest tier's memory was to go
    "slept_dropped",  # blocks that were lost by that, for the tiers below had no room
    "rewarmed_blocks",  # brought up after a wake, for nobody yet
    "rewarm_skipped",  # not brought up then: there was no free slot, or they were gone
    "late_results",  # transfers that were overtaken by a drop, reset or release
)

TIER_COUNTERS = (
    "query_tokens",  # asked for by match and not found in a faster tier
    "hit_tokens",  # of these, found here
    "restored_tokens",  # used by leases from here
    "prefill_saved_ms",  # computing that these made unnecessary
    "promoted_blocks",  # copied up into this tier
    "demoted_blocks",  # copied down into this tier
    "read_blocks",
    "read_bytes",
    "written_blocks",
    "written_bytes",
    "reclaimed",  # clean copies whose slot was reused
    "dropped_dirty",  # only copies whose slot was reused
    "not_kept",  # of blocks that the tier below had refused
    "evicted",
    "gave_way",  # of these, so that others find the disk space they were promised
    "corrupt",
    "missing",
    "scrubbed_blocks",  # checked where they lie, for nobody
    "scrubbed_bytes",
    "scrubbed_corrupt",  # of these, condemned before anybody asked for them
    "scrub_passes",  # times that all were checked
    "read_failed",
    "write_failed",
    "no_room",
    "not_admitted",  # blocks refused by its admission or its wear budget, each time
    "over_budget_bytes",  # written for a flush though the wear budget was used up
    "late",  # transfers into this tier whose block nobody wanted any more when they ended
    "quarantined",  # slots kept out of use until the end of a transfer or a lease that was overtaken
    "breaker_opened",  # times it was left alone because it failed or hung
    "no_memory",  # times it was to grow, or to wake, and there was not all the memory for it
    "hinted_blocks",  # that hints were of use for
    "ignored_hints",  # hints that its policy has no use for
    "pins_refused",  # times that a block could not be kept for a priority or a pin: the quota was used up
    "device_lost",  # copies that went with the tier's device
)


class Counters:
    """The engine's counters and those of each tier, by name; an unknown name is a KeyError."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._engine = dict.fromkeys(ENGINE_COUNTERS, 0)
        self._tiers = [dict.fromkeys(TIER_COUNTERS, 0) for _ in tiers]

    def add(self, name: str, count: int = 1) -> None:
        self._engine[name] += count

    def looked_up(self, asked_tokens: int, found_tokens: Sequence[int]) -> None:
        """A lookup of so many tokens found these, by tier, fastest first."""
        self.add("lookups")
        self.add("lookup_tokens", asked_tokens)
        self.add("hit_tokens", sum(found_tokens))
        for tier, found in enumerate(found_tokens):
            self.add_tier(tier, "query_tokens", asked_tokens)
            self.add_tier(tier, "hit_tokens", found)
            asked_tokens -= found

    def add_tier(self, tier: int, name: str, count: int = 1) -> None:
        self._tiers[tier][name] += count

    def engine(self) -> dict[str, int]:
        return dict(self._engine)

    def of_tier(self, tier: int) -> dict[str, int]:
        return dict(self._tiers[tier])
