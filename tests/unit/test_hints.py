"""Hints about sessions: what they do in each tier, and what they cannot do."""

import random

import pytest

import kvtier
from kvtier.cache import sessions
from kvtier.engine import arguments
from kvtier.errors import UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, store_key
from tests.cache_bench import config_for, finish
from tests.cache_bench import prompt as cache_prompt
from tests.engine_bench import make_engine, prompt, serve, tiers_of


def turn(engine, session, keys, before_release=None):
    """One request of a session, from lookup to release."""
    now_s = engine.clock.now()
    match = engine.core.match(keys, "test", None, now_s + 30, session)
    lease = engine.reserve(match, len(keys.groups[0]))
    ready = lease.tokens_ready // keys.block_tokens[0]
    engine.core.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True))[ready:])
    if before_release:
        before_release()
    engine.release(lease)
    return lease.tokens_ready


def say(engine, session, ends=False, returns_in_s=None, priority=None, pin=None, ttl_s=None):
    advice = arguments.advice(ends, returns_in_s, priority, pin, ttl_s)
    engine.core.hints.advise(session, advice, engine.clock.now())
    engine.check()


def found(engine, keys):
    """Blocks of a prefix that lie somewhere."""
    return engine.core.peek(keys).tokens // keys.block_tokens[0]


def counted(engine, name, tier=None):
    stats = engine.core.stats()
    return stats[name] if tier is None else stats["tiers"][tier][name]


def alone(gpu=8, policy="lru", **more):
    return make_engine(gpu=gpu, host=None, policies=(policy,), **more)


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


# ---------------------------------------------------------------- trust


def test_no_time_at_all_has_no_pace():
    """Two verbs within a clock's smallest step end the cache."""
    engine = alone()
    for now_s in (5e-324, 1e-300, 1e-12, 0.0):
        engine.core.hints.watch(now_s)
    engine.core.hints.watch(1.0)


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


# ---------------------------------------------------------------- ranks


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


# ---------------------------------------------------------------- through the public verbs


async def test_both_faces_take_hints():
    """The verb is there in one of the caches only, or marshals to nowhere; or the quota of the YAML does nothing."""
    config = config_for(None, host=None, limits={"pin_quota": "10%"})  # of 15 slots: one
    keys = cache_prompt(config, 1, 5)
    with kvtier.open_sync(config) as cache:
        finish(cache, cache.reserve(cache.match(keys, "test", session="s"), 5), keys)
        cache.hint("s", pin=True, ttl_s=60)
        cache.hint("s", priority=1)
        assert cache.stats()["tiers"]["gpu"]["pins_refused"] == 8
        cache.hint("s", ends=True)
        stats = cache.stats()
        assert (stats["hints"], stats["tiers"]["gpu"]["hinted_blocks"], stats["sessions"]) == (3, 5, 0)
        with pytest.raises(UsageError, match="session is 7"):
            cache.hint(7, ends=True)
    async with kvtier.open(config) as cache:
        finish(cache, await cache.reserve(cache.match(keys, "test", session="s"), 5), keys)
        cache.hint("s", ends=True)
        cache.hint("s", ends=True)
        cache.hint("another", returns_in_s=5)
        assert cache.stats()["unknown_sessions"] == 1
        assert cache.check() == []


# ---------------------------------------------------------------- bounds and mistakes


def test_the_sessions_are_bounded(monkeypatch):
    """A server that never says that a session ends fills the memory with their names."""
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 3)
    monkeypatch.setattr(sessions, "BLOCKS_MAX", 8)
    engine = alone(gpu=16)
    for number in range(6):
        turn(engine, f"s{number}", prompt(number, 2))
        say(engine, f"s{number}", pin=True)
        assert counted(engine, "sessions") <= 3
    assert counted(engine, "sessions_forgotten") == 3
    assert sum(map(len, engine.core.residency.ranks._claims.values())) == 6  # those of the three that are left
    turn(engine, "long", prompt(9, 7))
    assert counted(engine, "sessions") == 1
    for number in range(6):
        turn(engine, f"s{number}", prompt(number, 1))
        say(engine, f"s{number}", ends=True)
    assert len(engine.core.hints._sessions._ended) == 3
    engine.check()


