"""Hints about sessions: whose blocks leave first in each tier, and who is believed."""

import pytest

from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import make_engine, prompt, serve
from tests.hint_bench import alone, counted, found, say, turn


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_has_ended_leaves_before_what_goes_on(policy):
    """A conversation that is over pushes out one whose user is still typing."""
    engine = alone(policy=policy)
    turn(engine, "old", prompt(1, 4))
    turn(engine, "over", prompt(2, 4))
    say(engine, "over", ends=True)
    serve(engine, prompt(3, 3))
    assert (found(engine, prompt(1, 4)), found(engine, prompt(2, 4))) == (4, 1)
    assert counted(engine, "hinted_blocks", "gpu") == 4
    engine.check()


def test_what_is_said_while_a_request_runs_holds_after_it():
    """Servers know that a conversation is over before they give its slots back; the release would undo the hint."""
    engine = alone()
    turn(engine, "old", prompt(1, 4))
    turn(engine, "over", prompt(2, 4), before_release=lambda: say(engine, "over", ends=True))
    serve(engine, prompt(3, 3))
    assert (found(engine, prompt(1, 4)), found(engine, prompt(2, 4))) == (4, 1)


def test_what_others_share_stays():
    """The end of one conversation takes away the system prompt of all others."""
    engine = alone(gpu=10)
    system, mine = prompt(1, 4).prefix(8), prompt(1, 4)
    turn(engine, "a", mine)
    turn(engine, "b", system)
    say(engine, "a", ends=True)
    assert counted(engine, "hinted_blocks", "gpu") == 2
    turn(engine, "b", system)
    say(engine, "b", ends=True)
    assert counted(engine, "hinted_blocks", "gpu") == 4


def test_a_handle_used_again_is_nobodys():
    """Blocks are taken for shared, and stay when their session ends, for another block had their handle before."""
    engine = alone(gpu=8)
    directory = engine.core.residency.directory
    for number, session in enumerate("ab"):
        keys = prompt(number, 4)
        turn(engine, session, keys)
        handles = [directory.find((0).to_bytes(4, "big") + key) for key in keys.groups[0]]
        assert sorted(handles) == [0, 1, 2, 3]
        assert not any(map(directory.is_shared, handles))
        engine.core.submit_drop()
        engine.run()


def test_the_policies_of_all_tiers_hear_of_it():
    """Blocks of a session that is over go on filling the disk."""
    engine = make_engine(6, 12, DictTier(blocks_max=16))
    turn(engine, "s", prompt(1, 4))
    engine.core.submit_flush()
    engine.run()
    say(engine, "s", ends=True)
    assert [counted(engine, "hinted_blocks", tier) for tier in ("gpu", "host", "lmdb")] == [4, 4, 4]
    lmdb = engine.core.residency.levels[2].policy
    serve(engine, prompt(2, 4))
    engine.core.submit_flush()
    engine.run()
    key = engine.core.residency.directory.key
    assert {key(handle)[4:] for handle in lmdb.candidates(4)} == {*prompt(1, 4).groups[0]}


def test_who_knows_no_hints_ignores_them():
    """A hint under a policy that has no use for it is an error, or nobody sees why it does nothing."""
    engine = make_engine(6, 12, policies=("fifo", "lru"))
    turn(engine, "s", prompt(1, 4))
    engine.core.hints.watch(1.0)
    say(engine, "s", returns_in_s=10.0)
    say(engine, "s", ends=True)
    assert counted(engine, "ignored_hints", "gpu") == 2
    say(engine, "nobody", ends=True)
    assert (counted(engine, "hints"), counted(engine, "unknown_sessions")) == (3, 1)


def test_a_time_comes_to_the_policy_in_its_own_unit():
    """A return in ten seconds is taken for one in ten accesses."""
    engine = alone(gpu=64, policy="hit_density")
    engine.core.hints.watch(1e-18)
    for _ in range(10):
        turn(engine, "s", prompt(1, 8))
        engine.clock.advance(1.0)
        engine.core.hints.watch(engine.clock.now())
    heard = []
    policy = engine.core.residency.levels[0].policy
    tell = policy.hint
    policy.hint = lambda handles, hint: heard.append(hint.returns_in) or tell(handles, hint)
    say(engine, "s", returns_in_s=100.0)
    pace = 8.0  # a second, in the first minute as well
    assert heard == [pytest.approx(100 * pace, rel=0.02)]
    turn(engine, "s", prompt(1, 8), before_release=lambda: say(engine, "s", returns_in_s=10.0))
    assert heard[1:] == [pytest.approx(10 * pace, abs=1)]  # said once, when the lease is given back
    turn(engine, "s", prompt(1, 8))
    assert len(heard) == 2  # it has returned


def test_no_time_at_all_has_no_pace():
    """Two verbs within a clock's smallest step end the cache."""
    engine = alone()
    for now_s in (5e-324, 1e-300, 1e-12, 0.0):
        engine.core.hints.watch(now_s)
    engine.core.hints.watch(1.0)


def test_a_return_is_said_of_nobody_elses_blocks():
    """A session that comes back in an hour sends the system prompt of all others away until then."""
    engine = alone(gpu=16, policy="hit_density")
    engine.core.hints.watch(1.0)
    turn(engine, "a", prompt(1, 4))
    turn(engine, "b", prompt(1, 4).prefix(8))
    engine.core.hints.watch(2.0)
    heard = []
    policy = engine.core.residency.levels[0].policy
    policy.hint = lambda handles, hint: heard.append((set(handles), hint.returns_in is not None)) or len(handles)
    find = engine.core.residency.directory.find
    shallow, deep = ({find((0).to_bytes(4, "big") + key) for key in part} for part in halves(prompt(1, 4)))
    say(engine, "a", returns_in_s=3600.0)
    say(engine, "b", returns_in_s=1.0)
    assert heard == [(deep, True)]
    turn(engine, "b", prompt(2, 1))  # another conversation: the shallow ones are a's alone
    heard.clear()
    say(engine, "a", returns_in_s=3600.0)
    assert heard == [(shallow | deep, True)]


def halves(keys):
    row = keys.groups[0]
    return row[: len(row) // 2], row[len(row) // 2 :]


def test_those_who_are_mostly_wrong_are_not_believed():
    """A server that says of every turn that it is the last keeps the cache from holding any conversation."""
    engine = alone(gpu=64)
    for _ in range(40):
        turn(engine, "liar", prompt(1, 2))
        say(engine, "liar", ends=True)
    assert counted(engine, "ends_wrong") == 39
    refused = counted(engine, "distrusted_hints")
    assert 0 < refused < 39
    turn(engine, "liar", prompt(1, 2))
    say(engine, "liar", ends=True)
    assert counted(engine, "distrusted_hints") == refused + 1


def test_those_who_are_mostly_right_are_believed():
    """One mistake, and no hint is of use any more."""
    engine = alone(gpu=64)
    for number in range(40):
        for _ in range(3):
            turn(engine, f"s{number}", prompt(number, 1))
        say(engine, f"s{number}", ends=True)
        if number % 10 == 9:
            turn(engine, f"s{number}", prompt(number, 1))
    assert (counted(engine, "ends_wrong"), counted(engine, "distrusted_hints")) == (4, 0)
