"""The hints of a recording, as they stand in the file between its requests.

    {"t": seconds, "session": "name", "hint": {"ends": true}}    or returns_in_s, priority, pin, ttl_s, as `cache.hint`

Owns: the latest request of each session so far. Always: what `match` or `cache.hint` would refuse is a
ValueError that says why.
Units: seconds since the start of the recording; requests by number.
"""

from typing import Any

from kvtier.errors import UsageError
from kvtier.sim.trace import TracedHint

HINT, SESSION = "hint", "session"
FIELDS = frozenset(TracedHint._fields[3:])


class HintLines:
    """Hears of each line's session, in the order of the file; `hints` are those so far."""

    def __init__(self) -> None:
        self.hints: list[TracedHint] = []
        self._latest: dict[str, int] = {}

    def named(self, line: dict[str, Any], number: int) -> str | None:
        """Whose turn a request is; it is the trace's of this number."""
        session = line.get(SESSION)
        if session is None:
            return None
        if not isinstance(session, str):
            raise ValueError(f"{SESSION!r} is {session!r:.40}, and no text")
        self._check_name(session)
        self._latest[session] = number
        return session

    def add(self, line: dict[str, Any], at_s: float) -> None:
        """One hint."""
        session, said = line.get(SESSION), line[HINT]
        if not isinstance(session, str) or not isinstance(said, dict) or not said.keys() <= FIELDS:
            raise ValueError(f"{HINT!r} has a {SESSION!r}, and says one of {', '.join(sorted(FIELDS))}")
        self._check_name(session)
        hint = TracedHint(at_s, session, self._latest.get(session), **said)
        _check(hint)
        self.hints.append(hint)

    def _check_name(self, session: str) -> None:
        if session not in self._latest:
            from kvtier.engine.arguments import session_name  # as below

            try:
                session_name(session)
            except UsageError as error:
                raise ValueError(str(error)) from None


def _check(hint: TracedHint) -> None:
    from kvtier.engine.arguments import advice  # most traces have no hints, and need not wait for the engine's modules

    try:
        advice(hint.ends, hint.returns_in_s, hint.priority, hint.pin, hint.ttl_s)
    except UsageError as error:
        raise ValueError(str(error)) from None
