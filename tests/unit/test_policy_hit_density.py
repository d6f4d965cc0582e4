"""hit_density: who leaves, and what it reaches on a published trace."""

import lzma
import pathlib
import random
from collections.abc import Iterator
from heapq import heapify, heapreplace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies import hit_density
from kvtier.policies.arc import ARC
from kvtier.policies.base import Access, Hint, Policy
from kvtier.policies.density.classes import (
    ENDED,
    FIRST,
    class_after,
    class_hinted,
)
from kvtier.policies.density.hazards import Hazards
from kvtier.policies.hit_density import GHOSTS_PER_BLOCK, HitDensity
from kvtier.policies.lru import LRU

TRACE = pathlib.Path(__file__).parents[1] / "data/mooncake_synthetic.txt.xz"
BLOCKS_2_PERCENT = 878


def test_blocks_of_one_history_keep_it_in_common() -> None:
    """The shallow blocks of a prompt would get another class than the deep ones, and leave before them."""
    policy = HitDensity(100)
    policy.touch(range(30, 0, -1), Access.FILL)
    policy.touch(range(200, 260), Access.FILL)
    policy.touch(range(30, 0, -1), Access.REUSE)
    classes, times = policy._columns
    assert {classes[handle] for handle in range(1, 31)} == {class_after(FIRST, 90)}
    assert [times[handle] for handle in range(30, 0, -1)] == [*range(91, 121)]


CALLS = st.lists(
    st.tuples(
        st.sampled_from([Access.FILL, Access.MOVED, Access.REUSE, Access.RELEASE]),
        st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True),
        st.integers(0, 6),
    ),
    max_size=25,
)


@given(CALLS)
def test_one_call_is_as_good_as_many(calls: list[tuple[Access, list[int], int]]) -> None:
    """A simulator that goes block by block would promise what the engine, which goes by requests, does not keep."""
    together, apart = HitDensity(25), HitDensity(25)
    for access, handles, leave in calls:
        together.touch(handles, access)
        for handle in handles:
            apart.touch([handle], access)
        for policy in (together, apart):
            policy.evict(policy.candidates(leave))
        assert together.forgotten() == apart.forgotten()
    assert together.snapshot() == apart.snapshot()
    assert together.check() == []


def test_a_release_is_nothing() -> None:
    """A request that ends would make its blocks look as if they had been used again, or be young again."""
    policy = HitDensity(10)
    policy.touch([3, 2, 1], Access.FILL)
    policy.touch([9, 8], Access.FILL)
    before = policy.snapshot()
    policy.touch([3, 2, 1], Access.RELEASE)
    assert policy.snapshot() == before
    assert policy.candidates(5) == [3, 2, 1, 9, 8]


def test_a_ghost_that_comes_back_is_a_use() -> None:
    """A class that is never kept could not prove itself."""
    policy = HitDensity(2)
    policy.touch([2, 1], Access.FILL)
    policy.evict([2])
    policy.touch([2], Access.FILL)
    classes, _ = policy._columns
    assert classes[2] == class_after(FIRST, 2)
    assert sum(policy._hazards.used[FIRST]) == 1.0


def test_given_up_ghosts_are_losses() -> None:
    """What nobody asked for again would be no evidence against its class."""
    policy = HitDensity(2)
    for handle in range(50):
        if len(policy) == 2:
            policy.evict(policy.candidates(1))
        policy.touch([handle], Access.FILL)
    assert len(policy.ghosts()) == 2 * GHOSTS_PER_BLOCK
    assert sum(policy._hazards.lost[FIRST]) == len(policy.forgotten()) == 50 - 2 - 2 * GHOSTS_PER_BLOCK


def test_time_goes_on_after_a_restart() -> None:
    """After some hours, with 2**32 accesses, a restart would make all blocks as old as the hills, or brand new."""
    policy, again = HitDensity(4), HitDensity(4)
    policy._now = 3 * 2**33
    policy.touch([1], Access.FILL)
    policy._now += 2**34
    policy.touch([2], Access.FILL)
    again.restore(policy.snapshot())
    assert again._now == policy._now
    assert [again._columns[1][handle] for handle in (1, 2)] == [3 * 2**33 + 1, 5 * 2**33 + 2]
    assert again.candidates(2) == [1, 2]
    assert again.check() == []


def test_a_handle_twice_in_one_call_counts_once() -> None:
    """The census would count blocks that are not there."""
    policy = HitDensity(4)
    policy.touch([1, 1, 2, 1], Access.FILL)
    policy.touch([1, 1], Access.REUSE)
    policy.touch([2, 2], Access.RELEASE)
    policy.touch([3, 3], Access.MOVED)
    assert policy.check() == []
    assert len(policy) == 3


