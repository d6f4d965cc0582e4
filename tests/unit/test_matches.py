"""Matches that nobody gives back: they end in time, and those whose time has not come cost nothing."""

import random

from kvtier.cache.leases import Match
from tests.engine_bench import make_engine, prompt, serve

LIVE = 10_000


class Watched(dict):
    """A dict that counts what is looked at one by one."""

    def __init__(self, content):
        super().__init__(content)
        self.seen = 0

    def __getitem__(self, key):
        self.seen += 1
        return super().__getitem__(key)

    def _each(self, each):
        for one in each:
            self.seen += 1
            yield one

    def __iter__(self):
        return self._each(super().__iter__())

    def values(self):
        return self._each(super().values())

    def items(self):
        return self._each(super().items())


def test_live_matches_are_not_looked_at(monkeypatch):
    """Every plan of an engine with ten thousand clients walks all their matches, twice."""
    engine = make_engine()
    keys = prompt(1, 1)
    for number in range(LIVE):
        engine.match(keys, ttl_s=100.0 + number % 7)
    matches = engine.core._matches
    matches.held = watched = Watched(matches.held)
    asked = []
    slot = Match.expires_at_s
    monkeypatch.setattr(Match, "expires_at_s", property(lambda match: asked.append(match) or slot.__get__(match)))
    for _ in range(3):
        engine.core.plan(engine.clock.now())
        assert engine.core.wake_at_s(engine.clock.now()) == 100.0
    assert watched.seen + len(asked) < 20
    engine.clock.advance(100.0)
    engine.core.plan(engine.clock.now())
    assert len(matches) == LIVE - len(range(0, LIVE, 7))


def test_each_ends_in_time_whatever_became_of_it_before():
    """A match pins its blocks for good; or one that was looked up anew is given back before its time."""
    engine, rng = make_engine(gpu=32, host=None), random.Random(3)
    keys = prompt(1, 2)
    serve(engine, keys)
    core, live = engine.core, {}
    for _ in range(400):
        now_s = engine.clock.now()
        if live and rng.random() < 0.4:
            number = rng.choice(list(live))
            if rng.random() < 0.5:
                core.release_match(live.pop(number))
            else:
                core._look_again(live[number])
        else:
            match = engine.match(keys, ttl_s=rng.choice([0.5, 2.0, 2.0, 9.0]))
            live[match.match_id] = match
        engine.clock.advance(rng.choice([0.0, 0.0, 0.25]))
        now_s = engine.clock.now()
        core.plan(now_s)
        live = {number: match for number, match in live.items() if match.expires_at_s > now_s}
        assert core._matches.held == live
        assert core._matches.next_expiry_s() == min((match.expires_at_s for match in live.values()), default=None)
    assert core.stats()["matches_expired"] > 50
    engine.check()


def test_those_that_end_together_are_given_back_as_they_were_made():
    """Whose blocks leave first would depend on how long the matches were to last."""
    engine = make_engine(gpu=8, host=None)
    prompts = [prompt(number, 2) for number in range(3)]
    for keys in prompts:
        serve(engine, keys)
    ttls = (3.0, 2.0, 1.0)
    for keys, ttl_s in zip(prompts, ttls, strict=True):
        engine.match(keys, ttl_s=ttl_s)
    ended = []
    release = engine.core._matches.release
    engine.core._matches.release = lambda match: ended.append(match.keys) or release(match)
    engine.clock.advance(5.0)
    engine.core.plan(engine.clock.now())
    assert ended == prompts
