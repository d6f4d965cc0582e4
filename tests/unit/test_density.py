"""What hit_density learns: classes, ages, the census, hazards, and what that makes of blocks."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_losses_of_a_run_are_those_of_each() -> None:
    """Ghosts that are given up together would teach another age than their own."""
    together, apart = Hazards(), Hazards()
    for age, blocks in ((0, 1), (1, 1), (7, 7), (40, 40), (1000, 700), (5, 5)):
        together.note_losses(FIRST, age, blocks)
        for younger in range(blocks):
            apart.note_losses(FIRST, age - younger, 1)
    assert together.lost == apart.lost