def test_a_hint_is_a_class_of_its_own() -> None:
    """What a serving layer knows would change nothing, or be taken for a use."""
    policy = HitDensity(10)
    policy.touch([4, 3, 2, 1], Access.FILL)
    assert policy.hint([2, 1, 1, 77], Hint(ends=True)) == 2
    assert policy.hint([3], Hint(returns_in=100)) == 1
    classes, _ = policy._columns
    assert [classes[handle] for handle in (1, 2, 3, 4)] == [ENDED, ENDED, class_hinted(100), FIRST]
    policy.touch([3, 1], Access.REUSE)
    assert (classes[3], classes[1]) == (class_after(ENDED, 1), class_after(ENDED, 2))
    assert policy.check() == []


def test_hints_are_judged_by_what_comes_of_them() -> None:
    """Wrong hints would empty the tier, for ever; or right ones be no better than none."""
    for right in (True, False):
        policy = HitDensity(400)
        for round_ in range(40):
            for prompt in range(20):
                new = right or not round_
                handles = [10 * (20 * round_ * new + prompt) + depth for depth in range(10)]
                policy.touch(handles, Access.FILL if new else Access.REUSE)
                policy.hint(handles, Hint(ends=True))
                if len(policy) > 400:
                    policy.evict(policy.candidates(len(policy) - 400))
        policy._learn()
        plain = policy._hazards.worth(FIRST, 100)
        assert (policy._hazards.worth(ENDED, 100) < 0.1 * max(plain, 1e-4)) == right


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remembered fronts would name a block that is not worth least, once worths, ages and lists have changed."""
    monkeypatch.setattr(hit_density, "_LEARN_EVERY_MIN", 30)
    rng = random.Random(seed)
    policy, resident = HitDensity(12), set[int]()
    for step in range(1500):
        handles = rng.sample(range(60), rng.randrange(1, 6))
        kind = rng.random()
        if kind < 0.5:
            new = [handle for handle in handles if handle not in resident]
            policy.touch(new, Access.FILL if kind < 0.4 else Access.MOVED)
            resident |= {*new}
            if (surplus := len(resident) - 12) > 0:
                victims = policy.candidates(1) * (surplus == 1) or policy.candidates(surplus)
                policy.evict(victims)
                resident -= {*victims}
        elif kind < 0.8:
            policy.touch(handles, Access.REUSE)
        elif kind < 0.9:
            policy.touch(handles, Access.RELEASE)
        elif kind < 0.93:
            policy.forget(handles)
            resident -= {*handles}
        elif kind < 0.96:
            policy.hint(handles, Hint(ends=True) if kind < 0.945 else Hint(returns_in=rng.randrange(99)))
        elif kind < 0.98:
            policy.resize(rng.randrange(8, 15))
        least = policy.candidates(1)
        assert policy.check() == []
        assert policy.candidates(1, pinned={-1}) == least  # the same choice, without what is remembered
        if step % 20 == 0:
            again = HitDensity(policy._blocks)
            again.restore(policy.snapshot())
            assert again.candidates(len(resident)) == policy.candidates(len(resident))
        assert len(policy) == len(resident)


@given(CALLS)
def test_victims_of_one_call_are_those_of_many(calls: list[tuple[Access, list[int], int]]) -> None:
    """A request that needs much room would push out others than many that need little."""
    together, apart = HitDensity(25), HitDensity(25)
    for policy in (together, apart):
        policy._learn_at = 40
    for access, handles, leave in calls:
        for policy in (together, apart):
            policy.touch(handles, access)
        chosen = together.candidates(leave)
        together.evict(chosen)
        for victim in chosen:
            assert apart.candidates(1) == [victim]
            apart.evict([victim])
        assert together.check() == apart.check() == []


def jobs(requests: int) -> Iterator[range]:
    """The blocks, deepest first, that jobs ask for which run at regular times: some often, most seldom."""
    rng = random.Random(1)
    due, first = list[tuple[float, float, range]](), 0
    for _ in range(150):
        blocks = rng.randint(3, 30)
        due.append((10 * rng.random(), 2 * 300 ** rng.random(), range(first + blocks - 1, first - 1, -1)))
        first += blocks
    heapify(due)
    for _ in range(requests):
        at, period, wanted = due[0]
        yield wanted
        heapreplace(due, (at + period, period, wanted))


def found_of_jobs(policy: Policy, blocks: int) -> int:
    resident, found = set[int](), 0
    for number, wanted in enumerate(jobs(3000)):
        found += len(resident.intersection(wanted)) * (number >= 1000)
        for handle in wanted:
            if handle in resident:
                policy.touch([handle], Access.REUSE)
                continue
            if len(resident) == blocks:
                victims = policy.candidates(1, incoming=handle)
                policy.evict(victims, handle)
                resident.difference_update(victims)
            policy.touch([handle], Access.FILL)
            resident.add(handle)
    return found


def test_jobs_at_regular_times_are_known() -> None:
    """Who comes back at regular times would be given up, being the oldest, shortly before that; all in vain."""
    little, more = HitDensity(250), HitDensity(500)
    assert found_of_jobs(little, 250) > 11_000  # 8,346 if the youngest did not compete; LRU and ARC: none
    assert found_of_jobs(more, 500) > 1.03 * found_of_jobs(ARC(500), 500)
    assert little.check() == more.check() == []


class Rising(Hazards):
    """A block is worth the more, the older it is."""

    def worth(self, class_: int, age: int) -> float:
        return float(age)

    def age_min(self, class_: int, age: int) -> int:
        return age

    def outlook(self, class_: int, age: int) -> tuple[float, int | None]:
        return float(age), age + 1


def test_of_those_that_were_just_used_the_deep_ones_leave() -> None:
    """What stays of a prompt would be its end, which helps nobody."""
    policy = HitDensity(40)
    policy._hazards = Rising()
    policy._count_anew()
    policy.touch([15, 14, 13, 12, 11, 10], Access.FILL)
    policy.touch([35, 34, 33, 32, 31, 30, 29, 28], Access.MOVED)
    assert policy.candidates(8) == policy.candidates(8, pinned={-1}) == [35, 34, 33, 32, 31, 30, 29, 28]
    for victim in (35, 34):
        assert policy.candidates(1) == [victim]
        policy.evict([victim])
    policy.touch([32], Access.REUSE)  # from amidst them: what was used before it is a run of its own
    assert policy.candidates(7) == policy.candidates(7, pinned={-1}) == [32, 31, 30, 29, 28, 33, 15]
    policy.touch([9, 8, 7], Access.FILL)
    policy.touch([6, 5], Access.FILL)  # right after them: one run
    assert policy.candidates(6) == policy.candidates(6, pinned={-1}) == [9, 8, 7, 6, 5, 32]
    assert policy.candidates(4, pinned={8, 6}) == [9, 7, 5, 32]
    assert policy.check() == []


def test_it_learns_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned first would hold for ever, or count as much as what happened since."""
    monkeypatch.setattr(hit_density, "_HISTORY_MIN", 1000)
    policy = HitDensity(10)
    for _ in range(300):
        policy.touch(range(9, -1, -1), Access.FILL)
        policy.touch(range(9, -1, -1), Access.REUSE)
        policy.forget(range(10))
    policy._learn()
    at_first, uses = policy._hazards.worth(FIRST, 5), sum(policy._hazards.used[FIRST])
    assert uses < 1000, "of 3000, the early ones count for less"
    for start in range(10, 60_010, 10):
        policy.touch(range(start + 9, start - 1, -1), Access.FILL)
        policy.evict(policy.candidates(10 if start > 10 else 0))
    assert policy._hazards.worth(FIRST, 5) < at_first / 5
    assert sum(policy._hazards.used[FIRST]) < uses / 10


