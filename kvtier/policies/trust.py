"""`Trust`: whether it pays to believe those who say that a session has ended.

Owns: counts of turns with and without such a hint, and of the returns after them. A hint is worth something if sessions
return more rarely after it than after a turn about which nothing was said; if they do so half as often, or less, it is
believed. So a source that is mostly right is believed, one that guesses is not, be returns frequent or rare.
Always:  both begin with a few turns that nobody saw, which never fade, and after which hints are believed; of the
         others old ones do. A turn is taken away with the weight that it has by then, so that no count falls below 0.
Units:   turns; a turn is one request of a session.

A return counts in full, however old its turn is: where turns come and go at one pace, as many come back as should, also
if thousands of others lie between. So a burst of them may be more than the turns that are counted: that is all of them.
"""

from typing import NewType

Turn = NewType("Turn", int)  # how often turns without a hint had been halved when it was counted

_SEEN_BEFORE = 20.0  # turns of each kind
_RETURNED_BEFORE = {False: 10.0, True: 1.0}  # of these
_TURNS_MAX = 2000.0  # then all counts of a kind are halved
_RATIO = 0.5


class Trust:
    """Hears of each turn's end, and of each return."""

    def __init__(self) -> None:
        self._turns = {False: 0.0, True: 0.0}  # by whether the end of the session was hinted
        self._returns = {False: 0.0, True: 0.0}
        self._halvings = {False: 0, True: 0}

    def turned(self) -> Turn:
        """A turn is over, and nothing is said yet."""
        turn = Turn(self._halvings[False])
        self._count(False)
        return turn

    def ended(self, turn: Turn | None) -> None:
        """A session is said to have ended after this turn. None: after one that is not counted yet."""
        if turn is not None:
            self._turns[False] -= 0.5 ** (self._halvings[False] - turn)
        self._count(True)

    def returned(self, ended: bool) -> None:
        """A session came back after such a turn."""
        self._returns[ended] += 1

    def _count(self, ended: bool) -> None:
        self._turns[ended] += 1
        if self._turns[ended] > _TURNS_MAX:
            self._halvings[ended] += 1
            for counts in (self._turns, self._returns):
                counts[ended] /= 2

    @property
    def believes(self) -> bool:
        """Whether hints are worth acting on."""
        return self._returning(True) <= _RATIO * self._returning(False)

    def _returning(self, ended: bool) -> float:
        """The share of such turns after which the session comes back."""
        return min(1.0, (_RETURNED_BEFORE[ended] + self._returns[ended]) / (_SEEN_BEFORE + self._turns[ended]))
