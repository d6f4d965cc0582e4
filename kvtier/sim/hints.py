"""What a serving layer could have told: hints from a trace's own future, made as unreliable as one likes.

A session is a request and those that continue it: a later request continues the session that named the deepest of its
known blocks last, if those are more than half of what that session had come to. A hint comes when a request has been
served, and is about its blocks that no other session which goes on has named; of an end apart for those that other
sessions had named, too.

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

    def of(self, trace: Trace) -> Iterator[list[Said]]:
        """What is said after each request, if anything; as in the product, not the ends of who is mostly wrong."""
        chance, trust = random.Random(_SEED), Trust()
        ended: dict[int, bool] = {}  # by session that has had a turn: whether the last was said to be its end
        for turn in turns_of(trace):
            told, mistaken, factor = chance.random(), chance.random(), chance.gauss(0.0, 1.0)
            is_last = turn.returns_in is None
            ends = is_last != (mistaken < self.wrong) or (not is_last and mistaken < self.false_ends)
            said: list[Said] = []
            if turn.session in ended:
                trust.returned(ended[turn.session])
            trust.turned()
            ended[turn.session] = ends and told < self.coverage
            if ended[turn.session]:
                trust.ended(turned=True)
            if ended[turn.session] and trust.believes:
                said = [(turn.own, Hint(ends=True)), (turn.shared, Hint(ends=True, shared=True))]
            elif told < self.coverage and not ends and self.kind == "returns" and turn.returns_in is not None:
                returns_in = int(min(turn.returns_in * exp(factor * self.noise), RETURNS_IN_MAX))
                said = [(turn.own, Hint(returns_in=returns_in)), (turn.shared, Hint(returns_in=returns_in))]
            yield [(blocks, hint) for blocks, hint in said if blocks]


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
    sessions = _sessions(trace)
    ends = [0, *accumulate(len(request.blocks) for request in trace.requests)]
    following: dict[int, int] = {}
    next_of: list[int | None] = [None] * len(sessions)
    for number in reversed(range(len(sessions))):
        next_of[number] = following.get(sessions[number])
        following[sessions[number]] = number
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


def _sessions(trace: Trace) -> list[int]:
    """The number of each request's session."""
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
