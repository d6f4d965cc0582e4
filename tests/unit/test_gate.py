"""Who is let into a tier as its wear budget empties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.admission import ADMISSIONS, MEMORY_PER_BLOCK
from kvtier.policies.gate import EASED, Gate
from kvtier.policies.wear import WearBudget

BURST = 1000.0


def gate_with(rule: str = "always", blocks: int = 100, budget: bool = True) -> Gate:
    return Gate(ADMISSIONS.get(rule)(blocks), blocks, WearBudget(1e6, BURST) if budget else None)


def let_in(gate: Gate, left: float) -> list[int]:
    """Of six blocks, used as often as their numbers say, those who are let in with so much left."""
    return [handle for handle in range(6) if gate.admits(handle, left)]


def used(gate: Gate) -> Gate:
    for handle in range(6):
        gate.note_use([handle] * handle)
    return gate


@pytest.mark.parametrize(
    ("left", "least"), [(1000, 0), (501, 0), (500, 2), (251, 2), (250, 3), (126, 3), (125, 4), (1, 4), (0, 6), (-9, 6)]
)
def test_the_less_is_left_the_more_uses_are_needed(left: float, least: int) -> None:
    """The budget would be spent on blocks that nobody comes back for, or be kept for nobody."""
    assert let_in(used(gate_with()), left) == [*range(least, 6)]


@given(st.floats(-BURST, 2 * BURST), st.floats(-BURST, 2 * BURST))
def test_who_is_let_in_with_little_left_is_let_in_with_more(one: float, other: float) -> None:
    """A fuller budget would refuse whom an emptier one takes: the disk is written less than it may be."""
    gate = used(gate_with())
    assert {*let_in(gate, min(one, other))} <= {*let_in(gate, max(one, other))}


def test_the_rule_holds_whatever_is_left() -> None:
    """A tier with a rule of its own would be written everything as long as there is budget."""
    gate = gate_with("second_access")
    gate.note_use([1, 2, 2])
    assert [gate.admits(handle, BURST) for handle in (1, 2)] == [False, True]
    assert not gate.admits(2, 0)


def test_without_a_budget_it_is_the_rule_alone() -> None:
    """A rule without a budget would refuse everything, or remember uses that nobody asks for."""
    gate = gate_with("ghost_hit", budget=False)
    gate.note_use([1])
    assert not gate.admits(1, float("inf"))
    assert not gate.remembers(1)
    gate.note_refusal([1])
    assert gate.admits(1, float("inf"))
    assert not gate.has_eased(float("inf"))


def test_only_a_rule_that_compares_asks_for_a_victim() -> None:
    """Looking for one walks the policy's order for every batch."""
    assert [name for name in ADMISSIONS if gate_with(name).compares] == ["tinylfu"]


def test_a_budget_recovers_once_and_well_above_where_it_got_tight() -> None:
    """All that was refused would be asked about again in every turn."""
    gate = gate_with()
    assert not gate.has_eased(BURST)  # it was never tight
    assert not gate.has_eased(BURST / 2)
    assert not gate.has_eased(EASED * BURST - 1)
    assert gate.has_eased(EASED * BURST)
    assert not gate.has_eased(BURST)


@pytest.mark.parametrize("rule", ["always", "second_access", "ghost_hit", "tinylfu"])
def test_what_is_remembered_is_bounded_and_told(rule: str) -> None:
    """The directory would keep names for ever, or give one that still counts to another key."""
    gate = gate_with(rule, blocks=3)
    for handle in range(100):
        gate.note_use([handle])
        gate.note_refusal([handle])
    kept = [handle for handle in range(100) if gate.remembers(handle)]
    told = gate.forgotten()
    assert sorted(kept + told) == [*range(100)]
    assert len(kept) <= 2 * 3 * MEMORY_PER_BLOCK
    gate.forget(kept)
    assert not any(map(gate.remembers, kept))
    assert let_in(gate, BURST / 4) == []
