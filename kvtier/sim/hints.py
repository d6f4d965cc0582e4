"""What a serving layer could have told: hints from a trace's own future, made as unreliable as one likes.

A session is a request and those that continue it: a later request continues the session that named the deepest of its
known blocks last, if those are more than half of what that session had come to. A hint comes when a request has been
served, and is about its blocks that no other session which goes on has named; of an end apart for those that other
sessions had named, too. A recording may name the sessions: then those are taken.

    ends      that the session will not come back; of those that do nothing is said
    returns   after how many accesses it comes back, wrong by a log-normal factor of `noise`; or that it does not

Owns no state; the same hints come out each time. Units: accesses (blocks asked for).
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from typing import NamedTuple

from kvtier.policies.base import Hint
from kvtier.policies.trust import Trust
from kvtier.sim.trace import Trace

KINDS = ("ends", "returns")
_SEED = 7
RETURNS_IN_MAX = 1 << 40  # noise has long tails

Said = tuple[Sequence[int], Hint]  # about these blocks


@dataclass(frozen=True, slots=True)
class Hints:
    """noise: sigma of the logarithm. coverage: share of the requests that get their hint. wrong: share of those that
    get the opposite: that a session which returns ends, and nothing about one that ends. false_ends: share of the
    sessions' turns which are not the last and after which an end is said, while what is said of last turns is right."""

    kind: str
    noise: float = 0.0
    coverage: float = 1.0
    wrong: float = 0.0
    false_ends: float = 0.0

    def __str__(self) -> str:
        """``returns, noise 2, coverage 50 %``: what is not usual is told."""
        shares = {"coverage": self.coverage, "wrong": self.wrong, "false ends": self.false_ends}
        usual = {"coverage": 1.0, "wrong": 0.0, "false ends": 0.0}
        told = [f"{name} {100 * share:g} %" for name, share in shares.items() if share != usual[name]]
        return ", ".join([self.kind, *[f"noise {self.noise:g}"] * bool(self.noise), *told])

    def of(self, trace: Trace) -> Iterator[list[Said]]:
        """What a policy hears after each request; as in the product, not the ends of who is mostly wrong."""
        trust = Trust()
        ended: dict[int, bool] = {}  # by session that has had a turn: whether the last was said to be its end
        for turn, word in zip(turns_of(trace), self.words(trace), strict=True):
            said: list[Said] = []
            if turn.session in ended:
                trust.returned(ended[turn.session])
            counted = trust.turned()
            ended[turn.session] = word.ends
            if word.ends:
                trust.ended(counted)
            if word.ends and trust.believes:
                said = [(turn.own, Hint(ends=True)), (turn.shared, Hint(ends=True, shared=True))]
            elif word.returns is not None and turn.returns_in is not None:
                returns_in = int(min(turn.returns_in * word.returns, RETURNS_IN_MAX))
                said = [(turn.own, Hint(returns_in=returns_in)), (turn.shared, Hint(returns_in=returns_in))]
            yield [(blocks, hint) for blocks, hint in said if blocks]

    def words(self, trace: Trace) -> Iterator["Word"]:
        """What is said after each request, whoever believes it."""
        chance = random.Random(_SEED)
        for follower in followers_of(sessions_of(trace)):
            told, mistaken, factor = chance.random(), chance.random(), chance.gauss(0.0, 1.0)
            is_last = follower is None
            ends = is_last != (mistaken < self.wrong) or (not is_last and mistaken < self.false_ends)
            returns = told < self.coverage and not ends and self.kind == "returns" and not is_last
            yield Word(ends and told < self.coverage, exp(factor * self.noise) if returns else None)


class Word(NamedTuple):
    """What is said after a request. ends: that its session does. returns: that it comes back, the time until then being
    wrong by this factor. Neither: nothing is said."""

    ends: bool
    returns: float | None


class Turn(NamedTuple):
    """A request in its session, by number.

    own, shared: its blocks that no other session still needs, deepest first; of `shared` others had need before.
    returns_in: after how many accesses the session names the next ones; None: never.
    """

    session: int
    own: list[int]
    shared: list[int]
    returns_in: int | None


def turns_of(trace: Trace) -> Iterator[Turn]:
    """One for each request."""
    sessions = sessions_of(trace)
    ends = [0, *accumulate(len(request.blocks) for request in trace.requests)]
    next_of = followers_of(sessions)
    living: dict[int, set[int]] = defaultdict(set)  # block -> the sessions that named it and have not ended
    first: dict[int, int] = {}  # block -> the first that named it
    shared: set[int] = set()
    for number, (request, session) in enumerate(zip(trace.requests, sessions, strict=True)):
        for block in request.blocks:
            living[block].add(session)
            if first.setdefault(block, session) != session:
                shared.add(block)
        free = [block for block in reversed(request.blocks) if len(living[block]) == 1]
        later = next_of[number]
        if later is None:
            for block in request.blocks:
                living[block].discard(session)
        own, others = [b for b in free if b not in shared], [b for b in free if b in shared]
        yield Turn(session, own, others, None if later is None else ends[later] - ends[number + 1])


def followers_of(sessions: Sequence[int]) -> list[int | None]:
    """For each request the number of the next one of its session; None: there is none."""
    following: dict[int, int] = {}
    next_of: list[int | None] = [None] * len(sessions)
    for number in reversed(range(len(sessions))):
        next_of[number] = following.get(sessions[number])
        following[sessions[number]] = number
    return next_of


def sessions_of(trace: Trace) -> list[int]:
    """The number of each request's session: as recorded, or as its blocks show."""
    if any(request.session is not None for request in trace.requests):
        return _recorded_sessions(trace)
    latest: dict[int, int] = {}  # block -> session that named it last
    lengths: dict[int, int] = {}  # session -> whole blocks of its latest request
    sessions: list[int] = []
    for number, request in enumerate(trace.requests):
        whole = request.blocks[: request.tokens_in // trace.block_tokens]
        known = next((depth for depth in reversed(range(len(whole))) if whole[depth] in latest), None)
        session = number
        if known is not None:
            candidate = latest[whole[known]]
            if 2 * (known + 1) > lengths[candidate]:
                session = candidate
        sessions.append(session)
        lengths[session] = len(whole)
        latest.update(dict.fromkeys(whole, session))
    return sessions


def _recorded_sessions(trace: Trace) -> list[int]:
    """A request that names none is the only one of its session."""
    numbers: dict[str, int] = {}
    return [
        number if request.session is None else numbers.setdefault(request.session, number)
        for number, request in enumerate(trace.requests)
    ]
