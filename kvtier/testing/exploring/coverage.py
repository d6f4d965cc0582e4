"""`Coverage`: which moves of a copy and which points of cancellation a set of runs has reached, what the engines
decided and went through, how often; and what they have counted.

Owns counts only; those of several runs add up. A row of the tables that no run reaches is as good as untested.
"""

from collections import Counter
from collections.abc import Iterable

from kvtier.cache.transitions import MOVES, Move, State

CANCEL_POINTS = (
    "reserve: no wait",  # it needed no transfer, and its answer was not fetched
    "reserve: queued",
    "reserve: first hop under way",
    "reserve: second hop under way",
    "reserve: joined another's promotion",
    "reserve: answered, not collected",
    "flush",
    "drop",
    "resize",
    "sleep",
    "wake",
    "prefetch",
    "match expiry",
    "store job",
    "load job",
)
DECISIONS = ("resident", "faster", "deadline", "slower", "unmeasured", "off")
EVENTS = (
    *(f"decision: {why}" for why in DECISIONS),
    "breaker: open",
    "breaker: half_open",
    "breaker: closed",  # again
    "device lost",
    "owner died with leases",
    "order noted in time",
    "hint: ends",
    "hint: rank",
    "hint: returns",
    "scrubbed: kept",
    "scrubbed: condemned",
    "streamed before it was there",
    "read in host memory",
    "slept",
    "woken",
)


class Coverage:
    """Counts by name."""

    def __init__(self) -> None:
        self.moves: Counter[str] = Counter()
        self.cancels: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()  # of the engines, summed

    def moved(self, state: State, move: Move) -> None:
        self.moves[f"{state.name} --{move.name}-->"] += 1

    def cancelled(self, point: str) -> None:
        """Raises KeyError for a point that the table does not list."""
        if point not in CANCEL_POINTS:
            raise KeyError(point)
        self.cancels[point] += 1

    def happened(self, event: str) -> None:
        """Raises KeyError for an event that the table does not list."""
        if event not in EVENTS:
            raise KeyError(event)
        self.events[event] += 1

    def add(self, other: "Coverage") -> None:
        self.moves.update(other.moves)
        self.cancels.update(other.cancels)
        self.events.update(other.events)
        self.counters.update(other.counters)

    def rows(self) -> Iterable[tuple[str, int]]:
        """Every row of both tables and its count."""
        for (state, move), after in MOVES.items():
            name = f"{state.name} --{move.name}-->"
            yield f"{name} {after.name}", self.moves[name]
        for point in CANCEL_POINTS:
            yield f"cancel: {point}", self.cancels[point]
        for event in EVENTS:
            yield event, self.events[event]

    def missed(self) -> list[str]:
        """Rows that no run reached."""
        return [name for name, count in self.rows() if not count]
