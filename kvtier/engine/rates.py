"""How fast each way between two tiers has been lately.

Owns: for each lane (source, target) what is under way on it and the latest samples; for each tier what an earlier
process has found, which counts until there is something newer. A sample is what one acknowledged batch brought, over
the time in which the lane was busy with it; so several batches side by side count with what they achieve together.
Always: what was measured long before the newest sample does not count, for the world may have changed; and a lane on
which nothing arrives gets slower with every second that passes.

Units: bytes, seconds of the engine's clock.
"""

from collections import deque
from dataclasses import dataclass, field

Lane = tuple[int, int]

SAMPLES_MAX = 8
STALE_S = 10.0


@dataclass(slots=True)
class _Way:
    underway_bytes: int = 0
    busy_since_s: float = 0.0  # since then nothing has arrived, while something was under way
    measured_at_s: float = 0.0
    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def seconds_per_byte(self, now_s: float) -> float | None:
        """None if nothing was measured yet."""
        if not self.samples:
            return None
        return max(self.stuck_per_byte(now_s), self.sampled())

    def sampled(self) -> float:
        """Of the samples; there must be one."""
        return sum(seconds for _, seconds in self.samples) / sum(count for count, _ in self.samples)

    def stuck_per_byte(self, now_s: float) -> float:
        """At least so long, as nothing of what is under way has arrived."""
        return (now_s - self.busy_since_s) / self.underway_bytes if self.underway_bytes else 0.0


class Rates:
    """Told of every batch with transfers; answers how long more of them would take."""

    def __init__(self) -> None:
        self._ways: dict[Lane, _Way] = {}
        self._earlier: dict[int, float] = {}  # tier -> seconds per byte read from it

    def found(self, tier: int, seconds_per_byte: float) -> None:
        """So fast an earlier process has read this tier."""
        self._earlier[tier] = seconds_per_byte

    def read_from(self, tier: int) -> float | None:
        """Seconds per byte read from a tier, as last measured by anyone; None if it never was."""
        ways = [way for (source, target), way in self._ways.items() if source == tier > target and way.samples]
        latest = max(ways, key=lambda way: way.measured_at_s, default=None)
        return self._earlier.get(tier) if latest is None else latest.sampled()

    def departed(self, lane: Lane, length_bytes: int, now_s: float) -> None:
        """A batch was started."""
        way = self._ways.setdefault(lane, _Way())
        if not way.underway_bytes:
            way.busy_since_s = now_s
        way.underway_bytes += length_bytes

    def arrived(self, lane: Lane, length_bytes: int, now_s: float, *, done: bool) -> None:
        """It was acknowledged; a failed one says nothing about speed."""
        way = self._ways[lane]
        way.underway_bytes -= length_bytes
        seconds, way.busy_since_s = now_s - way.busy_since_s, now_s
        if done and length_bytes:
            if now_s - way.measured_at_s > STALE_S + seconds:
                way.samples.clear()
            way.samples.append((length_bytes, seconds))
            way.measured_at_s = now_s

    def seconds_per_byte(self, lane: Lane, now_s: float) -> float | None:
        """None as long as nothing has arrived on this lane."""
        way = self._ways.get(lane)
        return None if way is None else way.seconds_per_byte(now_s)

    def stuck_per_byte(self, lane: Lane, now_s: float) -> float:
        """A lower bound, also before anything has arrived: since when what is under way is waited for."""
        way = self._ways.get(lane)
        return 0.0 if way is None else way.stuck_per_byte(now_s)

    def underway_bytes(self, lane: Lane) -> int:
        way = self._ways.get(lane)
        return 0 if way is None else way.underway_bytes

    def measured_at_s(self, lane: Lane) -> float | None:
        """When something arrived last; None if nothing has."""
        way = self._ways.get(lane)
        return way.measured_at_s if way is not None and way.samples else None
