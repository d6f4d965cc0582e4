"""Names whose time is over, found without a look at the others."""

import random

from kvtier.engine.expiries import Expiries


def test_whatever_is_set_and_dropped_the_right_ones_are_over():
    """A time that was changed or taken back ends something, or one that holds does not."""
    rng = random.Random(7)
    expiries, model = Expiries(), {}
    for now_s in range(3000):
        name, at_s = f"s{rng.randrange(40)}", now_s + rng.randrange(1000)
        if rng.random() < 0.8:
            expiries.set(name, at_s)
            model[name] = at_s
        else:
            expiries.drop(name)
            model.pop(name, None)
        if rng.random() < 0.05:
            assert expiries.next_s() == min(model.values(), default=None)
            over = sorted((at, name) for name, at in model.items() if at <= now_s)
            assert sorted((model.pop(name), name) for name in expiries.take_over(now_s)) == over
    assert set(expiries.take_over(1e9)) == set(model)
    assert expiries.take_over(1e9) == []
    assert expiries.next_s() is None


def test_who_says_it_again_and_again_takes_no_room():
    """A pin that is prolonged with every turn, for hours, leaves an entry each time."""
    expiries = Expiries()
    for turn in range(10_000):
        expiries.set(f"s{turn % 10}", 1e6 + turn)
        expiries.set("gone", 1e6)
        expiries.drop("gone")
    assert len(expiries._queue) < 200
