"""PrefixStats: how much of what requests asked for was there. Owns its counters. Units: tokens, requests."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixStats:
    """Lookups since the counters were last taken; those of requests that had been preempted are kept apart.

    queries: tokens asked for. hits: tokens found. reset: all prefixes were forgotten meanwhile.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    def record(self, query_tokens: int, hit_tokens: int, preempted: bool) -> None:
        """Count one lookup."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += query_tokens
            self.preempted_hits += hit_tokens
        else:
            self.requests += 1
            self.queries += query_tokens
            self.hits += hit_tokens
