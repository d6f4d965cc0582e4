"""Orders against plain lists, and policies that are told of many handles against some that are told of each."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvariantError
from kvtier.policies import hit_density, size_classes
from kvtier.policies import orders as orders_module
from kvtier.policies.arc import ARC
from kvtier.policies.base import Access, Hint
from kvtier.policies.hit_density import HitDensity
from kvtier.policies.lru import LRU
from kvtier.policies.orders import NOWHERE, Orders

ORDERS = (1, 2, 3)
HANDLES = st.lists(st.integers(0, 20), max_size=6)  # a handle may come twice
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), HANDLES, st.sampled_from(ORDERS), st.none() | st.sets(st.sampled_from(ORDERS))),
        st.tuples(st.just("remove_all"), st.lists(st.integers(0, 20), max_size=4)),
        st.tuples(st.just("pop"), st.sampled_from(ORDERS), st.integers(0, 3)),
    ),
    max_size=60,
)


@contextmanager
def batches_from(long_batch: int) -> Iterator[None]:
    """Calls of so many handles are long ones; logs are swept as soon as half of them is struck out."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (orders_module, size_classes, hit_density):
            patch.setattr(module, "LONG_BATCH", long_batch)
        patch.setattr(orders_module, "SLACK_ENTRIES", 1)
        yield


class Lists:
    """The same verbs on three lists; raises ValueError where orders must refuse."""

    def __init__(self) -> None:
        self.orders: dict[int, list[int]] = {order: [] for order in ORDERS}

    def ring_of(self, handle: int) -> int:
        return next((order for order, members in self.orders.items() if handle in members), NOWHERE)

    def move(self, handles: list[int], order: int, sources: set[int] | None) -> None:
        for handle in handles:
            here = self.ring_of(handle)
            if sources is None or here in {*sources, order}:
                if here != NOWHERE:
                    self.orders[here].remove(handle)
                self.orders[order].append(handle)

    def remove_all(self, handles: list[int]) -> None:
        if len(set(handles)) < len(handles) or not all(map(self.ring_of, handles)):
            raise ValueError
        for handle in handles:
            self.orders[self.ring_of(handle)].remove(handle)

    def pop(self, order: int, count: int) -> list[int]:
        taken, self.orders[order] = self.orders[order][:count], self.orders[order][count:]
        return taken


@pytest.mark.parametrize("long_batch", [1, 3, 64])
@given(steps=STEPS)
def test_they_keep_the_order_of_lists(long_batch: int, steps: list[tuple]) -> None:
    """A handle lies in the wrong list, in two, or in none; or long batches end up elsewhere than short ones."""
    orders, model = Orders(len(ORDERS)), Lists()
    with batches_from(long_batch):
        for verb, *arguments in steps:
            try:
                expected = getattr(model, verb)(*arguments)
            except ValueError:
                with pytest.raises(InvariantError):
                    getattr(orders, verb)(*arguments)
                return  # who stands before the wrong one may be out
            assert getattr(orders, verb)(*arguments) == expected
            assert {order: list(orders.walk(order)) for order in ORDERS} == model.orders
            assert {order: orders.members(order).tolist() for order in ORDERS} == model.orders
            assert {order: list(orders.walk_back(order))[::-1] for order in ORDERS} == model.orders
            assert [orders.first(order) for order in ORDERS] == [model.orders[order][:1] for order in ORDERS]
            assert orders.first(*ORDERS) == [handle for order in ORDERS for handle in model.orders[order]][:1]
            assert [orders.lens[order] for order in ORDERS] == [len(model.orders[order]) for order in ORDERS]
            assert [orders.ring_of(handle) for handle in range(25)] == [model.ring_of(handle) for handle in range(25)]
            assert orders.check() == []


@pytest.mark.parametrize("many", [1, 100])
@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_what_is_no_handle_is_refused(many: int, wrong: int) -> None:
    """It would be counted as the last one there is, or ask for gigabytes."""
    orders = Orders(2)
    orders.move([4], 1)
    handles = [*range(5, 5 + many), wrong]
    assert orders.ring_of(wrong) == NOWHERE
    with pytest.raises(InvariantError):
        orders.move(handles, 1)
    with pytest.raises(InvariantError):
        orders.remove_all([4, *handles[1:]])
    orders.move(handles, 2, sources=(1, 2))
    assert wrong not in [*orders.walk(1), *orders.walk(2)]
    assert orders.check() == []


