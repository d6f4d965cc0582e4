"""Ranks: what is pinned, what has a priority, within which quota and until when."""

import random

import pytest

from kvtier.cache import sessions
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, store_key
from tests.engine_bench import make_engine, prompt, serve, tiers_of
from tests.hint_bench import alone, counted, found, say, turn


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("wanted", [{"priority": 1}, {"pin": True}])
def test_what_somebody_wants_to_keep_never_leaves_first(order, wanted):
    """The priority of one session is refused, and another's word that its blocks may go makes them leave first."""
    engine = alone()
    turn(engine, "pinned", prompt(9, 2))
    say(engine, "pinned", pin=True)  # the quota is used up
    for session in order:
        turn(engine, session, prompt(1, 2))
        say(engine, session, **({"priority": -1} if session == "a" else wanted))
    turn(engine, "other", prompt(3, 2))
    turn(engine, "b", prompt(1, 2))
    serve(engine, prompt(4, 4))
    assert (found(engine, prompt(1, 2)), found(engine, prompt(3, 2))) == (2, 0)
    assert counted(engine, "pins_refused", "gpu") > 0
    say(engine, "b", ends=True)
    serve(engine, prompt(5, 1))
    assert found(engine, prompt(1, 2)) == 1  # what only the other has said holds again


def test_pinned_blocks_leave_last_in_every_tier():
    """A pinned system prompt is pushed out by traffic."""
    engine = make_engine(8, 16, DictTier(blocks_max=24))
    turn(engine, "s", prompt(1, 2))
    say(engine, "s", pin=True)
    for number in range(2, 40):
        serve(engine, prompt(number, 3))
        engine.run()
    engine.check()
    directory = engine.core.residency.directory
    handles = [directory.find((0).to_bytes(4, "big") + key) for key in prompt(1, 2).groups[0]]
    assert [directory.ready_among(handles, tier) for tier in range(2)] == [handles, handles]
    say(engine, "s", pin=False)
    for number in range(40, 60):
        serve(engine, prompt(number, 3))
        engine.run()
    assert found(engine, prompt(1, 2)) == 0


def test_a_pin_follows_a_block_that_comes_up():
    """What was pinned while it lay on disk is the first to leave the gpu."""
    engine = make_engine(8, 16, DictTier(blocks_max=64))
    turn(engine, "s", prompt(1, 2))
    for number in range(2, 12):
        serve(engine, prompt(number, 6))
        engine.run()
    assert tiers_of(engine, prompt(1, 2))["lmdb"] == 8
    say(engine, "s", pin=True)
    turn(engine, "s", prompt(1, 2))
    engine.run()
    for number in range(12, 30):
        serve(engine, prompt(number, 2))
        engine.run()
    assert tiers_of(engine, prompt(1, 2))["gpu"] == 8
    engine.check()


def test_pins_end_at_the_quota_and_are_counted():
    """Whoever pins everything starves all others."""
    engine = alone(gpu=16)  # a quarter: four blocks
    turn(engine, "s", prompt(1, 8))
    say(engine, "s", pin=True)
    assert engine.core.residency.ranks.kept(0) == 4
    assert counted(engine, "pins_refused", "gpu") == 4
    for number in range(2, 10):
        serve(engine, prompt(number, 8))
    assert found(engine, prompt(1, 8)) == 4  # the shallow ones: deep ones alone would be of no use


def test_a_tier_that_shrinks_keeps_no_more_than_its_quota():
    """Pins of a large tier fill most of what is left of it, and starve everybody else."""
    engine = alone(gpu=4, gpu_max=16)
    for slots in (16, 8):
        engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)
        engine.run()
        if slots == 16:
            turn(engine, "early", prompt(1, 2))
            turn(engine, "late", prompt(2, 2))
            say(engine, "early", pin=True)
            say(engine, "late", pin=True)
    ranks, directory = engine.core.residency.ranks, engine.core.residency.directory
    early = [directory.find(store_key(0, key)) for key in prompt(1, 2).groups[0]]
    assert [handle for handle in directory.ready_in(0) if ranks.keeps(handle, 0)] == early
    assert counted(engine, "pins_refused", "gpu") == 2
    assert engine.core.check() == []


