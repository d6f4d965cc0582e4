"""One tier under one policy: how many blocks, and tokens of prefixes, the requests of a trace find.

Orders:
    flat      every block of a request is accessed once, in prefix order: looked up, and put in if it was missing. So
              the literature on caches counts.
    request   what is found is decided when the request arrives; then its blocks are accessed deepest first, so that
              those leave last that the most prompts share.
Prefix tokens are those before a request's first missing block. Belady's bound is the optimum for the order: by request
(a block may pass by), or by access, where each one that comes is kept.

Owns nothing between calls. Always: the policy's residents are the blocks marked here, never more than the capacity.
Units: blocks, tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from kvtier.policies.base import Access, Hint, SupportsHints
from kvtier.policies.belady import Found, belady_by_access, belady_by_request
from kvtier.sim.guarded import policy_of
from kvtier.sim.hints import Hints
from kvtier.sim.trace import Trace

BELADY = "belady"
ORDERS = ("request", "flat")
APPENDING = frozenset({"lru", "fifo"})  # who comes joins the end: n that leave at once are those that leave one by one

_REUSE, _FILL = Access.REUSE, Access.FILL
Progress = Callable[[int], None]  # requests since the last call


@dataclass(frozen=True, slots=True)
class FlatResult:
    """What the requests of a trace found."""

    hits: int  # blocks
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class FlatJob:
    """A run: one tier of so many blocks under one policy, or `belady` for the bound."""

    policy: str
    blocks: int
    order: str
    hints: Hints | None = None

    def run(self, trace: Trace, progress: Progress | None = None) -> "FlatRun":
        since = time.process_time()
        found = simulate(trace, self.policy, self.blocks, self.order, self.hints, progress)
        return FlatRun(self, found, time.process_time() - since)


@dataclass(frozen=True, slots=True)
class FlatRun:
    """What it found, and in how many seconds of one core."""

    job: FlatJob
    found: FlatResult
    seconds: float


class OneTier:
    """A cache of `blocks` blocks in which a policy says who leaves."""

    def __init__(self, policy: str, blocks: int, unique_blocks: int) -> None:
        """policy: its name. unique_blocks: the largest block number, and one more."""
        self._policy = policy_of(policy, blocks)
        self._come_at_once = policy in APPENDING
        self._blocks = blocks
        self._held = 0
        self._here = bytearray(unique_blocks)

    def flat(self, blocks: Sequence[int]) -> list[bool]:
        """Access each block in turn; which of them were there?"""
        return self._access(blocks)

    def request(self, blocks: Sequence[int]) -> list[bool]:
        """Look all up, then access them deepest first."""
        here = self._here
        found = [here[block] == 1 for block in blocks]
        self._access(blocks[::-1])
        return found

    def hint(self, blocks: Sequence[int], hint: Hint) -> None:
        """Pass on what somebody knows of blocks, if the policy can use it."""
        if isinstance(self._policy, SupportsHints):
            self._policy.hint(blocks, hint)

    def _access(self, blocks: Sequence[int]) -> list[bool]:
        """One after the other, but neighbours of one kind are told to the policy together: that costs half as much."""
        here, found = self._here, bytearray()
        at, end = 0, len(blocks)
        while at < end:
            start, there = at, here[blocks[at]]
            while at < end and here[blocks[at]] == there:
                at += 1
            run = blocks[start:at]
            if there:
                self._policy.touch(run, _REUSE)
            else:
                self._put(run)
            found += bytes((there,)) * len(run)
        self._policy.forgotten()  # nobody else needs to know which ghosts it has given up
        return [there == 1 for there in found]

    def _put(self, blocks: Sequence[int]) -> None:
        step = self._blocks if self._come_at_once else 1
        for start in range(0, len(blocks), step):
            self._put_together(blocks[start : start + step])

    def _put_together(self, coming: Sequence[int]) -> None:
        policy, here, short = self._policy, self._here, self._held + len(coming) - self._blocks
        self._held += len(coming)
        if short > 0:
            leaving = policy.candidates(short, incoming=coming[0])
            policy.evict(leaving, coming[0])
            self._held -= short
            for block in leaving:
                here[block] = 0
        policy.touch(coming, _FILL)
        for block in coming:
            here[block] = 1


def simulate(
    trace: Trace,
    policy: str,
    blocks: int,
    order: str,
    hints: Hints | None = None,
    progress: Progress | None = None,
) -> FlatResult:
    """Replay a trace against `blocks` blocks. policy: as in the configuration, or `belady` for the bound.

    hints: are given to a policy that can use them.

    Raises UsageError for an unknown policy, and for one of another package that does not keep its contract.
    """
    blocks = min(blocks, max(1, trace.unique_blocks))  # in more than that nothing leaves, either
    every = _bound(trace, blocks, order) if policy == BELADY else _replayed(trace, policy, blocks, order, hints)
    hits = tokens = 0
    for number, (request, (leading, there)) in enumerate(zip(trace.requests, every, strict=True), start=1):
        hits += there
        tokens += trace.prefix_tokens(request, leading)
        if progress and not number % 64:
            progress(64)
    return FlatResult(hits, tokens)


def _replayed(trace: Trace, policy: str, blocks: int, order: str, hints: Hints | None) -> Iterable[Found]:
    tier = OneTier(policy, blocks, trace.unique_blocks)
    access = tier.flat if order == "flat" else tier.request
    said = hints.of(trace) if hints else repeat([])
    for request, about in zip(trace.requests, said, strict=False):
        found = access(request.blocks)
        for told, hint in about:
            tier.hint(told, hint)
        yield Found(found.index(False) if False in found else len(found), sum(found))


def _bound(trace: Trace, blocks: int, order: str) -> Iterable[Found]:
    requests = [request.blocks for request in trace.requests]
    return belady_by_access(requests, blocks) if order == "flat" else belady_by_request(requests, blocks)
