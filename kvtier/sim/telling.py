"""`Telling`: what is said of which session, and when, while a trace is replayed through the product.

    made up    from the trace's own future (`hints.Hints`): as soon as a request has been served
    recorded   what a recording holds: at its time, but not before the request that it followed has its slots, since the
               simulated engine may be slower than the recorded one was

Owns: recorded hints whose time has come before their request's turn. Always: each hint is said once, through the
product's own `hint`, which decides who hears of it and whether it is believed; made-up hints replace recorded ones.
Units: seconds of the simulated clock; requests by their number in the trace.
"""

from collections import defaultdict
from collections.abc import Callable

from kvtier.engine.hints import Advice, rank_of
from kvtier.sim.hints import Hints, Word, followers_of, sessions_of
from kvtier.sim.trace import Trace, TracedHint

SECONDS_MAX = 1e9  # noise has long tails

Say = Callable[[str, Advice, float], None]  # of a session, what, at what time


class Telling:
    """Hears of each request's turns; `recorded` is to be told to `due`, each at its time."""

    def __init__(self, trace: Trace, say: Say, hints: Hints | None = None, *, recorded: bool = True) -> None:
        """hints: are made up. recorded: pass on what the trace holds, if none are."""
        self._say = say
        self._at_s = [request.at_s for request in trace.requests]
        self._sessions = [request.session for request in trace.requests]
        self._words: list[Word] = []
        self._followers: list[int | None] = []
        if hints is not None:
            numbers = sessions_of(trace)
            self._sessions = [f"session {number}" for number in numbers]
            self._words, self._followers = [*hints.words(trace)], followers_of(numbers)
        self.recorded = trace.hints if recorded and hints is None else ()
        self._begun = bytearray(len(trace.requests))
        self._early: dict[int, list[TracedHint]] = defaultdict(list)  # by the request that is waited for

    def session(self, number: int) -> str | None:
        """Whose turn a request is, as `match` wants to know."""
        return self._sessions[number]

    def due(self, hint: TracedHint, now_s: float) -> None:
        """The time has come at which a recorded hint was said."""
        if hint.follows is None or self._begun[hint.follows]:
            self._say(hint.session, advice_of(hint), now_s)
        else:
            self._early[hint.follows].append(hint)

    def begun(self, number: int, now_s: float) -> None:
        """A request has its slots, or does without."""
        self._begun[number] = True
        for hint in self._early.pop(number, ()):
            self._say(hint.session, advice_of(hint), now_s)

    def served(self, number: int, now_s: float) -> None:
        """A request has given its slots back."""
        session = self._sessions[number]
        if not self._words or session is None:
            return
        word, follower = self._words[number], self._followers[number]
        if word.ends:
            self._say(session, Advice(ends=True), now_s)
        elif word.returns is not None and follower is not None:
            in_s = max(0.0, self._at_s[follower] - now_s) * word.returns
            self._say(session, Advice(returns_in_s=min(in_s, SECONDS_MAX)), now_s)


def advice_of(hint: TracedHint) -> Advice:
    """A recorded hint as the product takes it."""
    return Advice(hint.ends, hint.returns_in_s, rank_of(hint.priority, hint.pin), hint.ttl_s)