def advised(**said):
    return arguments.advice(
        **{"ends": False, "returns_in_s": None, "priority": None, "pin": None, "ttl_s": None} | said
    )


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ({"pin": True}, 2),
        ({"pin": True, "priority": 0}, 2),
        ({"pin": True, "priority": 1, "ttl_s": 5.0}, 2),
        ({"pin": False}, 0),
        ({"pin": False, "priority": 0}, 0),
        ({"pin": False, "priority": 1, "ttl_s": 5.0}, 1),
        ({"pin": False, "priority": -1}, -1),
        ({"returns_in_s": 5.0, "priority": -1}, -1),
        ({"returns_in_s": 5.0}, None),
    ],
)
def test_what_two_words_mean_together_is_written_down(said, rank):
    """A pin is lost to a default of `priority`, or a priority to one of `pin`."""
    assert advised(**said).rank == rank


@pytest.mark.parametrize(
    "longest",
    ["s" * 256, "\u00e9" * 128, "\U0001f600" * 64, "\udc80" * 85 + "s", ""],
    ids=["ascii", "latin", "pictures", "surrogates", "empty"],
)
def test_a_name_is_bounded_in_bytes(longest):
    """Names of sessions that were never served fill the memory, or a name is refused that is short enough."""
    config = config_for(None, host=None)
    keys = cache_prompt(config, 1, 2)
    with kvtier.open_sync(config) as cache:
        cache.release(cache.match(keys, "test", session=longest))
        cache.hint(longest, pin=True)
        for verb in (
            lambda: cache.match(keys, "test", session=longest + "s" * 257),
            lambda: cache.hint("s" * 257, pin=True),
        ):
            with pytest.raises(UsageError, match="more than 256 bytes in UTF-8"):
                verb()
        if longest:
            with pytest.raises(UsageError, match="more than 256 bytes"):
                cache.match(keys, "test", session=longest + "s")
        stats = cache.stats()
        assert (stats["sessions"], stats["unknown_sessions"], stats["matches"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("arguments_", "message"),
    [
        ({}, "either ends=True"),
        ({"ttl_s": 5}, "either ends=True"),
        ({"ends": True, "pin": True}, "ends=True and pin=True contradict"),
        ({"ends": True, "pin": False}, "ends=True and pin=False contradict"),
        ({"ends": True, "priority": 0}, "ends=True and priority=0 contradict"),
        ({"ends": True, "returns_in_s": 3}, "ends=True and returns_in_s=3.0 contradict"),
        ({"ends": True, "ttl_s": 5}, "ends=True and ttl_s=5.0 contradict"),
        ({"pin": True, "priority": -1}, "priority=-1 and pin=True contradict"),
        ({"pin": False, "ttl_s": 5.0}, "pin=False and ttl_s=5.0 contradict"),
        ({"priority": 0, "ttl_s": 5.0}, "priority=0 and ttl_s=5.0 contradict"),
        ({"priority": 0, "pin": False, "ttl_s": 5.0}, "priority=0 and ttl_s=5.0 contradict"),
        ({"ends": 1}, "ends is 1; pass a bool"),
        ({"returns_in_s": -1.0}, "returns_in_s=-1.0"),
        ({"returns_in_s": float("nan")}, "returns_in_s=nan"),
        ({"priority": 2}, "priority=2: use 1 at most"),
        ({"priority": -2}, "priority=-2: use -1 or more"),
        ({"priority": True}, "priority is True"),
        ({"pin": "yes"}, "pin is 'yes'"),
        ({"returns_in_s": 1.0, "ttl_s": 5.0}, "ttl_s says how long"),
        ({"pin": True, "ttl_s": -5.0}, "ttl_s=-5.0"),
    ],
)
def test_a_mistake_is_told_by_its_name(arguments_, message):
    """A hint that cannot be is taken for another, or for a bug of ours."""
    with pytest.raises(UsageError, match=message):
        advised(**arguments_)
