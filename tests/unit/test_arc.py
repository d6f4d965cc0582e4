"""ARC against its paper, access by access, and what it does where the paper is silent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvariantError
from kvtier.policies.arc import ARC
from kvtier.policies.base import Access, Hint
from kvtier.policies.snapshot import SnapshotFormat
from tests.arc_state import arc_state
from tests.textbook import TextbookARC


def access(policy: ARC, blocks: int, handle: int, resident: set[int]) -> None:
    """One access to a tier that holds `blocks`, by the verbs."""
    if handle in resident:
        policy.touch([handle], Access.REUSE)
        return
    if len(resident) == blocks:
        victims = policy.candidates(1, incoming=handle)
        policy.evict(victims, incoming=handle)
        resident.difference_update(victims)
    policy.touch([handle], Access.FILL)
    resident.add(handle)


def after(blocks: int, accesses: list[int]) -> ARC:
    policy, resident = ARC(blocks), set[int]()
    for handle in accesses:
        access(policy, blocks, handle, resident)
    return policy


def lists(policy: ARC) -> tuple[list[int], list[int], list[int], list[int]]:
    state = arc_state(policy.snapshot())
    return state.t1, state.t2, state.b1, state.b2


@given(st.integers(1, 5), st.lists(st.integers(0, 12), min_size=30, max_size=100))
def test_it_is_the_papers_after_every_access(blocks: int, accesses: list[int]) -> None:
    """The wrong block leaves, or p runs away, and only a long trace would show it."""
    policy, paper, resident = ARC(blocks), TextbookARC(blocks), set[int]()
    known: set[int] = set()
    for handle in accesses:
        access(policy, blocks, handle, resident)
        paper.access(handle)
        known.add(handle)
        assert lists(policy) == (list(paper.t1), list(paper.t2), list(paper.b1), list(paper.b2))
        assert policy.p == paper.p
        assert policy.check() == []
        remembered = {*paper.t1, *paper.t2, *paper.b1, *paper.b2}
        assert set(policy.forgotten()) == known - remembered
        known &= remembered


def test_a_return_is_counted_once() -> None:
    """A second victim for the same block, or the fill after the first, moves p again."""
    policy = after(4, [1, 2, 1, 2, 3, 4, 5])
    assert lists(policy) == ([4, 5], [1, 2], [3], [])
    policy.evict([4], incoming=3)
    policy.evict([5], incoming=3)
    assert policy.p == 1.0
    policy.touch([3], Access.FILL)
    assert policy.p == 1.0
    assert lists(policy) == ([], [1, 2, 3], [4, 5], [])
    policy.touch([4], Access.FILL)
    assert policy.p == 2.0


def test_a_ghost_given_up_is_counted_anew() -> None:
    """A block that was counted, dropped and came back never moves p again."""
    policy = after(4, [1, 2, 1, 2, 3, 4, 5])
    policy.evict([], incoming=3)
    policy.touch([6, 7], Access.FILL)
    assert policy.forgotten() == [3]
    assert policy.check() == []
    policy.evict([4])
    policy.evict([], incoming=4)
    policy.forget([4])
    assert policy.check() == []


def test_several_victims_for_one() -> None:
    """All victims come from one list, although REPLACE asked again would have gone to the other."""
    policy = after(6, [1, 2, 3, 1, 2, 3, 4, 5, 6, 7])
    assert lists(policy) == ([5, 6, 7], [1, 2, 3], [4], [])
    assert policy.candidates(4) == [5, 6, 7, 1]
    assert policy.candidates(4, incoming=4) == [5, 6, 1, 2]
    assert policy.candidates(5, incoming=4) == [5, 6, 1, 2, 3]
    assert policy.candidates(6, incoming=4) == [5, 6, 1, 2, 3, 7]
    assert policy.candidates(3, pinned={5, 6, 7}) == [1, 2, 3]


def test_choosing_looks_no_further_than_it_must() -> None:
    """Each victim of a large tier costs a walk through all of it."""
    policy = ARC(1000)
    policy.touch(range(2000), Access.FILL)
    asked: list[object] = []

    class Pinned(set[int]):
        def __contains__(self, handle: object) -> bool:
            asked.append(handle)
            return handle in (0, 1)

    assert policy.candidates(3, Pinned()) == [2, 3, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_a_fill_or_release_is_no_second_access() -> None:
    """Every block lands in T2, and ARC is an LRU."""
    policy = ARC(4)
    policy.touch([1, 2, 3], Access.FILL)
    policy.touch([3, 2, 1], Access.RELEASE)
    assert lists(policy) == ([3, 2, 1], [], [], [])
    policy.touch([2], Access.FILL)
    assert lists(policy) == ([3, 1, 2], [], [], [])
    policy.touch([3, 2], Access.REUSE)
    policy.touch([2, 1, 3], Access.RELEASE)
    policy.touch([2], Access.FILL)
    assert lists(policy) == ([1], [3, 2], [], [])


def test_a_moved_block_keeps_its_frequency() -> None:
    """In a tier that only sees what another gave up, T2 stays empty, and ARC is an LRU."""
    policy = ARC(2)
    policy.touch([1, 2], Access.MOVED)
    assert lists(policy) == ([], [1, 2], [], [])
    policy.evict([1])
    policy.touch([3], Access.FILL)
    policy.touch([1], Access.MOVED)
    assert lists(policy) == ([3], [2, 1], [], [])
    assert policy.p == 0.0
    policy.touch([3], Access.MOVED)
    assert lists(policy) == ([], [2, 1, 3], [], [])


def test_p_stays_within_the_tier() -> None:
    """After a shrink, T1 is to be larger than the tier, and T2 gives all."""
    policy = after(4, [1, 2, 1, 2, 3, 4, 5, 3, 4])
    assert policy.p == 2.0
    policy.resize(1)
    assert policy.p == 1.0
    assert policy.check() == []
    policy.resize(0)
    assert policy.p == 0.0
    assert policy.ghosts() == []


def test_misuse_is_an_error() -> None:
    """A wrong handle or size means another block in silence."""
    policy = ARC(2)
    for handle, size_class in ((4, 2**32), (4, -1), (-1, 0), (2**31, 0)):
        with pytest.raises(InvariantError):
            policy.touch([handle], Access.FILL, size_class)
    assert len(policy) == 0
    with pytest.raises(InvariantError):
        policy.resize(-1)
    with pytest.raises(InvariantError):
        ARC(-1)
    assert policy.check() == []


FORMAT = SnapshotFormat("arc", b"KVTARC\x00\x02", head="dI", columns=8)
GOOD = [[1, 2], [3], [], [], [4], [5, 6], [0, 4096, 4096], [6]]


def test_what_cannot_be_is_refused() -> None:
    """A snapshot whose sum is right but whose content is not breaks the lists."""
    policy = ARC(4)
    policy.restore(FORMAT.pack((1.5, 4), GOOD))
    before = policy.snapshot()
    assert before == FORMAT.pack((1.5, 4), GOOD)
    for p in (-0.5, 4.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="its p"):
            policy.restore(FORMAT.pack((p, 4), GOOD))
    for at, column, message in [
        (1, [1], "twice"),
        (0, [1, 1], "twice"),
        (4, [2**32 - 1], "out of range"),
        (2, [7], "4 residents with 3 size classes"),
        (2, [3], "twice"),
        (3, [7], "4 residents with 3 size classes"),
        (6, [0, 4096], "3 residents with 2 size classes"),
        (7, [3], "came back"),
    ]:
        columns = [*GOOD[:at], column, *GOOD[at + 1 :]]
        with pytest.raises(ValueError, match=message):
            policy.restore(FORMAT.pack((1.5, 4), columns))
    assert policy.snapshot() == before


def test_what_has_ended_leaves_first_and_is_no_ghost() -> None:
    """A session that is over would push out one that goes on, or its return teach ARC that T1 is too small."""
    policy = after(7, [1, 2, 3, 4, 5, 6, 1])  # T1: 2 3 4 5 6, T2: 1
    p = policy.p
    assert policy.hint([6], Hint(ends=True, shared=True)) == 1
    assert policy.hint([3, 1, 77], Hint(ends=True)) == 2
    assert policy.hint([2], Hint(returns_in=5)) == 0
    assert policy.candidates(4) == [3, 1, 6, 2]
    again = ARC(7)
    again.restore(policy.snapshot())
    assert again.candidates(5) == policy.candidates(5)
    policy.touch([1], Access.REUSE)  # it was not over: used twice, as if nothing had been said
    assert policy.candidates(6) == [3, 6, 2, 4, 5, 1]
    policy.evict([3])
    assert not policy.remembers(3)
    policy.touch([3], Access.FILL)
    assert policy.p == p
    assert policy.check() == []


@pytest.mark.parametrize(
    ("access", "order"), [(Access.RELEASE, [1, 2, 3]), (Access.FILL, [1, 2, 3]), (Access.MOVED, [1, 2, 3])]
)
def test_whoever_touches_what_has_ended_takes_it_back(access, order) -> None:
    """A block would leave first though a request has just used it."""
    policy = after(3, [3, 1, 2])
    policy.hint([3], Hint(ends=True))
    policy.touch([3], access)
    assert policy.candidates(3) == order
    assert policy.check() == []


@pytest.mark.parametrize("access", [Access.FILL, Access.RELEASE])
def test_what_had_ended_and_comes_back_has_no_more_room_than_before(access) -> None:
    """Ghosts stay beside a T1 that has grown past its bound, and the directory keeps their names for ever."""
    policy = after(4, [1, 2, 3, 4])
    policy.hint([1, 2, 3], Hint(ends=True))
    policy.evict([4])
    policy.touch([5], Access.FILL)
    policy.evict([5])
    assert (policy.ghosts(), policy.check()) == ([4, 5], [])
    policy.touch([1, 2, 3], access)
    assert (policy.ghosts(), policy.forgotten(), policy.check()) == ([5], [4], [])


def test_restoring_tells_of_the_ghosts_before() -> None:
    """The directory keeps names that no policy remembers."""
    policy = after(2, [7, 8, 7, 9])
    assert policy.ghosts() == [8]
    policy.restore(after(2, [1, 2]).snapshot())
    assert policy.forgotten() == [8]


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda policy: policy._orders.lens.__setitem__(1, 7), "7 counted"),
        (lambda policy: setattr(policy, "_blocks", 1), "too long"),
        (lambda policy: setattr(policy, "p", 4.5), "p is 4.5"),
        (lambda policy: policy._counted.add(1), "no ghost"),
        (lambda policy: policy._orders.move([99], 1), "without a size class"),
    ],
)
def test_check_sees_damage(damage, finding) -> None:
    """The recount passes over damage, and every test that relies on it proves nothing."""
    policy = after(4, [1, 2, 1, 2, 3, 4, 5])
    damage(policy)
    assert any(finding in text for text in policy.check())
