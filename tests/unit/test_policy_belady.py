"""Belady's bound against all that could be done, on requests so short that all of it can be tried."""

import random
from itertools import chain, combinations, takewhile

import pytest

from kvtier.policies.belady import belady_by_access, belady_by_request

Requests = list[tuple[int, ...]]


def prompts(seed: int) -> Requests:
    """Chained blocks: each has one parent, as hashes of prefixes do."""
    rng = random.Random(seed)
    known: Requests = [()]
    requests = []
    for _ in range(6):
        begin = rng.choice(known)[: rng.randrange(4)]
        request = (*begin, *(100 * len(known) + depth for depth in range(rng.randrange(1, 3))))
        known.append(request)
        requests.append(request if rng.random() < 0.6 else rng.choice(known[1:]))
    return requests


def best_by_request(requests: Requests, blocks: int, sought: list[int]) -> int:
    """The most leading blocks that can be found, whatever is kept after each request."""
    reach: dict[frozenset[int], int] = {frozenset(): 0}
    for request, length in zip(requests, sought, strict=True):
        after: dict[frozenset[int], int] = {}
        for kept, found in reach.items():
            total = found + sum(1 for _ in takewhile(kept.__contains__, request[:length]))
            pool = sorted(kept | {*request})
            for choice in combinations(pool, min(blocks, len(pool))):
                after[frozenset(choice)] = max(after.get(frozenset(choice), 0), total)
        reach = after
    return max(reach.values())


def best_by_access(accesses: list[int], blocks: int, *, bypass: bool) -> int:
    """The most hits, whatever leaves at each miss."""
    reach: dict[frozenset[int], int] = {frozenset(): 0}
    for x in accesses:
        after: dict[frozenset[int], int] = {}
        for kept, hits in reach.items():
            if x in kept:
                options = [kept]
            elif len(kept) < blocks:
                options = [kept | {x}]
            else:
                options = [kept - {y} | {x} for y in kept] + [kept] * bypass
            for option in options:
                after[option] = max(after.get(option, 0), hits + (x in kept))
        reach = after
    return max(reach.values())


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(15))
def test_no_choice_finds_more(seed: int, blocks: int) -> None:
    """Policies would be measured against a bound that can be beaten."""
    requests = prompts(seed)
    found = list(belady_by_request(requests, blocks))
    assert len(found) == len(requests)
    assert all(each.leading == each.blocks for each in found)  # what is kept is closed under prefixes
    assert sum(each.leading for each in found) == best_by_request(requests, blocks, [*map(len, requests)])


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(15))
def test_no_choice_finds_more_where_last_blocks_are_only_brought(seed: int, blocks: int) -> None:
    """As above, of prompts that do not look for their last block: it is needed by nobody, or room is kept for it."""
    rng, requests = random.Random(seed), prompts(seed)
    sought = [len(request) - rng.randrange(2) for request in requests]
    found = list(belady_by_request(requests, blocks, sought))
    assert all(each.leading == each.blocks for each in found)
    assert sum(each.leading for each in found) == best_by_request(requests, blocks, sought)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_no_choice_has_more_hits(seed: int, bypass: bool) -> None:
    """As above, for accesses one by one."""
    rng = random.Random(seed)
    requests = [tuple(rng.choices(range(7), k=4)) for _ in range(6)]
    accesses = list(chain.from_iterable(requests))
    for blocks in (1, 2, 3):
        found = belady_by_access(requests, blocks, bypass=bypass)
        assert sum(each.blocks for each in found) == best_by_access(accesses, blocks, bypass=bypass)


def test_shallow_blocks_stay() -> None:
    """A tie would be decided for a block that nobody can use without the one before it."""
    requests = [(1, 2, 3), (9,), (1, 2, 3)]
    assert [each.leading for each in belady_by_request(requests, 2)] == [0, 0, 2]


def test_nothing_fits_into_nothing() -> None:
    """A tier without room would be said to find blocks."""
    assert sum(each.blocks for each in belady_by_request([(1,), (1,)], 0)) == 0
    assert sum(each.blocks for each in belady_by_access([(1,), (1,)], 0)) == 0
