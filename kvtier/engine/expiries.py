"""`Expiries`: names with a time at which something of them is over, so that nobody has to look at all to find those.

Owns: for each name its time. Always: asking costs what is over, not what is there; of times that were changed or taken
back no more are kept than a small multiple of those that hold. Units: seconds of the engine's clock.
"""

from heapq import heapify, heappop, heappush

_STALE_MIN = 64  # so many are not worth a look


class Expiries:
    """Times by name, one for each."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._queue: list[tuple[float, str]] = []  # the earliest first; of no meaning where `_at_s` says otherwise

    def set(self, name: str, at_s: float) -> None:
        """This is its time from now on."""
        self._at_s[name] = at_s
        heappush(self._queue, (at_s, name))
        if len(self._queue) > 2 * len(self._at_s) + _STALE_MIN:
            self._queue = [(at_s, name) for name, at_s in self._at_s.items()]
            heapify(self._queue)

    def drop(self, name: str) -> None:
        """It has no time any more, if it had one."""
        self._at_s.pop(name, None)

    def take_over(self, now_s: float) -> list[str]:
        """Those whose time is over, the earliest first. They are forgotten."""
        over: list[str] = []
        while self._queue and self._queue[0][0] <= now_s:
            at_s, name = heappop(self._queue)
            if self._at_s.get(name) == at_s:
                del self._at_s[name]
                over.append(name)
        return over
