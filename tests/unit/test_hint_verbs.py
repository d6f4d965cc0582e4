"""Hints through the public verbs: bounds, and mistakes that are told."""

import pytest

import kvtier
from kvtier.cache import sessions
from kvtier.engine import arguments
from kvtier.errors import UsageError
from tests.cache_bench import config_for, finish
from tests.cache_bench import prompt as cache_prompt
from tests.engine_bench import prompt
from tests.hint_bench import alone, counted, say, turn


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