def test_no_pin_makes_a_request_fail():
    """A lease is refused for want of slots that a hint keeps idle."""
    engine = alone(gpu=8)
    turn(engine, "s", prompt(1, 2))
    say(engine, "s", pin=True)
    serve(engine, prompt(2, 8))
    assert found(engine, prompt(1, 2)) == 0
    engine.check()
    serve(engine, prompt(3, 2))
    turn(engine, "s", prompt(1, 2))  # it is pinned again where it lies now
    serve(engine, prompt(4, 6))
    assert found(engine, prompt(1, 2)) == 2


def test_priorities_leave_before_and_after_the_others():
    """Batch work pushes out conversations."""
    engine = alone(gpu=12)
    turn(engine, "vip", prompt(1, 3))
    say(engine, "vip", priority=1)
    turn(engine, "plain", prompt(2, 4))
    turn(engine, "batch", prompt(3, 4))
    say(engine, "batch", priority=-1)
    serve(engine, prompt(4, 4))
    assert [found(engine, prompt(n, 4)) for n in (1, 2, 3)] == [3, 4, 1]
    serve(engine, prompt(5, 4))
    assert [found(engine, prompt(n, 4)) for n in (1, 2, 3)] == [3, 1, 0]
    engine.check()


@pytest.mark.parametrize("by", ["ttl", "ends", "word"])
def test_a_pin_ends(by):
    """What was pinned once stays for ever."""
    engine = alone(gpu=8)
    turn(engine, "s", prompt(1, 2))
    say(engine, "s", pin=True, ttl_s=10.0)
    serve(engine, prompt(2, 6))
    engine.clock.advance(9.0)
    serve(engine, prompt(3, 6))
    assert found(engine, prompt(1, 2)) == 2
    if by == "ttl":
        engine.clock.advance(1.0)
    elif by == "ends":
        say(engine, "s", ends=True)
    else:
        say(engine, "s", priority=0)
    serve(engine, prompt(4, 6))
    assert found(engine, prompt(1, 2)) == 0


def test_ranks_hold_on_disk():
    """A pinned session is erased from the disk, or batch work stays there until the last."""
    disk = DictTier(blocks_max=16)
    engine = make_engine(8, 16, disk)
    for number in range(1, 5):
        serve(engine, prompt(number, 2))
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(8, 16, disk)  # all of them lie on disk only
    key, ranks = fresh.core.residency.directory.key, fresh.core.residency.ranks
    demotions = fresh.core.planner.demotions
    first, *_, last = (key(h) for h in demotions._victims(2, 8, PAGE_BYTES, incoming=0))
    ranks.claim(first, 2)
    ranks.claim(last, -1)
    victims = [key(h) for h in demotions._victims(2, 4, PAGE_BYTES, incoming=0)]
    assert victims[0] == last
    assert first not in victims
    [handle] = [h for h in range(8) if key(h) == first]
    others = {h for h in range(8) if h != handle}
    assert ranks.up_to(fresh.core.residency.levels[2].policy, 2, 3, others) == [handle]
    fresh.check()


@pytest.mark.parametrize(
    ("number", "said", "stays"),
    [(1, {}, False), (1, {"pin": True}, True), (3, {}, True), (3, {"priority": -1}, False)],
)
def test_ranks_hold_in_memory_with_nothing_below(number, said, stays):
    """What the gpu sends down pushes pinned blocks out of the last memory, and leaves batch work there."""
    engine = make_engine(4, 8)
    for other in range(1, 4):
        turn(engine, f"s{other}", prompt(other, 2))
        engine.run()
    if said:
        say(engine, f"s{number}", **said)
    for other in range(4, 7):
        serve(engine, prompt(other, 2))
        engine.run()
    directory = engine.core.residency.directory
    keys = [(0).to_bytes(4, "big") + key for key in prompt(number, 2).groups[0]]
    left = [key for key in keys if (h := directory.find(key)) is not None and directory.is_ready(h, 1)]
    assert left == (keys if stays else [])
    engine.check()


def test_the_highest_claim_counts():
    """Who asks for less takes away what another was promised."""
    engine = alone(gpu=8)
    for session, said in (("a", {"pin": True}), ("b", {"priority": -1})):
        turn(engine, session, prompt(1, 2))
        say(engine, session, **said)
    assert engine.core.residency.ranks.kept(0) == 2


