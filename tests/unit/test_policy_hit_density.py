"""hit_density: what it learns, what that makes of blocks, and what it reaches on a published trace."""

import lzma
import math
import pathlib
import random
from collections.abc import Iterator
from heapq import heapify, heapreplace
from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies import hit_density
from kvtier.policies.arc import ARC
from kvtier.policies.base import Access, Hint, Policy
from kvtier.policies.density import hazards as hazards_module
from kvtier.policies.density.ages import BUCKETS, EDGES
from kvtier.policies.density.census import Census
from kvtier.policies.density.classes import (
    CLASSES,
    ENDED,
    ENDED_SHARED,
    FIRST,
    MOVED,
    class_after,
    class_hinted,
    neighbours,
)
from kvtier.policies.density.hazards import Hazards
from kvtier.policies.density.keeping import pack_hazards, unpack_hazards
from kvtier.policies.hit_density import GHOSTS_PER_BLOCK, HitDensity
from kvtier.policies.lru import LRU

TRACE = pathlib.Path(__file__).parents[1] / "data/mooncake_synthetic.txt.xz"
BLOCKS_2_PERCENT = 878


# ---------------------------------------------------------------- classes and ages


def test_classes_tell_uses_and_gaps_apart() -> None:
    """Blocks of different promise would be counted together, or one and the same promise be learned many times."""
    assert class_after(FIRST, 100) == class_after(FIRST, 110) != class_after(FIRST, 200)
    assert class_after(FIRST, 100) != class_after(class_after(FIRST, 100), 100)
    assert class_after(class_after(FIRST, 5), 100) == class_after(MOVED, 100) == class_after(class_after(MOVED, 9), 100)
    reached = {class_after(before, int(2 ** (half / 2))) for before in (FIRST, MOVED) for half in range(200)}
    hinted = {class_hinted(None)} | {class_hinted(2**octave) for octave in range(60)}
    assert {1, 2} | reached | hinted <= set(range(1, CLASSES + 1))
    assert not reached & hinted


@pytest.mark.parametrize("class_", range(1, CLASSES + 1))
def test_neighbours_are_mutual(class_: int) -> None:
    """A class would learn from blocks that were used more or less often than its own."""
    near = dict(neighbours(class_))
    assert near[class_] == 1.0
    for other, weight in near.items():
        assert dict(neighbours(other))[class_] == weight <= 1.0
    assert len(near) == 1 if class_ in (FIRST, MOVED, ENDED, ENDED_SHARED) else 5 <= len(near) <= 9


def test_ages_reach_far() -> None:
    """An age would be in no bucket, or in two."""
    assert EDGES[0] == 1
    assert EDGES[-1] >= 2**40
    assert all(after - before >= 1 for before, after in pairwise(EDGES))


def test_a_census_forgets_what_it_has_not() -> None:
    """Counts of what is long gone would pile up, or ages be those of other blocks."""
    census = Census(160)
    for time in (5, 6, 123):
        census.add(FIRST, time)
    census.add(MOVED, 6)
    assert sorted(census.living(200)) == [(FIRST, 75, 1), (FIRST, 195, 2), (MOVED, 195, 1)]
    for time in (6, 5):
        census.remove(FIRST, time)
    assert sorted(census.living(200)) == [(FIRST, 75, 1), (MOVED, 195, 1)]
    census.remove(FIRST, 123)
    census.remove(MOVED, 6)
    assert not census.counts


# ---------------------------------------------------------------- what is learned


def learned(lives: list[tuple[int, int, bool]], times: int = 1) -> Hazards:
    """From lives of blocks: class, age at the end, whether that was a use."""
    hazards = Hazards()
    for class_, age, used in lives * times:
        (hazards.note_use if used else hazards.note_losses)(class_, age, 1)
    hazards.learn([], faded=1.0)
    return hazards


def test_without_data_the_older_is_worth_less() -> None:
    """A policy that knows nothing yet would not be LRU."""
    hazards = Hazards()
    hazards.note_use(FIRST, 1)
    hazards.learn([(FIRST, 10**6, 1)], faded=1.0)
    worths = [hazards.worth(FIRST, age) for age in (10, 100, 1000, 10**4, 10**5)]
    assert all(before > after for before, after in pairwise(worths))


def test_a_class_that_never_returns_is_worth_little() -> None:
    """One-time blocks would push out those that return."""
    often = class_after(MOVED, 1000)
    lives = [(often, age, True) for age in range(500, 1500, 10)] + [(FIRST, 20_000, False)] * 100
    hazards = learned(lives, times=20)
    assert hazards.worth(FIRST, 100) < hazards.worth(often, 100) / 10
    assert hazards.worth(often, 1000) > hazards.worth(often, 5)  # it will come back, and soon now


