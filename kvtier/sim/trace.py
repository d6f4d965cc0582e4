"""A trace: which requests came when, which blocks each of them named, and what was said of their sessions.

Owns no state. Always: blocks are numbered from 0 by first appearance, a number stands for a block and all before it,
no request names one twice; a request's last block may be a partial one. Requests stand in the order of the file.
Units: tokens, blocks, seconds since whatever the file counts from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

BLOCK_TOKENS = 512  # of published traces, which do not say it


class TracedRequest(NamedTuple):
    """One request: a prompt of `tokens_in` tokens whose blocks are `blocks`, in prefix order."""

    at_s: float
    tokens_in: int
    tokens_out: int
    blocks: Sequence[int]
    session: str | None = None  # whose turn it is, if that was recorded


class TracedHint(NamedTuple):
    """What `cache.hint` was told. follows: the number of the session's latest request then; None: there was none."""

    at_s: float
    session: str
    follows: int | None
    ends: bool = False
    returns_in_s: float | None = None
    priority: int | None = None
    pin: bool | None = None
    ttl_s: float | None = None


class Numbers(dict[Any, int]):
    """Gives whatever it is asked for a number, the next one if it is new."""

    def __missing__(self, name: Any) -> int:
        self[name] = number = len(self)
        return number


@dataclass(frozen=True)
class Trace:
    """The requests of one file. block_bytes: as recorded; None: the file does not say."""

    name: str
    block_tokens: int
    block_bytes: int | None
    requests: Sequence[TracedRequest]
    hints: Sequence[TracedHint] = ()

    @cached_property
    def accesses(self) -> int:
        """Blocks asked for."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def input_tokens(self) -> int:
        return sum(request.tokens_in for request in self.requests)

    @cached_property
    def unique_blocks(self) -> int:
        """The working set: what a cache would hold that forgets nothing."""
        return 1 + max((max(request.blocks) for request in self.requests if request.blocks), default=-1)

    @cached_property
    def strayed(self) -> list[int]:
        """Requests, by number, that name a block behind another one than those before them did."""
        parents: dict[int, int] = {}
        strayed = []
        for number, request in enumerate(self.requests):
            befores = [-1, *request.blocks[:-1]]
            pairs = zip(request.blocks, befores, strict=True)
            if any(parents.setdefault(block, before) != before for block, before in pairs):
                strayed.append(number)
        return strayed

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        times = [request.at_s for request in self.requests]
        return max(times) - min(times) if times else 0.0

    def from_first_arrival(self) -> "Trace":
        """The same, with times that count from the first arrival: a file's may count from a boot, or from 1970. A hint
        that was said before counts as said then."""
        start_s = min((request.at_s for request in self.requests), default=0.0)
        if not start_s:
            return self
        requests = [request._replace(at_s=request.at_s - start_s) for request in self.requests]
        hints = [hint._replace(at_s=max(0.0, hint.at_s - start_s)) for hint in self.hints]
        return replace(self, requests=requests, hints=tuple(hints))

    def prefix_tokens(self, request: TracedRequest, blocks: int) -> int:
        """Tokens of a request's first `blocks` blocks, of which the last may be partial."""
        return min(request.tokens_in, blocks * self.block_tokens)
