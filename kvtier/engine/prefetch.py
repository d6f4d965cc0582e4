"""Announced requests: their blocks are brought up from disk before anybody reserves them.

Each hint announces one request. The first `lookahead_requests` of them are worked for, in the order of their hints;
the others wait until one of these is served or out of date. Blocks come into the lowest memory tier, and what was
brought and not yet used takes at most a part (`budget`) of its slots, and only slots that need no I/O to get.
Always: what was brought is held until a reservation uses it or its time is over, so that nothing evicts it before it
was of use (vllm#49902); every block brought is counted once as useful, late or wasted.

Units: handles, slots, requests, seconds of the engine's clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvtier.blocks.hashing import Keys
from kvtier.cache.prefix import longest_prefix
from kvtier.cache.residency import Residency
from kvtier.cache.transitions import State
from kvtier.engine.promotion import Promotions

KEPT_S = 30.0  # how long what was brought waits for its reservation
ANNOUNCED_S = 300.0  # how long a request waits for its turn
ANNOUNCED_MAX = 1024


@dataclass(slots=True, eq=False)
class _Request:
    """An announced request; `complete` once everything that can be brought for it is under way."""

    keys: Keys
    namespace: int
    expires_at_s: float
    complete: bool = False
    held: set[int] = field(default_factory=set)  # brought for it and not used yet


class Prefetch:
    """The announced requests, and the blocks that were brought for them."""

    def __init__(self, residency: Residency, promotions: Promotions, budget: float, lookahead_requests: int) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._promotions = promotions
        self._lookahead_requests = lookahead_requests
        self._waiting: deque[_Request] = deque()
        self._active: list[_Request] = []
        self._owner: dict[int, _Request] = {}  # of every handle that is held
        self._stalled_at = inf  # slots to be had when one was refused: try again when there are more
        levels = residency.levels
        self._target = sum(not level.persistent for level in levels) - 1
        from_disk = levels[-1].persistent
        self._budget = budget if from_disk else 0.0

    @property
    def _blocks_max(self) -> int:
        return int(self._budget * self._residency.levels[self._target].slots_usable)

    # ------------------------------------------------------------ what happens

    def hint(self, keys: Keys, namespace: int, now_s: float) -> None:
        """A request with these keys will come."""
        if not self._blocks_max or not self._lookahead_requests or len(self._waiting) >= ANNOUNCED_MAX:
            self._residency.counters.add("prefetch_refused")
            return
        self._waiting.append(_Request(keys, namespace, now_s + ANNOUNCED_S))
        self.advance(now_s)

    def used(self, handles: list[int]) -> None:
        """A reservation has these blocks now."""
        if not self._owner:
            return
        for handle in handles:
            if handle in self._owner:
                state = self._directory.state(handle, self._target)
                self._let_go(handle, {State.READY: "useful", State.FILLING: "late"}.get(state, "wasted"))

    def failed(self, handles: Sequence[int]) -> None:
        """Loads of these blocks have failed: what was to be kept for a request is not there."""
        for handle in handles:
            if handle in self._owner and self._directory.state(handle, self._target) is State.RECLAIMED:
                self._let_go(handle, "wasted")

    def forget(self) -> None:
        """Nobody will come for what was announced: the weights have changed."""
        self._waiting.clear()
        for request in self._active:
            self._end(request)
        self._active.clear()

    def leave(self, tier: int) -> None:
        """A tier goes to sleep: what was brought up into it for requests to come is not kept for them."""
        if tier == self._target:
            self.forget()

    def advance(self, now_s: float) -> None:
        """Let go of what nobody came for, and bring more as far as budget and slots allow."""
        for request in [r for r in self._active if r.expires_at_s <= now_s]:
            self._end(request)
        self._active = [r for r in self._active if r.held or not r.complete]
        while self._waiting and self._waiting[0].expires_at_s <= now_s:
            self._waiting.popleft()
            self._residency.counters.add("prefetch_refused")
        if len(self._owner) >= self._blocks_max or self._available() <= self._stalled_at < inf:
            return
        self._stalled_at = inf
        for request in self._active:
            if not request.complete and not self._bring(request):
                return
        while self._waiting and len(self._active) < self._lookahead_requests:
            request = self._waiting.popleft()
            request.expires_at_s = now_s + KEPT_S
            going_on = self._bring(request)
            if request.held or not request.complete:
                self._active.append(request)
            if not going_on:
                return

    def next_expiry_s(self) -> float | None:
        """When `advance` has something to let go of."""
        times = [request.expires_at_s for request in self._active]
        return min(times + [request.expires_at_s for request in list(self._waiting)[:1]], default=None)

    # ------------------------------------------------------------ inside

    def _bring(self, request: _Request) -> bool:
        """Start to bring what lies only on disk. False if neither budget nor slots are left for more."""
        prefix = longest_prefix(self._directory, request.namespace, request.keys, None)
        for handle in (h for handles in prefix.handles for h in handles):
            source = self._directory.top(handle)
            if source is None or source <= self._target:
                continue
            if any(self._directory.state(handle, tier) is not State.GONE for tier in range(self._target + 1)):
                continue  # on its way already
            if len(self._owner) >= self._blocks_max:
                return False
            if not self._promotions.bring(handle, source, self._target):
                self._stalled_at = self._available()
                return False
            self._residency.counters.add("prefetched_blocks")
            self._directory.hold([handle], self._target)
            self._owner[handle] = request
            request.held.add(handle)
        request.complete = True
        return True

    def _available(self) -> int:
        return self._residency.takeable(self._target, drop_dirty=False)

    def _end(self, request: _Request) -> None:
        self._residency.counters.add("prefetch_refused", int(not request.complete))
        request.complete = True
        for handle in list(request.held):
            self._let_go(handle, "wasted")

    def _let_go(self, handle: int, how: str) -> None:
        self._owner.pop(handle).held.discard(handle)
        self._residency.unhold([handle], self._target)
        self._residency.counters.add(f"prefetch_{how}")