def test_a_pin_outlasts_a_priority():
    """What was promised first holds longest, whatever it was."""
    engine = alone(gpu=8)
    for session, said in (("b", {"priority": 1}), ("a", {"pin": True})):
        turn(engine, session, prompt(ord(session), 1))
        say(engine, session, **said)
    serve(engine, prompt(3, 7))
    assert (found(engine, prompt(ord("a"), 1)), found(engine, prompt(ord("b"), 1))) == (1, 0)


def test_a_pin_of_what_has_a_priority_needs_no_more_room():
    """At the quota nobody can pin what another keeps anyway."""
    engine = alone(gpu=8)
    for session, said in (("a", {"priority": 1}), ("b", {"pin": True})):
        turn(engine, session, prompt(1, 2))
        say(engine, session, **said)
    assert (engine.core.residency.ranks.kept(0), counted(engine, "pins_refused", "gpu")) == (2, 0)


def test_the_latest_word_on_how_long_holds():
    """A pin ends when an earlier one would have."""
    engine = alone(gpu=8)
    turn(engine, "s", prompt(1, 2))
    for ttl_s in (5.0, 2.0, None):
        say(engine, "s", pin=True, ttl_s=ttl_s)
    engine.clock.advance(10.0)
    engine.plan()
    assert engine.core.residency.ranks.kept(0) == 2


def test_a_time_goes_with_a_session_that_is_forgotten(monkeypatch):
    """The end of a pin comes to a session that nobody knows any more."""
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 2)
    engine = alone(gpu=8)
    for session in "abac":
        turn(engine, session, prompt(ord(session), 1))
        say(engine, session, pin=True, ttl_s=5.0)
    say(engine, "a", pin=False)
    assert counted(engine, "unknown_sessions") == 0  # b was quiet for longest
    engine.clock.advance(10.0)
    engine.plan()
    assert engine.core.residency.ranks.kept(0) == 0
    engine.check()


def test_two_who_pin_one_block_both_have_to_let_go():
    """The end of one session unpins what another has pinned, too."""
    engine = alone(gpu=8)
    for session in ("a", "b"):
        turn(engine, session, prompt(1, 2))
        say(engine, session, pin=True)
    say(engine, "a", ends=True)
    serve(engine, prompt(2, 6))
    serve(engine, prompt(3, 6))
    assert found(engine, prompt(1, 2)) == 2
    say(engine, "b", ends=True)
    assert engine.core.residency.ranks.kept(0) == 0


def test_a_reset_forgets_what_was_pinned():
    """A dropped block is counted as pinned, or the new one of its handle is."""
    engine = alone(gpu=8)
    turn(engine, "s", prompt(1, 2))
    say(engine, "s", pin=True)
    engine.core.submit_drop()
    engine.run()
    engine.check()
    assert engine.core.residency.ranks.kept(0) == 0
    for number in (2, 3):
        serve(engine, prompt(number, 8))
    engine.check()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_said_everything_adds_up(seed):
    """Ranks, holds and orders part under some sequence of turns, hints, drops and restarts of the weights."""
    rng = random.Random(seed)
    policy = rng.choice(["lru", "arc", "hit_density", "fifo"])
    engine = make_engine(8, 12, DictTier(blocks_max=20), policies=(policy,) * 3)
    core = engine.core
    for _ in range(60):
        session, kind = f"s{rng.randrange(6)}", rng.random()
        if kind < 0.5:
            before = rng.choice([None, lambda name=session: say(engine, name, ends=True)])
            turn(engine, session, prompt(rng.randrange(6), rng.randint(1, 4)), before)
        elif kind < 0.9:
            said = [{"ends": True}, {"returns_in_s": 3.0}, {"pin": True, "ttl_s": 2.0}, {"pin": True}, {"pin": False}]
            said += [{"priority": n} for n in (-1, 0, 1)]
            say(engine, session, **rng.choice(said))
        elif kind < 0.95:
            core.submit_flush()
        else:
            core.submit_drop()
        for _ in range(rng.randrange(4)):
            engine.plan()
            if engine.held:
                engine.finish(engine.held[0])
        engine.clock.advance(rng.random())
        engine.check()
        assert all(core.residency.ranks.kept(t) <= core.residency.levels[t].blocks_max // 4 for t in range(3))
    engine.run()
    engine.check()
