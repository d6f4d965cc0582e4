"""PrefixWindow: the hit rate of the latest requests, which a rate since the start hides more and more.

Owns: the updates that the window covers, and their sums.
Always:  the sums are those of the updates; unless there is only one, they hold `requests_max` requests or fewer.
Units:   requests, tokens.
"""

from collections import deque

from kvtier.cache.prefix_stats import PrefixStats
from kvtier.errors import UsageError


class PrefixWindow:
    """Feed it what `KVCacheManager.take_stats` gives, after each step or less often.

    requests, queries, hits: of the window; the latter two in tokens asked for and tokens found.
    """

    def __init__(self, requests_max: int = 1000) -> None:
        """Raises UsageError for a window that holds no request."""
        if type(requests_max) is not int or requests_max < 1:
            raise UsageError(f"requests_max is {requests_max!r}; give a number of requests from 1 on")
        self.requests_max = requests_max
        self.requests = self.queries = self.hits = 0
        self._updates: deque[tuple[int, int, int]] = deque()

    @property
    def hit_rate(self) -> float:
        """The share of the tokens asked for that was found, 0 to 1; 0 as long as none was asked for."""
        return self.hits / self.queries if self.queries else 0.0

    def observe(self, stats: PrefixStats) -> None:
        """Add an update; the oldest ones leave whole, but the newest stays however many requests it has.

        A reset empties the window first. Lookups of preempted requests do not count: they find what they left behind.
        An update without others is no update, so that idle steps push nothing out.
        """
        if stats.reset:
            self.clear()
        if not stats.requests:
            return
        self._add((stats.requests, stats.queries, stats.hits), 1)
        self._updates.append((stats.requests, stats.queries, stats.hits))
        while self.requests > self.requests_max and len(self._updates) > 1:
            self._add(self._updates.popleft(), -1)

    def clear(self) -> None:
        """As new."""
        self.requests = self.queries = self.hits = 0
        self._updates.clear()

    def _add(self, update: tuple[int, int, int], sign: int) -> None:
        requests, queries, hits = update
        self.requests += sign * requests
        self.queries += sign * queries
        self.hits += sign * hits
