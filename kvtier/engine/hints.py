"""What the serving layer knows of its sessions, and what becomes of it: evidence for policies, and ranks.

    ends, returns_in_s   go to the policies of all tiers that have a use for them; they hold until the next touch
    priority, pin        rank the session's blocks (`cache.ranks`) until something else is said, its end, or `ttl_s`

A hint is about the blocks of the session's latest request; that it ends or returns, about those only that no other
session names. What is said while a request is being served is applied again when its lease is given back, and a rank
with every turn. Always: a hint is never an error, be its session unknown or nobody able to use it: that is counted.

Units: seconds of the engine's clock; a policy's times are accesses, for which the pace of late is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import expm1

from kvtier.cache.ranks import PINNED
from kvtier.cache.residency import Residency
from kvtier.cache.sessions import Session, Sessions, number_of
from kvtier.engine.expiries import Expiries
from kvtier.policies.base import Hint, SupportsHints
from kvtier.policies.trust import Trust
from kvtier.types import StoreKey

MOMENT_S = 1e-9  # in less than that nothing has a pace
PACE_S = 60.0  # over about so long the pace of accesses is averaged
RETURNS_IN_MAX = 1 << 40  # accesses


@dataclass(frozen=True, slots=True)
class Advice:
    """One hint. None: nothing is said of it."""

    ends: bool = False
    returns_in_s: float | None = None
    rank: int | None = None  # of `cache.ranks`; 0: none any more
    ttl_s: float | None = None  # how long the rank holds


class Hints:
    """Hears of each session's requests, and of what is said of it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._directory = residency.directory
        self._counters = residency.counters
        self._ranks = residency.ranks
        self._sessions = Sessions()
        self._trust = Trust()
        self._passing = Expiries[str]()  # of ranks that end by themselves
        self._accesses = 0  # since the pace was last taken
        self._accesses_per_s = 0.0
        self._seen = 0.0  # the weight of what was seen in that average: what was before is no traffic at pace 0
        self._now_s = 0.0

    def __len__(self) -> int:
        """Sessions that are known."""
        return len(self._sessions)

    # ------------------------------------------------------------ requests

    def came(self, name: str | None) -> None:
        """A request looks for its prefix."""
        if name is None:
            return
        before = self._sessions.find(name)
        ended = self._sessions.has_ended(name)
        self._counters.add("ends_wrong", int(ended))
        if ended or (before is not None and before.turn is not None):
            self._trust.returned(ended)
        session = self._sessions.came(name)
        session.turn, session.returns_at_s = None, None
        self._let_go_of_forgotten()

    def served(self, name: str | None, handles: Sequence[int]) -> None:
        """A request has given its lease back. handles: its blocks, deepest first."""
        self._accesses += len(handles)
        if name is None:
            return
        self._directory.note_session(handles, number_of(name))
        keys = [self._directory.key(handle) for handle in handles]
        if self._sessions.has_ended(name):  # said while it was served
            self._tell_ended([key for key in keys if not self._sessions.is_named(key)])
            return
        session = self._sessions.find(name) or self._sessions.came(name)
        if session.turn is None:  # else two leases of one turn
            session.turn = self._trust.turned()
        before, session.rank = session.rank, 0
        self._let_go(session.keys, before)
        self._sessions.turned(session, keys)
        self._rank(session, before)
        if session.returns_at_s is not None:
            self._tell_returns(session)
        self._let_go_of_forgotten()

    # ------------------------------------------------------------ hints

    def advise(self, name: str, advice: Advice, now_s: float) -> None:
        """Something is said of a session."""
        self._counters.add("hints")
        self.watch(now_s)
        session = self._sessions.find(name)
        if session is None:
            self._counters.add("unknown_sessions", int(not self._sessions.has_ended(name)))
        elif advice.ends:
            self._end(name, session)
        else:
            if advice.rank is not None:
                self._passing.drop(name)
                if advice.ttl_s is not None:
                    self._passing.set(name, now_s + advice.ttl_s)
                self._rank(session, advice.rank)
            if advice.returns_in_s is not None:
                session.returns_at_s = now_s + advice.returns_in_s
                self._tell_returns(session)

    def watch(self, now_s: float) -> None:
        """Time passes: some ranks end, and the pace is taken."""
        if now_s - self._now_s < MOMENT_S:
            return
        new = -expm1((self._now_s - now_s) / PACE_S)
        self._seen = (1 - new) * self._seen + new
        pace = self._accesses / (now_s - self._now_s)
        self._accesses_per_s += new / self._seen * (pace - self._accesses_per_s)
        self._accesses, self._now_s = 0, now_s
        for name in self._passing.take_over(now_s):
            session = self._sessions.find(name)
            assert session is not None  # who is forgotten or ends takes his time along
            self._rank(session, 0)

    # ------------------------------------------------------------ inside

    def _end(self, name: str, session: Session) -> None:
        self._passing.drop(name)
        self._rank(session, 0)
        own = self._sessions.own(session)
        self._trust.ended(session.turn)
        self._sessions.end(name)
        self._tell_ended(own)

    def _tell_ended(self, keys: Iterable[StoreKey]) -> None:
        if not self._trust.believes:
            self._counters.add("distrusted_hints")
            return
        handles, is_shared = self._known(keys), self._directory.is_shared
        self._tell([handle for handle in handles if not is_shared(handle)], Hint(ends=True))
        self._tell([handle for handle in handles if is_shared(handle)], Hint(ends=True, shared=True))

    def _tell_returns(self, session: Session) -> None:
        if session.returns_at_s is not None and self._accesses_per_s > 0 and session.turn is not None:
            accesses = max(0.0, session.returns_at_s - self._now_s) * self._accesses_per_s
            self._tell(self._known(self._sessions.own(session)), Hint(returns_in=int(min(accesses, RETURNS_IN_MAX))))

    def _known(self, keys: Iterable[StoreKey]) -> list[int]:
        return [handle for key in keys if (handle := self._directory.find(key)) is not None]

    def _tell(self, handles: Sequence[int], hint: Hint) -> None:
        for tier, level in enumerate(self._residency.levels):
            if here := self._directory.ready_among(handles, tier):
                used = level.policy.hint(here, hint) if isinstance(level.policy, SupportsHints) else 0
                self._counters.add_tier(tier, "hinted_blocks", used)
                self._counters.add_tier(tier, "ignored_hints", int(not used))

    def _rank(self, session: Session, rank: int) -> None:
        self._let_go(session.keys, session.rank)
        session.rank = rank
        # To be kept the shallow ones come first, without which the others are of no use; to leave the deep ones.
        for key in (reversed(session.keys) if rank > 0 else session.keys) if rank else ():
            self._ranks.claim(key, rank)

    def _let_go(self, keys: Iterable[StoreKey], rank: int) -> None:
        if rank:
            for key in keys:
                self._ranks.let_go(key, rank)

    def _let_go_of_forgotten(self) -> None:
        for name, session in self._sessions.evicted:
            self._counters.add("sessions_forgotten")
            self._passing.drop(name)
            self._let_go(session.keys, session.rank)
        self._sessions.evicted.clear()


def words_of(advice: Advice) -> dict[str, bool | int | float]:
    """What was said, by the names of `cache.hint`, without what nothing was said of."""
    pinned = advice.rank == PINNED
    said: dict[str, bool | int | float | None] = {
        "ends": advice.ends or None,
        "returns_in_s": advice.returns_in_s,
        "priority": None if pinned else advice.rank,
        "pin": pinned or None,
        "ttl_s": advice.ttl_s,
    }
    return {name: value for name, value in said.items() if value is not None}


def rank_of(priority: int | None, pin: bool | None) -> int | None:
    """The rank for what was said; None: nothing was."""
    if pin:
        return PINNED
    return priority if priority is not None else None if pin is None else 0
