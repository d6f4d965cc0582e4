"""`Expiries`: names with a time at which something of them is over, so that nobody has to look at all to find those.

Owns: for each name its time. Always: asking costs what is over, not what is there; of times that were changed or taken
back no more are kept than a small multiple of those that hold. Units: seconds of the engine's clock.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Name = TypeVar("Name", str, int)

_STALE_MIN = 64  # so many are not worth a look


class Expiries(Generic[Name]):
    """Times by name, one for each."""

    def __init__(self) -> None:
        self._at_s: dict[Name, float] = {}
        self._queue: list[tuple[float, Name]] = []  # the earliest first; of no meaning where `_at_s` says otherwise

    def set(self, name: Name, at_s: float) -> None:
        """This is its time from now on."""
        self._at_s[name] = at_s
        heappush(self._queue, (at_s, name))
        if len(self._queue) > 2 * len(self._at_s) + _STALE_MIN:
            self._queue = [(at_s, name) for name, at_s in self._at_s.items()]
            heapify(self._queue)

    def drop(self, name: Name) -> None:
        """It has no time any more, if it had one."""
        self._at_s.pop(name, None)

    def next_s(self) -> float | None:
        """The earliest of the times; None if there is none."""
        while self._queue:
            at_s, name = self._queue[0]
            if self._at_s.get(name) == at_s:
                return at_s
            heappop(self._queue)
        return None

    def take_over(self, now_s: float) -> list[Name]:
        """Those whose time is over, the earliest first. They are forgotten."""
        over: list[Name] = []
        while self._queue and self._queue[0][0] <= now_s:
            at_s, name = heappop(self._queue)
            if self._at_s.get(name) == at_s:
                del self._at_s[name]
                over.append(name)
        return over
