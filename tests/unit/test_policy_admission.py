"""Who is let into a tier, and what a disk may be written per day."""

import pytest

from kvtier.errors import InvariantError, UsageError
from kvtier.policies.admission import ADMISSIONS, MEMORY_PER_BLOCK, Admission
from kvtier.policies.wear import WearBudget

DAY_S = 86_400.0


@pytest.fixture(params=list(ADMISSIONS))
def admission(request: pytest.FixtureRequest) -> Admission:
    return ADMISSIONS.get(request.param)(3)


def test_a_verdict_changes_nothing(admission: Admission) -> None:
    """A plan that is dropped would decide the next one."""
    for _ in range(3):
        assert admission.admits(5) == admission.admits(5)
        assert not admission.remembers(5)


def test_what_is_remembered_is_bounded_and_told(admission: Admission) -> None:
    """The directory would keep names for ever, or give one that still counts to another key."""
    handles = range(100)
    for handle in handles:
        admission.note_use([handle])
        admission.note_refusal([handle])
    kept = [handle for handle in handles if admission.remembers(handle)]
    told = admission.forgotten()
    assert len(kept) <= 3 * MEMORY_PER_BLOCK
    assert not {*kept} & {*told}
    if kept:
        assert sorted([*kept, *told]) == [*handles]
    assert admission.forgotten() == []


def test_a_forgotten_handle_is_as_one_never_seen(admission: Admission) -> None:
    """The handle, given to another key, would inherit a history."""
    fresh = admission.admits(50, victim=51)
    admission.note_use([5, 5, 5])
    admission.note_refusal([5])
    admission.forget([5, 6])
    assert not admission.remembers(5)
    assert admission.admits(5, victim=51) == fresh
    assert admission.forgotten() == []


def test_one_that_comes_back_was_not_given_up() -> None:
    """A name would be taken away from what is remembered."""
    admission = ADMISSIONS.get("second_access")(1)
    admission.note_use(range(5))
    admission.note_use([0])
    assert admission.remembers(0)
    assert admission.forgotten() == [1]


def test_who_was_noted_longest_ago_is_given_up() -> None:
    """A block that is used all the time would be forgotten, because it was known early."""
    admission = ADMISSIONS.get("second_access")(1)
    admission.note_use(range(MEMORY_PER_BLOCK))
    admission.note_use([0])
    admission.note_use([99])
    assert admission.forgotten() == [1]
    assert admission.admits(0)


def test_always() -> None:
    """Blocks would be kept out of a tier that has no reason to."""
    assert ADMISSIONS.get("always")(0).admits(1, victim=2)


def test_second_access() -> None:
    """Blocks that are used once would be written, or those used again not."""
    admission = ADMISSIONS.get("second_access")(4)
    admission.note_use([1, 2])
    assert not admission.admits(1)
    admission.note_refusal([1, 2])
    admission.note_use([1])
    assert admission.admits(1)
    assert not admission.admits(2)


def test_ghost_hit() -> None:
    """A block would be refused for ever, or its uses elsewhere count as offers."""
    admission = ADMISSIONS.get("ghost_hit")(4)
    admission.note_use([1, 1])
    assert not admission.admits(1)
    admission.note_refusal([1])
    assert admission.admits(1)


def test_tinylfu() -> None:
    """A block would push out one that is used more often."""
    admission = ADMISSIONS.get("tinylfu")(10)
    admission.note_use([1, 2, 2, 3, 3])
    assert admission.admits(2, victim=1)
    assert not admission.admits(3, victim=2)
    assert not admission.admits(1, victim=2)
    assert admission.admits(1)
    admission.note_use([9] * 95)  # 100 uses of 10 blocks: all counts are halved
    assert not admission.admits(1, victim=77)
    assert admission.admits(2, victim=1)
    assert admission.remembers(1)


def test_a_negative_tier_is_an_error(admission: Admission) -> None:
    """A wrong sum would be taken for a tier that remembers nothing."""
    with pytest.raises(InvariantError):
        type(admission)(-1)


def test_wear_is_paid_in_advance_up_to_a_burst() -> None:
    """A disk would be worn out on the first day, or never be written."""
    budget = WearBudget(bytes_per_day=DAY_S * 100, burst_bytes=1000, now_s=50.0)
    assert budget.saved_bytes(50.0) == 1000
    budget.spend(1500, 50.0)
    assert budget.saved_bytes(50.0) == -500
    assert budget.saved_bytes(54.9) == pytest.approx(-10)
    assert budget.saved_bytes(56.0) == pytest.approx(100)
    assert budget.saved_bytes(10_000.0) == 1000  # a long pause saves no more than the burst


def test_a_clock_that_runs_back_pays_nothing() -> None:
    """Time that is seen twice would be paid twice."""
    budget = WearBudget(bytes_per_day=DAY_S, burst_bytes=10, now_s=100.0)
    budget.spend(20, 100.0)
    assert budget.saved_bytes(50.0) == -10
    assert budget.saved_bytes(109.0) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("saved", "away_s", "left"), [(-50, 30.0, -20), (-50, 1e9, 100), (40, 0.0, 40), (900, 0.0, 100), (40, -30.0, 40)]
)
def test_a_budget_goes_on_where_another_process_stopped(saved: int, away_s: float, left: int) -> None:
    """A restart would give a debt back, or a clock that was set back pay for nothing; or a smaller burst not hold."""
    budget = WearBudget(bytes_per_day=DAY_S, burst_bytes=100, now_s=7.0)
    budget.resume(saved, away_s, 7.0)
    assert budget.saved_bytes(7.0) == pytest.approx(left)
    assert budget.saved_bytes(8.0) == pytest.approx(min(100, left + 1))


@pytest.mark.parametrize(("per_day", "burst"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_budget_of_nothing_is_refused(per_day: float, burst: float) -> None:
    """A tier would never be written, and nobody be told why."""
    with pytest.raises(UsageError, match="make both positive"):
        WearBudget(per_day, burst, now_s=0.0)
