"""`Sessions`: what callers have said of their sessions, and what may come of it, told without the engine's own books.

Owns, by name: which blocks a session's latest request had, which rank was said for them, until when, and whether it was
said to have ended. Always: a copy that leaves after others has a session that says so, and whose time is not over; of a
tier they are at most its quota; a hint moves no copy, and fails nobody.

Where it cannot be told which blocks a request had (nobody has fetched its answer, or they were dropped meanwhile),
`keys` are all that they may be, and `sure` is False. Units: seconds of simulated time, copies.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.engine.hints import Advice
from kvtier.policies.lru import LRU
from kvtier.testing.exploring.engine import ExploredEngine
from kvtier.types import StoreKey


@dataclass(slots=True)
class Session:
    """One that goes on."""

    keys: set[StoreKey] = field(default_factory=set)
    sure: bool = True
    rank: int = 0
    until_s: float | None = None


class Sessions:
    """Those of one engine."""

    def __init__(self, engine: ExploredEngine) -> None:
        self._engine = engine
        self._core = engine.core
        self._living: dict[str, Session] = {}
        self._ended: set[str] = set()
        self._users: dict[StoreKey, set[str]] = {}  # who has ever named a block
        self._wrong = 0  # ends

    # ------------------------------------------------------------ requests

    def came(self, name: str | None) -> None:
        """A request of it has looked for its prefix."""
        if name is None:
            return
        self._wrong += name in self._ended
        self._ended.discard(name)
        self._living.setdefault(name, Session())
        counted = self._core.counters.engine()["ends_wrong"]
        assert counted == self._wrong, f"{self._wrong} sessions came back though they had ended, {counted} counted"

    def served(self, name: str | None, keys: Iterable[StoreKey], *, sure: bool = True) -> None:
        """A request has given back a lease with these blocks, or, if that is not sure, it may have."""
        if name is None:
            return
        keys = {*keys}
        for key in keys:
            self._users.setdefault(key, set()).add(name)
        session = self._living.get(name)
        if session is not None:
            session.keys = keys if sure else session.keys | keys
            session.sure = sure

    def known(self) -> list[str]:
        """Those that have blocks."""
        return [name for name, session in self._living.items() if session.keys]

    def passed(self, now_s: float) -> None:
        """The engine has planned at this time: what held until before it holds no more."""
        for session in self._living.values():
            if session.until_s is not None and session.until_s < now_s:
                session.rank, session.until_s = 0, None

    # ------------------------------------------------------------ hints

    def advise(self, name: str, advice: Advice, now_s: float) -> str:
        """Say it, and see what comes of it at once."""
        before, counted = self._engine.copies(), self._core.counters.engine()
        self._core.hints.advise(name, advice, now_s)
        assert self._engine.copies() == before, "a hint has moved copies"
        now = self._core.counters.engine()
        session = self._living.get(name)
        unknown = session is None and name not in self._ended
        assert now["hints"] == counted["hints"] + 1
        assert now["unknown_sessions"] == counted["unknown_sessions"] + unknown, f"{name} is known, or is not"
        if session is None:
            return "nobody knows it"
        if advice.ends:
            del self._living[name]
            self._ended.add(name)
            if now["distrusted_hints"] > counted["distrusted_hints"]:
                return "is over, which nobody believes"
            self._expect_first(name, session)
            return f"is over: {len(session.keys)} blocks"
        if advice.rank is not None:
            session.rank = advice.rank
            session.until_s = None if advice.ttl_s is None else now_s + advice.ttl_s
            self._expect_kept(session)
        return f"rank {session.rank} until {session.until_s}: {len(session.keys)} blocks"

    def _expect_first(self, name: str, session: Session) -> None:
        """Blocks that only an ended session has named leave an LRU before those that no session has.

        In memory: on disk there are those as well of which an earlier process has heard that they are over.
        """
        own = {key for key in session.keys if self._users[key] == {name}} if session.sure else set()
        directory = self._engine.directory
        for tier, policy in enumerate(self._engine.policies):
            if not own or not isinstance(policy, LRU) or tier == self._engine.disk:
                continue
            keys = [directory.key(handle) for handle in policy.candidates(len(policy))]
            first = next((place for place, key in enumerate(keys) if not self._users.get(key)), len(keys))
            late = own.intersection(keys[first:])
            assert not late, f"tier {tier}: {len(late)} blocks of a session that is over leave after others"

    def _expect_kept(self, session: Session) -> None:
        """What is to leave after others does, as far as the quota goes."""
        if session.rank <= 0 or not session.sure:
            return
        ranks, directory = self._core.residency.ranks, self._engine.directory
        handles = [handle for key in session.keys if (handle := directory.find(key)) is not None]
        for tier in range(directory.tiers):
            free = len(self._kept(tier)) < self._quota(tier)
            ready = directory.ready_among(handles, tier)
            refused = [handle for handle in ready if not ranks.keeps(handle, tier)]
            assert not (free and refused), f"tier {tier}: {len(refused)} blocks are refused within the quota"

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Nothing is kept that nobody wants kept, or beyond the quota."""
        wanted: set[StoreKey] | None = None
        directory = self._engine.directory
        for tier in range(directory.tiers):
            kept = self._kept(tier)
            if not kept:
                continue
            if wanted is None:
                wanted = {key for session in self._living.values() if session.rank > 0 for key in session.keys}
            others = [handle for handle in kept if directory.key(handle) not in wanted]
            assert not others, f"tier {tier}: {len(others)} blocks are kept for nobody"
            quota = self._quota(tier)
            assert len(kept) <= quota, f"tier {tier}: {len(kept)} blocks are kept, {quota} may"

    def _kept(self, tier: int) -> list[int]:
        keeps = self._core.residency.ranks.keeps
        return [handle for handle in self._engine.directory.ready_in(tier) if keeps(handle, tier)]

    def _quota(self, tier: int) -> int:
        level = self._core.residency.levels[tier]
        return int(self._engine.setup.pin_quota * (level.slots_usable if level.pool else level.policy_blocks))
