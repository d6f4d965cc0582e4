"""Circuit breakers: a persistent tier that fails or hangs is left out of lookups until a probe has come back from it.

    CLOSED --failures in a row, or a read hangs--> OPEN --its pause is over--> HALF_OPEN --a read succeeds--> CLOSED
                                                    ^                              |
                                                    +---------- it fails ----------+

Owns: the state of every tier's breaker, and which tiers the directory bypasses. Always: while a breaker is not CLOSED
no lookup counts on that tier and no new load starts there but the probe, which brings up one block for nobody; a read
that was under way when it opened says nothing about the tier's health, however it ends. Stores have their own pause
(`Level.blocked_until_s`): a disk that is full may still be read.

Units: seconds of the engine's clock, batches.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import inf

from kvtier.cache.residency import Residency
from kvtier.engine.flight import Flight
from kvtier.engine.promotion import Promotions

FAILURES_MAX = 3  # batches that failed as a whole, in a row
HUNG_S = 5.0  # a batch is a few MiB: a disk that takes longer is no help to anybody
OPEN_FIRST_S = 1.0
OPEN_LAST_S = 60.0
PROBED_MAX = 8  # blocks of which one should find a slot to be brought into


class Circuit(Enum):
    """State of a breaker, by the usual names."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Breaker:
    circuit: Circuit = Circuit.CLOSED
    failures: int = 0
    open_s: float = OPEN_FIRST_S  # how long the next pause is
    until_s: float = 0.0  # end of this one
    probed_from_s: float = inf  # reads that started earlier don't count


class Breakers:
    """Told of every load that ended; asked on every plan."""

    def __init__(self, residency: Residency, flight: Flight, promotions: Promotions) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._flight = flight
        self._promotions = promotions
        self._breakers = {tier: _Breaker() for tier in residency.orders}
        self._newly_open: list[int] = []

    def circuit(self, tier: int) -> Circuit:
        """CLOSED for memory, which has none."""
        return self._breakers[tier].circuit if tier in self._breakers else Circuit.CLOSED

    def ended(self, tier: int, since_s: float, now_s: float, *, failed: bool) -> None:
        """A load from `tier` that started at `since_s` was acknowledged; `failed`: wholly, by the device's fault."""
        breaker = self._breakers.get(tier)
        if breaker is None:
            return
        if breaker.circuit is not Circuit.CLOSED and since_s < breaker.probed_from_s:
            return
        if not failed:
            self._breakers[tier] = _Breaker()
            self._bypass()
            return
        breaker.failures += 1
        if breaker.failures >= FAILURES_MAX or breaker.circuit is Circuit.HALF_OPEN:
            self._open(tier, now_s)

    def newly_open(self) -> list[int]:
        """Tiers that opened since the last call: nobody should wait for their loads."""
        opened, self._newly_open = self._newly_open, []
        return opened

    def watch(self, now_s: float) -> None:
        """Open what hangs, and probe what has been left alone for long enough."""
        for tier, breaker in self._breakers.items():
            oldest_s = self._flight.oldest_load_s(tier)
            hangs = oldest_s is not None and oldest_s <= now_s - HUNG_S
            if hangs and breaker.circuit is not Circuit.OPEN:
                self._open(tier, now_s)
            if breaker.circuit is Circuit.OPEN and now_s >= breaker.until_s and not hangs:
                self._probe(tier, breaker, now_s)

    def wake_at_s(self) -> float | None:
        """When a load begins to hang, or a pause is over."""
        times = []
        for tier, breaker in self._breakers.items():
            oldest_s = self._flight.oldest_load_s(tier)
            if breaker.circuit is not Circuit.OPEN:
                times += [] if oldest_s is None else [oldest_s + HUNG_S]
            elif oldest_s is None:  # else it still hangs, and its end will wake us
                times.append(breaker.until_s)
        return min(times, default=None)

    # ------------------------------------------------------------ inside

    def _open(self, tier: int, now_s: float) -> None:
        breaker = self._breakers[tier]
        breaker.circuit = Circuit.OPEN
        breaker.until_s = now_s + breaker.open_s
        breaker.open_s = min(2 * breaker.open_s, OPEN_LAST_S)
        breaker.probed_from_s = inf
        self._residency.counters.add_tier(tier, "breaker_opened")
        self._newly_open.append(tier)
        self._bypass()

    def _bypass(self) -> None:
        circuits = {tier: breaker.circuit for tier, breaker in self._breakers.items()}
        self._directory.bypassed = frozenset(t for t, circuit in circuits.items() if circuit is not Circuit.CLOSED)
        self._promotions.halted = frozenset(t for t, circuit in circuits.items() if circuit is Circuit.OPEN)

    def _probe(self, tier: int, breaker: _Breaker, now_s: float) -> None:
        """Let one block come up. Where none can, the next request is the probe: one more failure opens it again."""
        breaker.circuit = Circuit.HALF_OPEN
        breaker.probed_from_s = now_s
        below = (handle for handle in self._directory.ready_in(tier) if self._directory.top(handle) == tier)
        if not any(self._promotions.sample(handle, tier) for handle in islice(below, PROBED_MAX)):
            breaker.circuit = Circuit.CLOSED
            breaker.failures = FAILURES_MAX - 1
        self._bypass()
