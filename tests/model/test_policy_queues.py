"""FIFO, LFU, 2Q, S3-FIFO, SIEVE and W-TinyLFU on random accesses, against models that share nothing with them.

`tests/textbook.py` tells the papers; libCacheSim's code, by other authors, tells them again where it is installed.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import pytest

from kvtier.policies import POLICIES
from kvtier.policies.base import Access, Policy
from tests.textbook import TextbookFIFO, TextbookLFU, TextbookS3FIFO, TextbookSIEVE, TextbookTwoQ


class TextbookWTinyLFU:
    """Einziger et al., TOS 2017, with exact counts of all that is remembered (four ghosts for each block)."""

    def __init__(self, c: int) -> None:
        self.c, self.accesses = c, 0
        self.window, self.probation, self.protected, self.ghosts = (OrderedDict[int, None]() for _ in range(4))
        self.counts: Counter[int] = Counter()
        self.window_max = max(1, c // 100)
        self.protected_max = (c - self.window_max) * 4 // 5

    def __contains__(self, x: int) -> bool:
        return x in self.window or x in self.probation or x in self.protected

    def access(self, x: int) -> bool:
        hit = x in self
        if not hit and len(self.window) + len(self.probation) + len(self.protected) == self.c:
            self.evict()
        if not hit and self.ghosts.pop(x, 0) == 0:
            self.counts[x] = 0
        self.count(x)
        if x in self.probation or x in self.protected:
            self.probation.pop(x, None)
            self.protected.pop(x, None)
            self.protected[x] = None
            if len(self.protected) > self.protected_max:
                self.probation[self.protected.popitem(last=False)[0]] = None
        else:
            self.window.pop(x, None)
            self.window[x] = None
            if len(self.window) > self.window_max:
                self.probation[self.window.popitem(last=False)[0]] = None
        return hit

    def count(self, x: int) -> None:
        self.counts[x] = min(15, self.counts[x] + 1)
        self.accesses += 1
        if self.accesses >= 10 * self.c:
            self.accesses = 0
            self.counts = Counter({block: count // 2 for block, count in self.counts.items()})

    def evict(self) -> None:
        newcomer = next(iter(self.window)) if len(self.window) >= self.window_max else None
        main = self.probation or self.protected
        resident = next(iter(main)) if main else None
        if resident is None or (newcomer is not None and self.counts[newcomer] <= self.counts[resident]):
            del self.window[newcomer]
            self.ghosts[newcomer] = None
        else:
            del main[resident]
            self.ghosts[resident] = None
        if len(self.ghosts) > 4 * self.c:
            self.ghosts.popitem(last=False)


TEXTBOOKS = {
    "fifo": TextbookFIFO,
    "lfu": TextbookLFU,
    "two_q": TextbookTwoQ,
    "s3_fifo": TextbookS3FIFO,
    "sieve": TextbookSIEVE,
    "w_tinylfu": TextbookWTinyLFU,
}
THEIRS = {"lru": "LRU", "arc": "ARC", "fifo": "FIFO", "lfu": "LFU", "two_q": "TwoQ", "sieve": "Sieve"}


def accesses(seed: int, count: int, blocks: int) -> Iterator[int]:
    """Some repeat soon, some late, some in a loop larger than the cache."""
    rng = random.Random(seed)
    for at in range(count):
        kind = rng.random()
        if kind < 0.5:
            yield int(rng.paretovariate(0.7)) % (4 * blocks)
        elif kind < 0.8:
            yield rng.randrange(3 * blocks)
        else:
            yield 10 * blocks + at % (2 * blocks)


class Cache:
    """One access at a time, as the engine makes them."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self.policy, self.blocks = policy, blocks
        self.resident: set[int] = set()

    def access(self, x: int) -> bool:
        if x in self.resident:
            self.policy.touch([x], Access.REUSE)
            return True
        if len(self.resident) == self.blocks:
            victims = self.policy.candidates(1, incoming=x)
            self.policy.evict(victims, incoming=x)
            self.resident.difference_update(victims)
        self.policy.touch([x], Access.FILL)
        self.resident.add(x)
        return False


@pytest.mark.parametrize("blocks", [3, 10, 40, 130])
@pytest.mark.parametrize("name", TEXTBOOKS)
def test_it_is_the_papers(name: str, blocks: int) -> None:
    """A policy is not what its name says."""
    make: Callable[[int], object] = TEXTBOOKS[name]
    cache, textbook = Cache(POLICIES.get(name)(blocks), blocks), make(blocks)
    hits = 0
    for at, x in enumerate(accesses(blocks, 4000, blocks)):
        hit = cache.access(x)
        hits += hit
        assert hit == textbook.access(x), (at, x)
        assert at % 100 or cache.policy.check() == []
    assert hits > 400
    assert all(x in textbook for x in cache.resident)


@pytest.mark.parametrize("blocks", [17, 100, 500])
@pytest.mark.parametrize("name", THEIRS)
def test_it_is_libcachesims(name: str, blocks: int) -> None:
    """Both our policy and our textbook have misread the paper."""
    libcachesim = pytest.importorskip("libcachesim", exc_type=ImportError)
    theirs = getattr(libcachesim, THEIRS[name])(cache_size=blocks)
    cache = Cache(POLICIES.get(name)(blocks), blocks)
    ids = list(accesses(blocks + 1, 20_000, blocks))
    requests = (libcachesim.Request(obj_id=x + 1, obj_size=1) for x in ids)
    assert sum(map(cache.access, ids)) == sum(map(theirs.get, requests))


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"w_tinylfu"}))  # whose window holds the last to come
def test_deeper_blocks_leave_first(name: str) -> None:
    """A prefix loses its head while its tail stays, which nobody can use any more."""
    policy = POLICIES.get(name)(8)
    policy.touch([14, 13, 12, 11], Access.FILL)
    assert policy.candidates(2) == [14, 13]


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_whole_life_is_bounded(name: str) -> None:
    """Ghosts or counts grow for ever, and the directory keeps a name for each of them."""
    blocks = 20
    cache = Cache(POLICIES.get(name)(blocks), blocks)
    for x in range(40 * blocks):
        cache.access(x)
    assert len(cache.policy.ghosts()) <= 4 * blocks
    assert len(cache.policy.snapshot()) < 8000


@pytest.mark.parametrize("name", ["lfu", "sieve", "s3_fifo", "w_tinylfu", "two_q"])
def test_what_was_used_elsewhere_stays_longer(name: str) -> None:
    """Frequency does not travel with a block: in a lower tier every policy is as good as FIFO."""
    policy = POLICIES.get(name)(10)
    policy.touch(range(100, 105), Access.MOVED)
    policy.touch(range(5), Access.FILL)
    for x in range(10, 15):
        policy.evict(policy.candidates(1, incoming=x), incoming=x)
        policy.touch([x], Access.FILL)
    assert {*policy.candidates(10)} >= {*range(100, 105)}
