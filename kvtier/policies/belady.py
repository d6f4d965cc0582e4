"""Belady's bound: what the best policy could reach that knows the future.

Owns nothing but the requests, which it is given in advance. No policy for a tier, since no tier knows what will come.
Always:  at most `blocks` blocks are kept between two requests (or accesses).
Units:   blocks; a request is its blocks in prefix order, a block any integer, the same for the same content.

By request: all blocks of a request are sought at its arrival; afterwards those are kept, of the old and the new ones,
that a request will need soonest, and of those that one request needs the shallow ones first. So what is kept is closed
under prefixes, and no policy finds more prefix blocks. Blocks that a request brings and does not look for (the last one
of a prompt, whose last token is always computed) may be kept from then on, and not for its sake. By access: every block
is a request of its own, in prefix order, and the one needed last leaves; with bypass, that may be the one that has just
come (Belady 1966, algorithm MIN).
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import NamedTuple

Request = Sequence[int]
_NEVER = 2**62


class Found(NamedTuple):
    """Of one request, at its arrival."""

    leading: int  # blocks before the first that is missing
    blocks: int  # all that are there


def belady_by_request(requests: Sequence[Request], blocks: int, sought: Sequence[int] | None = None) -> Iterator[Found]:
    """What each request finds in a tier of so many blocks. Costs O(log blocks) for each block of a request.

    sought: how many of its blocks, from the first on, each request looks for; it brings the others along. None: all.
    """
    sought = sought if sought is not None else [len(request) for request in requests]
    following = _next_requests(requests, sought)
    kept: dict[int, tuple[int, int]] = {}  # block -> (request that needs it next, its depth there)
    leaving: list[tuple[int, int, int]] = []  # a heap, the last needed and deepest first; stale ones are passed over
    for number, request in enumerate(requests):
        there = [block in kept for block in request[: sought[number]]]
        yield Found(sum(1 for _ in takewhile(bool, there)), sum(there))
        for depth, block in enumerate(request):
            needed = following[number][depth]
            if needed == _NEVER:
                kept.pop(block, None)
            else:
                kept[block] = needed, depth
                heappush(leaving, (-needed, -depth, block))
        while len(kept) > blocks:
            needed_at, depth_at, block = heappop(leaving)
            if kept.get(block) == (-needed_at, -depth_at):
                del kept[block]


def belady_by_access(requests: Sequence[Request], blocks: int, *, bypass: bool = False) -> Iterator[Found]:
    """What the accesses of each request find, one after the other."""
    following = _next_accesses(requests)
    kept: dict[int, int] = {}  # block -> access that needs it next
    leaving: list[tuple[int, int]] = []
    at = 0
    for request in requests:
        there = []
        for block in request:
            there.append(block in kept)
            needed = following[at]
            at += 1
            if not there[-1] and len(kept) >= blocks and not bypass:
                _drop_last(kept, leaving)
            kept[block] = needed
            heappush(leaving, (-needed, block))
            if len(kept) > blocks:
                _drop_last(kept, leaving)
        yield Found(sum(1 for _ in takewhile(bool, there)), sum(there))


def _drop_last(kept: dict[int, int], leaving: list[tuple[int, int]]) -> None:
    while kept:
        needed_at, block = heappop(leaving)
        if kept.get(block) == -needed_at:
            del kept[block]
            return


def _next_requests(requests: Sequence[Request], sought: Sequence[int]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it, if that looks for it: one that does
    not brings it anew, so that nobody need keep it until then."""
    seen: dict[int, int] = {}
    rows: list[list[int]] = []
    for number in reversed(range(len(requests))):
        rows.append([seen.get(block, _NEVER) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
        seen.update(dict.fromkeys(requests[number][sought[number] :], _NEVER))
    return rows[::-1]


def _next_accesses(requests: Sequence[Request]) -> list[int]:
    """For each access, the number of the next one to the same block."""
    seen: dict[int, int] = {}
    accesses = [block for request in requests for block in request]
    following = [0] * len(accesses)
    for at in reversed(range(len(accesses))):
        following[at] = seen.get(accesses[at], _NEVER)
        seen[accesses[at]] = at
    return following
