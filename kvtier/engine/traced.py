"""`Traced`: which requests and hints are written down for `kvtier simulate`, and how many of them got lost.

Owns nothing but the way to whoever writes. Always: each request counts once, when it first asks for slots, with the
names of its whole blocks and no token of it; one that brings blocks of an engine's own (`Store`) is none. Where groups
have blocks of several lengths, a recorded block is the shortest run of tokens that has whole ones in each, for of less
nothing is found. A hint is written down as it was said, be its session known or not.
Units: tokens, seconds of the engine's clock.
"""

from math import lcm
from typing import NamedTuple, Protocol

from kvtier.blocks.hashing import Keys
from kvtier.cache.leases import Match
from kvtier.engine.hints import Advice
from kvtier.metrics import Counters
from kvtier.types import BlockKey


class Asked(NamedTuple):
    """A request. tokens_out: what there is room for behind the prompt, which no answer is longer than.

    namespace: the fingerprint under which its blocks are looked up.
    """

    at_s: float
    tokens_in: int
    tokens_out: int
    keys: tuple[BlockKey, ...]
    namespace: bytes
    session: str | None = None  # whose turn it is


class Said(NamedTuple):
    """A hint."""

    at_s: float
    session: str
    advice: Advice


class Recorder(Protocol):
    """Writes requests and hints down, some time."""

    def note(self, entry: Asked | Said) -> int:
        """Take one; never waits. Returns how many were lost since the last call, for want of room or of a disk."""
        ...


class Traced:
    """Hears of each reservation. `recorder`: None where nothing is to be written."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.recorder: Recorder | None = None

    def note(self, match: Match, tokens_total: int, namespace: bytes, now_s: float) -> None:
        """A reservation of so many tokens begins, for blocks of this fingerprint."""
        if self.recorder is None or match.traced:
            return
        match.traced = True
        tokens_in = match.keys.tokens if match.tokens_max is None else max(match.keys.tokens, match.tokens_max + 1)
        if tokens_in:
            tokens_out = max(0, tokens_total - tokens_in)
            asked = Asked(now_s, tokens_in, tokens_out, _names(match.keys), namespace, match.session)
            self._counters.add("traced_requests")
            self._counters.add("traces_lost", self.recorder.note(asked))

    def said(self, session: str, advice: Advice, now_s: float) -> None:
        """A hint is given."""
        if self.recorder is not None:
            self._counters.add("traces_lost", self.recorder.note(Said(now_s, session, advice)))


def _names(keys: Keys) -> tuple[BlockKey, ...]:
    """Of each whole run of tokens that has whole blocks in every group, what group 0 calls its last block there."""
    size = keys.block_tokens[0]
    blocks = lcm(*keys.block_tokens) // size
    return keys.groups[0][blocks - 1 : keys.tokens // size : blocks]
