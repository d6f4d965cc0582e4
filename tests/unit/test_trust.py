"""Trust in those who say that sessions end: what its counts mean, whatever is said and when."""

import random

import pytest

from kvtier.cache import sessions
from kvtier.policies import trust
from kvtier.policies.trust import Trust
from tests.engine_bench import prompt
from tests.hint_bench import alone, counted, say, turn


@pytest.fixture
def short(monkeypatch):
    """Old turns fade so soon that a test of a hundred sees it."""
    monkeypatch.setattr(trust, "_TURNS_MAX", 40.0)


def swept(heard, sessions_):
    """So many sessions are served once, and all are said to have ended afterwards, in the same order."""
    for mark in [heard.turned() for _ in range(sessions_)]:
        heard.ended(mark)


def lied(heard, times):
    """After each turn of a session that goes on its end is said."""
    for _ in range(times):
        heard.ended(heard.turned())
        heard.returned(ended=True)


@pytest.mark.parametrize("nights", [1, 10])
def test_a_liar_after_many_true_ends_is_found_out(nights):
    """Ends said late take turns away that had faded before: a count below zero believes anybody for ever."""
    heard = Trust()
    for _ in range(nights):
        swept(heard, 4000)
    assert heard.believes
    lied(heard, 2000)
    assert not heard.believes
    for _ in range(20_000):
        heard.turned()
        lied(heard, 1)
    assert not heard.believes


def test_a_sweep_of_a_live_cache_leaves_a_liar_nothing(short):
    """A server that says at night that all sessions have ended may say false ends by day."""
    engine = alone(gpu=8)
    for number in range(100):
        turn(engine, f"s{number}", prompt(1, 1))
    for number in range(100):
        say(engine, f"s{number}", ends=True)
    assert counted(engine, "distrusted_hints") == 0
    for _ in range(100):
        turn(engine, "liar", prompt(1, 1))
        say(engine, "liar", ends=True)
    assert counted(engine, "distrusted_hints") > 60


def test_a_storm_of_returns_is_no_licence_to_lie():
    """More returns than turns that still count: then who is always wrong is half as often wrong as that."""
    heard = Trust()
    for _ in range(10_000):
        heard.turned()
    for _ in range(10_000):
        heard.returned(ended=False)
    lied(heard, 1000)
    assert not heard.believes


def test_who_was_right_all_along_needs_no_new_proof():
    """What is known before anything was seen fades away, and chance decides who is believed."""
    heard = Trust()
    for _ in range(30):
        swept(heard, 3000)
    for _ in range(100):
        heard.ended(heard.turned())
    for _ in range(5):
        heard.returned(ended=True)
    for _ in range(3):
        heard.turned()
    assert heard.believes


def test_who_was_wrong_long_ago_may_be_believed_again():
    """Returns never fade: a server that was mended has to be restarted."""
    heard = Trust()
    lied(heard, 1500)
    assert not heard.believes
    for _ in range(3):
        swept(heard, 3000)
    assert heard.believes


@pytest.mark.parametrize("seed", range(5))
def test_no_count_is_below_nothing(seed, short):
    """A turn is taken away with more than is left of it, or not at all."""
    rng = random.Random(seed)
    heard, waiting, weights = Trust(), {}, {}
    for number in range(3000):
        before = heard._turns[False]
        if rng.random() < 0.6 or not waiting:
            waiting[number], weights[number] = heard.turned(), 1.0
            if heard._turns[False] < before:
                weights = {turn_: weight / 2 for turn_, weight in weights.items()}
        else:
            gone = rng.choice([*waiting])
            heard.ended(waiting.pop(gone))
            weights.pop(gone)
        assert heard._turns[False] == pytest.approx(sum(weights.values()), abs=1e-6)
        assert min(heard._turns.values()) >= 0.0
    for mark in waiting.values():
        heard.ended(mark)
    assert heard._turns[False] == pytest.approx(0.0, abs=1e-6)


def test_a_session_forgotten_while_it_is_served_counts_once(monkeypatch):
    """A turn that was never counted is taken away, or its return counted."""
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 1)
    engine = alone(gpu=16)
    heard = engine.core.hints._trust

    def another():
        turn(engine, "other", prompt(2, 1))

    turn(engine, "s", prompt(1, 1), before_release=another)
    assert heard._turns == {False: 2.0, True: 0.0}
    say(engine, "s", ends=True)
    assert heard._turns == {False: 1.0, True: 1.0}
    turn(engine, "s", prompt(1, 1), before_release=another)
    turn(engine, "s", prompt(1, 1))
    assert heard._turns == {False: 4.0, True: 1.0}
    assert heard._returns == {False: 1.0, True: 1.0}


def test_two_leases_of_one_turn_count_once():
    """A request that is split into two counts as two turns, of which one has no return."""
    engine = alone(gpu=16)
    heard = engine.core.hints._trust
    turn(engine, "s", prompt(1, 1), before_release=lambda: turn(engine, "s", prompt(2, 1)))
    assert (heard._turns[False], heard._returns[False]) == (1.0, 0.0)
    say(engine, "s", ends=True)
    assert heard._turns == {False: 0.0, True: 1.0}


def test_an_end_said_while_a_request_is_served_takes_no_turn_away():
    """Servers that say it early push the count of the other turns down."""
    engine = alone(gpu=16)
    heard = engine.core.hints._trust
    turn(engine, "other", prompt(2, 1))
    turn(engine, "s", prompt(1, 1), before_release=lambda: say(engine, "s", ends=True))
    assert heard._turns == {False: 1.0, True: 1.0}