@pytest.mark.parametrize("step", [1, 7, 100])
def test_a_log_stays_short(step: int) -> None:
    """RAM grows with every access."""
    orders = Orders(1)
    orders.move(range(1000), 1)
    for start in range(0, 20_000, step):
        orders.move([handle % 1000 for handle in range(start, start + step)], 1)
        assert len(orders._logs[1]) <= 2 * 1000 + orders_module.SLACK_ENTRIES
    assert orders.check() == []


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda orders: orders.lens.__setitem__(1, 7), "7 counted"),
        (lambda orders: orders._places.__setitem__(3, 0), "own is elsewhere"),
        (lambda orders: orders.where.__setitem__(3, 2), "own is elsewhere"),
        (lambda orders: orders._heads.__setitem__(1, 1), "3 marked"),
    ],
)
def test_check_sees_damage(damage, finding: str) -> None:
    """A broken order goes unnoticed until the wrong block leaves."""
    orders = Orders(2)
    orders.move([1, 2, 3], 1)
    damage(orders)
    assert finding in " ".join(orders.check())


def moves(rng: random.Random, blocks: int) -> list[tuple]:
    """Accesses of many handles each, of which some come twice, and the room for them."""
    accesses = rng.choices(list(Access), (4, 1, 4, 1), k=60)
    return [(access, [rng.randrange(3 * blocks) for _ in range(rng.randrange(1, blocks))]) for access in accesses]


@pytest.mark.parametrize("long_batch", [1, 10_000])
@pytest.mark.parametrize("make", [LRU, ARC])
@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_are_one_after_the_other(make, long_batch: int, seed: int) -> None:
    """What leaves would depend on how an engine cuts its requests into calls."""
    blocks, rng = 40, random.Random(seed)
    together, singly = make(blocks), make(blocks)
    for access, handles in moves(rng, blocks):
        with batches_from(long_batch):
            together.touch(handles, access, 4096)
        for handle in handles:
            singly.touch([handle], access, 4096)
        assert together.snapshot() == singly.snapshot()
        leaving = together.candidates(max(0, len(together) - blocks), {*handles[:3]})
        assert together.candidates(1) == together.candidates(2)[:1] or len(together) < 2
        if rng.random() < 0.3:
            for policy in (together, singly):
                policy.hint(handles[::4], Hint(ends=True))
            leaving = singly.candidates(len(singly) // 3)
        with batches_from(long_batch):
            together.evict(leaving)
        for handle in leaving:
            singly.evict([handle])
        assert together.snapshot() == singly.snapshot()
        assert sorted(together.forgotten()) == sorted(singly.forgotten())
        assert together.check() == []


@pytest.mark.parametrize("many", [2, 200])
@pytest.mark.parametrize("make", [LRU, ARC])
def test_nobody_leaves_twice(make, many: int) -> None:
    """The directory and the policy would part in silence."""
    policy = make(1000)
    policy.touch(range(many), Access.FILL)
    with pytest.raises(InvariantError):
        policy.evict([*range(1, many), 1])


@pytest.mark.parametrize("seed", range(3))
def test_long_calls_are_no_others_to_hit_density(seed: int) -> None:
    """What leaves would depend on whether numpy or a loop noted the uses; or victims come in another order than asked
    one by one."""
    blocks, rng = 10, random.Random(seed)
    by_numpy, by_loop, told = HitDensity(blocks), HitDensity(blocks), set[int]()
    for access, handles in moves(rng, 4 * blocks):
        with batches_from(1):
            by_numpy.touch(handles, access, 4096)
        by_loop.touch(handles, access, 4096)
        leaving = by_loop.candidates(max(0, len(by_loop) - blocks))
        assert leaving[:1] == by_loop.candidates(1)[: len(leaving)]
        with batches_from(1):
            by_numpy.evict(leaving)
        by_loop.evict(leaving)
        assert by_numpy.snapshot() == by_loop.snapshot()
        told |= {*(gone := by_numpy.forgotten())}
        assert gone == by_loop.forgotten()
        assert by_numpy.check() == by_loop.check() == []
    assert told


def test_victims_of_hit_density_come_in_the_order_of_their_worth() -> None:
    """A younger block of a class leaves before an older one of another that promises less."""
    policy = HitDensity(3000)
    for start in range(0, 6000, 50):
        policy.touch(range(start, start + 50), Access.FILL)
        policy.touch(range(max(0, start - 120), max(0, start - 80)), Access.REUSE)
        if len(policy) > 3000:
            policy.evict(policy.candidates(len(policy) - 3000))
    queues = {class_: list(policy._rings.walk(class_)) for class_ in policy._resident if policy._rings.lens[class_]}
    assert len(queues) > 2
    now, (_, times), expected = policy._now, policy._columns, []
    while len(expected) < 1500:
        fronts = [(policy._hazards.worth(c, now - times[q[0]]), times[q[0]], c) for c, q in queues.items() if q]
        expected.append(queues[min(fronts)[2]].pop(0))
    assert policy.candidates(1500) == expected