def test_losses_count() -> None:
    """Ten returns of ten blocks would say no more than ten of a thousand."""
    sure = learned([(FIRST, 100, True)] * 500)
    rare = learned([(FIRST, 100, True)] * 500 + [(FIRST, 100_000, False)] * 50_000)
    assert rare.worth(FIRST, 10) < sure.worth(FIRST, 10) / 20


def test_what_lives_is_exposure_too() -> None:
    """Blocks that wait and are not used would be no evidence until they are given up."""
    few, many = Hazards(), Hazards()
    for hazards, living in ((few, 10), (many, 50_000)):
        for _ in range(500):
            hazards.note_use(FIRST, 100)
        hazards.learn([(FIRST, 100_000, living)], faded=1.0)
    assert many.worth(FIRST, 10) < few.worth(FIRST, 10) / 20


def test_neighbouring_gaps_teach_each_other() -> None:
    """A class of which too little was seen would be judged by chance."""
    seen = class_after(MOVED, 1000)
    near, far = seen + 1, seen + 20
    lives = [(seen, 800, True)] * 3000 + [(FIRST, 50_000, False)] * 3000 + [(near, 5, True), (far, 5, True)]
    hazards = learned(lives)
    assert hazards.worth(near, 700) > 1.5 * hazards.worth(far, 700)


def test_what_is_learned_fades() -> None:
    """A change of traffic would never be noticed."""
    hazards = Hazards()
    for _ in range(8):
        hazards.note_use(FIRST, 50)
    hazards.note_losses(FIRST, 50, 1)
    hazards.learn([], faded=0.5)
    assert sum(hazards.used[FIRST]) == 4.0
    assert sum(hazards.lost[FIRST]) == 0.5


def test_who_ends_within_a_bucket_has_crossed_half_of_it() -> None:
    """Exposure is overestimated, most of all at young ages, and a class that returns at once seems to be worth less."""
    exposed = hazards_module._exposed(np.array([[2.0, 4.0], [0.0, 6.0]]), np.array([10.0, 20.0]))
    assert exposed.tolist() == [[(4 + 1) * 10.0, 2 * 20.0], [6 * 10.0, 3 * 20.0]]


@given(st.lists(st.tuples(st.just(0.0) | st.floats(1e-9, 5.0), st.floats(0.1, 50.0)), min_size=1, max_size=12))
def test_the_worth_is_the_best_over_all_horizons(steps: list[tuple[float, float]]) -> None:
    """A block would be given up shortly before it comes back: the horizon is missed that pays most."""
    rates, widths = [rate for rate, _ in steps], [width for _, width in steps]
    [worths] = hazards_module._worths(np.array([rates]), np.array(widths))
    for begin in range(len(steps)):
        best = uses = kept = 0.0
        alive = 1.0
        for rate, width in steps[begin:]:
            used = -alive * math.expm1(-rate * width)
            uses += used
            kept += used / rate if rate > 0 else alive * width
            alive -= used
            if alive < 1e-6:  # from here on rounding decides
                break
            best = max(best, uses / kept)
        if sum(rate * width for rate, width in steps) < 10:
            assert worths[begin] == pytest.approx(best, rel=1e-4, abs=1e-9)


def test_hazards_are_kept_whole() -> None:
    """After a restart other worths would hold than before."""
    hazards = learned([(FIRST, 10, True), (class_after(FIRST, 9), 70, True), (MOVED, 10**7, False)], times=100)
    again = unpack_hazards(pack_hazards(hazards))
    for name in ("used", "lost", "first", "last", "edges", "worths", "pooled"):
        assert getattr(again, name) == getattr(hazards, name), name
    assert pack_hazards(unpack_hazards(pack_hazards(Hazards()))) == pack_hazards(Hazards())


def test_hazards_that_cannot_be_are_refused() -> None:
    """A snapshot whose sum is right but whose content is not would break every choice from then on."""
    cells = pack_hazards(learned([(FIRST, 10, True)], times=10))
    for wrong in (
        cells[:-1],
        [*cells, 0],
        [],
        [5, 4, *cells[2:]],
        [0, BUCKETS, *cells[2:]],
        [*cells[:2], 9, *cells[3:]],
    ):
        with pytest.raises(ValueError):
            unpack_hazards(wrong)
    with pytest.raises(ValueError, match="class"):
        unpack_hazards([*cells[:4], CLASSES + 1, *cells[5:]])
    with pytest.raises(ValueError, match="bucket"):
        unpack_hazards([*cells[:5], BUCKETS, *cells[6:]])


# ---------------------------------------------------------------- the policy


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


def test_losses_of_a_run_are_those_of_each() -> None:
    """Ghosts that are given up together would teach another age than their own."""
    together, apart = Hazards(), Hazards()
    for age, blocks in ((0, 1), (1, 1), (7, 7), (40, 40), (1000, 700), (5, 5)):
        together.note_losses(FIRST, age, blocks)
        for younger in range(blocks):
            apart.note_losses(FIRST, age - younger, 1)
    assert together.lost == apart.lost


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
