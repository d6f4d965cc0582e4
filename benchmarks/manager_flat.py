"""What a block costs in pools of all sizes: a request's verbs, per block, and one decoded token.

Owns the managers of one pool size at a time. Always: the pool has run for long: every block was named, and the free
ones lie in memory at random; hits are on prompts that nobody has used lately, and a request ends a round after it
began, so neither side finds its records in the processor's nearest caches by luck.
Units: blocks of `BLOCK_TOKENS` tokens; figures are per block or per token.
"""

import gc
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hashing import BLOCK_TOKENS
from manager_rounds import decoding, prompt
from manager_sides import PLAIN, Side
from manager_turns import Figure, Step, take_turns, timed

PROMPT_BLOCKS = 100
RUNNING = 50
ROUND_BLOCKS = PROMPT_BLOCKS + 3 * RUNNING  # a round takes at most so many
POOL_BLOCKS_LEAST = 2 * ROUND_BLOCKS

OPERATIONS = {"get, a hit": "block", "allocate, evicting": "block", "free": "block", "decode": "token"}


def measure(sides: Mapping[str, type[Side]], pools: Sequence[int], rounds: int) -> dict[int, list[Figure]]:
    """By pool size, in blocks."""
    found = {}
    for blocks in pools:
        figures = {name: Figure(name, unit, None) for name, unit in OPERATIONS.items()}
        pools_by_side = {name: Pool(kind, blocks) for name, kind in sides.items()}
        shuffle = random.Random(0)
        for round_ in range(-1, rounds):
            turns = {name: pool.round(round_) for name, pool in pools_by_side.items()}
            for side, step, took_s in take_turns(turns, shuffle):
                if round_ >= 0:
                    figures[step].add(side, took_s)
        found[blocks] = list(figures.values())
        del pools_by_side
        gc.collect()  # a million records of this size are no part of the next
    return found


def rows(found: Mapping[int, list[Figure]], sides: Sequence[str]) -> list[dict[str, Any]]:
    """By operation and side: microseconds in each pool, and the largest pool's by the smallest's."""
    records = {blocks: {figure.name: figure.record() for figure in figures} for blocks, figures in found.items()}
    listed = []
    for name, unit in OPERATIONS.items() if records else ():
        for side in sides:
            us = {blocks: records[blocks][name][side]["median_us"] for blocks in records}
            listed.append({"name": name, "unit": unit, "side": side, "us": us, "growth": us[max(us)] / us[min(us)]})
    return listed


class Pool:
    """One side's manager with so many blocks, after a long run."""

    def __init__(self, kind: type[Side], blocks: int) -> None:
        self.side = side = kind(PLAIN, blocks + 1)
        self._pick = random.Random(blocks)
        order = list(range(1, blocks + 1))
        self._pick.shuffle(order)
        side.scatter(order)
        held = [(name, self._begin(name)) for name in map(str, range(blocks // PROMPT_BLOCKS))]
        self._pick.shuffle(held)
        # prompts that are surely still there: each round takes at most ROUND_BLOCKS and lists two
        self._known: deque[str] = deque(maxlen=blocks // ROUND_BLOCKS)
        self._running = held.pop()
        for name, request in held:
            side.free(request)
            self._known.append(name)

    def round(self, number: int) -> Iterator[Step]:
        """A hit, a new prompt, the end of the one before, and steps of running requests."""
        side = self.side
        old = self._pick.choice(self._known)
        tokens = prompt(old, PROMPT_BLOCKS)
        request = side.request("old", tokens)
        took_s, hit = timed(side.get, request)
        assert side.hit_tokens(hit) == PROMPT_BLOCKS * BLOCK_TOKENS, "a prompt was evicted that was to be hit"
        yield Step("get, a hit", took_s / PROMPT_BLOCKS, None)
        side.allocate(request, 1, hit)
        side.free(request)
        new = f"round {number}"
        tokens = prompt(new, PROMPT_BLOCKS)
        request = side.request(new, tokens)
        hit = side.get(request)
        took_s, _ = timed(side.allocate, request, len(tokens), hit)
        yield Step("allocate, evicting", took_s / PROMPT_BLOCKS, side.table(request))
        name, ended = self._running
        took_s, _ = timed(side.free, ended)
        yield Step("free", took_s / PROMPT_BLOCKS, None)
        yield from decoding(side, "decode", number, RUNNING, 1)
        self._known += (old, name)
        self._running = new, request

    def _begin(self, name: str) -> Any:
        tokens = prompt(name, PROMPT_BLOCKS)[:-1]
        request = self.side.request(name, tokens)
        assert self.side.allocate(request, len(tokens), self.side.get(request)) is not None
        return request
