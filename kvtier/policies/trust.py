"""`Trust`: whether it pays to believe those who say that a session has ended.

Owns: counts of turns with and without such a hint, and of the returns after them. A hint is worth something if sessions
return more rarely after it than after a turn about which nothing was said; if they do so half as often, or less, it is
believed. So a source that is mostly right is believed, one that guesses is not, be returns frequent or rare.
Always:  both begin with a few turns that nobody saw, after which hints are believed, and old ones fade.
Units:   turns; a turn is one request of a session.
"""

_SEEN_BEFORE = 20.0  # turns of each kind
_RETURNED_BEFORE = 10.0  # of those without a hint; after a hint one
_TURNS_MAX = 2000.0  # then all counts are halved
_RATIO = 0.5


class Trust:
    """Hears of each turn's end, and of each return."""

    def __init__(self) -> None:
        self._turns = {False: _SEEN_BEFORE, True: _SEEN_BEFORE}  # by whether the end of the session was hinted
        self._returns = {False: _RETURNED_BEFORE, True: 1.0}

    def turned(self) -> None:
        """A turn is over, and nothing is said yet."""
        self._count(False)

    def ended(self, turned: bool) -> None:
        """After a turn, counted already (`turned`) or not, the session is said to have ended."""
        self._turns[False] -= turned
        self._count(True)

    def returned(self, ended: bool) -> None:
        """A session came back after such a turn."""
        self._returns[ended] += 1

    def _count(self, ended: bool) -> None:
        self._turns[ended] += 1
        if self._turns[ended] > _TURNS_MAX:
            for counts in (self._turns, self._returns):
                counts[ended] /= 2

    @property
    def believes(self) -> bool:
        """Whether hints are worth acting on."""
        turns, returns = self._turns, self._returns
        return returns[True] * turns[False] <= _RATIO * returns[False] * turns[True]
