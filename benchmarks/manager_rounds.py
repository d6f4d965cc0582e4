"""What one round measures of a manager: a prompt's life in an empty and in a full pool, decoding, events, a hybrid.

Owns the managers of a side, one for each condition. Always: every round does the same, with prompts of its own; a pool
that is "full" has named every block, so each block taken has to be evicted.
Units: blocks of `BLOCK_TOKENS` tokens.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from hashing import BLOCK_TOKENS, VOCABULARY
from manager_sides import HYBRID, PLAIN, Side
from manager_turns import Figure, Step, take_turns, timed

POOL_PROMPTS = 20  # a pool holds so many prompts
MISSES = 200
RUNNING = 64  # requests that decode together
RUNNING_HYBRID = 16
HYBRID_STEP = max(group.block_tokens for group in HYBRID)  # a hit ends where blocks of all groups do
STEPS = BLOCK_TOKENS  # so each running request fills one block

IDS = list(range(VOCABULARY))  # all prompts share these numbers, or a large pool's would take gigabytes

TARGET = 0.6
STEPS_MEASURED = {  # name -> (unit, target)
    "make a request, hashes and all": ("prompt", None),
    "get, miss at the first block": ("call", TARGET),
    "allocate a new prompt": ("prompt", TARGET),
    "get a whole hit": ("prompt", TARGET),
    "allocate a whole hit": ("prompt", TARGET),
    "free": ("prompt", TARGET),
    "allocate a new prompt, evicting": ("prompt", TARGET),
    "decode a token": ("token", TARGET),
    "events on: allocate, evicting, and take them": ("prompt", TARGET),
    "hybrid: get a whole hit": ("prompt", TARGET),
    "hybrid: allocate a new prompt, evicting": ("prompt", TARGET),
    "hybrid: decode a token": ("token", TARGET),
    "hybrid: free": ("prompt", TARGET),
}


def measure(sides: Mapping[str, type[Side]], blocks: int, rounds: int) -> list[Figure]:
    """All operations, on prompts of so many blocks. One round before the first is thrown away."""
    figures = {name: Figure(name, *rest) for name, rest in STEPS_MEASURED.items()}
    benches = {name: Bench(kind, blocks) for name, kind in sides.items()}
    shuffle = random.Random(0)
    for round_ in range(-1, rounds):
        for side, step, took_s in take_turns({name: bench.round(round_) for name, bench in benches.items()}, shuffle):
            if round_ >= 0:
                figures[step].add(side, took_s)
    return list(figures.values())


def prompt(name: str, blocks: int) -> list[int]:
    """Tokens of the prompt of that name: the blocks, and one token, which is never hit."""
    return random.Random(name).choices(IDS, k=blocks * BLOCK_TOKENS + 1)


class Bench:
    """The managers of one side."""

    def __init__(self, kind: type[Side], blocks: int) -> None:
        self.blocks = blocks
        blocks_total = max(blocks * POOL_PROMPTS, 8 * RUNNING) + 1
        self.empty = kind(PLAIN, blocks_total)
        self.full = kind(PLAIN, blocks_total)
        self.telling = kind(PLAIN, blocks_total, events=True)
        self.hybrid = kind(HYBRID, 2 * blocks_total)
        for number in range(2 * blocks_total // blocks + 2):
            for side in (self.full, self.telling, self.hybrid):
                self._serve(side, prompt(f"filler {number}", blocks))
            self.telling.take_events()

    def round(self, number: int) -> Iterator[Step]:
        """One prompt after the other through all managers."""
        tokens = prompt(f"round {number}", self.blocks)
        yield from self._life(self.empty, tokens)
        yield from self._evicting(self.full, tokens)
        yield from decoding(self.full, "decode a token", number, RUNNING, 1)
        yield from self._telling(self.telling, tokens)
        yield from self._hybrid(self.hybrid, tokens, number)

    def _life(self, side: Side, tokens: list[int]) -> Iterator[Step]:
        side.forget()
        took_s, request = timed(side.request, "first", tokens)
        yield Step("make a request, hashes and all", took_s, None)
        took_s, _ = timed(side.allocate, request, len(tokens), side.get(request))
        yield Step("allocate a new prompt", took_s, side.table(request))
        side.free(request)
        request = side.request("second", tokens)
        took_s, hit = timed(side.get, request)
        assert side.hit_tokens(hit) == len(tokens) - 1
        yield Step("get a whole hit", took_s, None)
        took_s, _ = timed(side.allocate, request, 1, hit)
        yield Step("allocate a whole hit", took_s, side.table(request))
        took_s, _ = timed(side.free, request)
        yield Step("free", took_s, None)

    def _evicting(self, side: Side, tokens: list[int]) -> Iterator[Step]:
        request = side.request("new", tokens)
        took_s, hit = timed(_repeat, side.get, request, MISSES)
        assert side.hit_tokens(hit) == 0
        yield Step("get, miss at the first block", took_s / MISSES, None)
        took_s, _ = timed(side.allocate, request, len(tokens), hit)
        yield Step("allocate a new prompt, evicting", took_s, side.table(request))
        side.free(request)

    def _telling(self, side: Side, tokens: list[int]) -> Iterator[Step]:
        request = side.request("new", tokens)
        hit = side.get(request)
        took_s, events = timed(lambda: (side.allocate(request, len(tokens), hit), side.take_events())[1])
        yield Step("events on: allocate, evicting, and take them", took_s, (side.table(request), side.told(events)))
        side.free(request)

    def _hybrid(self, side: Side, tokens: list[int], number: int) -> Iterator[Step]:
        request = side.request("new", tokens)
        hit = side.get(request)
        took_s, _ = timed(side.allocate, request, len(tokens), hit)
        yield Step("hybrid: allocate a new prompt, evicting", took_s, side.table(request))
        took_s, _ = timed(side.free, request)
        yield Step("hybrid: free", took_s, None)
        request = side.request("again", tokens)
        took_s, hit = timed(side.get, request)
        assert side.hit_tokens(hit) == (len(tokens) - 1) // HYBRID_STEP * HYBRID_STEP
        yield Step("hybrid: get a whole hit", took_s, None)
        yield from decoding(side, "hybrid: decode a token", number, RUNNING_HYBRID, min(self.blocks // 10, 100) + 1)

    def _serve(self, side: Side, tokens: list[int]) -> None:
        request = side.request("filler", tokens)
        assert side.allocate(request, len(tokens), side.get(request)) is not None
        side.free(request)


def decoding(side: Side, name: str, number: int, running: int, blocks: int) -> Iterator[Step]:
    """Steps of an engine in which each of so many requests writes a token: only the blocks for it are measured."""
    requests, lengths = [], []
    for place in range(running):
        tokens = prompt(f"decode {number} {place}", blocks)[place % BLOCK_TOKENS :]  # they don't fill blocks together
        request = side.request(f"running{place}", tokens)
        side.allocate(request, len(tokens), side.get(request))
        side.ran(request, len(tokens))
        requests.append(request)
        lengths.append(len(tokens))
    total_s = 0.0
    for step in range(STEPS):
        for place, request in enumerate(requests):
            side.append(request, (number + step + place) % VOCABULARY)
        took_s, _ = timed(_grow_all, side.grow, requests)
        total_s += took_s
        for request, length in zip(requests, lengths, strict=True):
            side.ran(request, length + step + 1)
    yield Step(name, total_s / (STEPS * running), [side.table(request) for request in requests])
    for request in requests:
        side.free(request)


def _grow_all(grow: Any, requests: list[Any]) -> None:
    for request in requests:
        grow(request, 1)


def _repeat(get: Any, request: Any, times: int) -> Any:
    for _ in range(times):
        hit = get(request)
    return hit