def prefix_tokens(policy: Policy, blocks: int) -> int:
    """Of the first 1,500 requests of the published trace; blocks are touched deepest first."""
    resident: set[int] = set()
    tokens = 0
    for line in lzma.decompress(TRACE.read_bytes()).decode().splitlines()[:1500]:
        tokens_in, *runs = line.split()
        pairs = [tuple(map(int, run.split("+"))) for run in runs]
        ids = [block for first, count in pairs for block in range(first, first + count)]
        leading = sum(1 for _ in takewhile(resident.__contains__, ids))
        tokens += int(tokens_in) if leading == len(ids) else 512 * leading
        for block in reversed(ids):
            if block in resident:
                policy.touch([block], Access.REUSE)
                continue
            if len(resident) == blocks:
                victims = policy.candidates(1, incoming=block)
                policy.evict(victims, incoming=block)
                resident.difference_update(victims)
            policy.touch([block], Access.FILL)
            resident.add(block)
    return tokens


def test_it_finds_more_than_lru_and_arc() -> None:
    """All that is learned would be worth nothing; or a change of its numbers pass unseen, for better or worse."""
    policy = HitDensity(BLOCKS_2_PERCENT)
    others = max(prefix_tokens(make(BLOCKS_2_PERCENT), BLOCKS_2_PERCENT) for make in (LRU, ARC))
    found = prefix_tokens(policy, BLOCKS_2_PERCENT)
    assert found > 1.2 * others
    assert found == pytest.approx(428_890, rel=0.02)
    assert policy.check() == []
