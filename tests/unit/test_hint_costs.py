"""What a request costs while thousands of sessions are known: lines of Python that run, comparisons, and questions.

Counted, not timed: they are the same on any machine. Each test compares few sessions with many.
"""

import sys

import pytest

from kvtier.cache.ranks import Ranks
from kvtier.engine.hints import Advice
from kvtier.policies.base import Access
from kvtier.policies.lru import LRU
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import make_engine, prompt
from tests.hint_bench import turn

FEW, MANY = 40, 300  # few fill the tiers and the quota as well
TURNS = 12
MORE = 1.1  # so much more may it be: some turns send a batch down, some do not


class Steps:
    """Counts the lines that run while it is entered."""

    def __init__(self):
        self.lines = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *failure):
        sys.settrace(self._before)

    def _trace(self, frame, event, argument):
        self.lines += event == "line"
        return self._trace


class Rank(int):
    """A rank that counts how often it is compared with another."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Rank.compared += 1
        return int(self) == other

    def __lt__(self, other):
        Rank.compared += 1
        return int(self) < other

    def __gt__(self, other):
        Rank.compared += 1
        return int(self) > other


class Asked:
    """Nothing has to stay; counts how many it is asked about."""

    def __init__(self):
        self.questions = 0

    def __contains__(self, handle):
        self.questions += 1
        return False


def steps_of_a_turn(sessions, advice, blocks_each):
    """Lines and comparisons of some more turns, each with a plan, when so many sessions have the advice."""
    engine = make_engine(16, 32, DictTier(blocks_max=24))

    def served(number):
        turn(engine, f"s{number}", prompt(number if blocks_each else 0, 2))
        engine.core.hints.advise(f"s{number}", advice(), engine.clock.now())
        engine.clock.advance(1.0)
        engine.run()

    for number in range(sessions):
        served(number)
    Rank.compared = 0
    with Steps() as steps:
        for number in range(TURNS):
            served(number)
    engine.check()
    return steps.lines, Rank.compared


@pytest.mark.parametrize("blocks_each", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize(
    "advice",
    [
        lambda: Advice(rank=Rank(2), ttl_s=1000.0),
        lambda: Advice(rank=Rank(1)),
        lambda: Advice(rank=Rank(-1), ttl_s=1000.0),
        lambda: Advice(returns_in_s=10.0),
    ],
    ids=["pin", "priority", "batch", "returns"],
)
def test_a_turn_costs_the_same_with_any_number_of_sessions(advice, blocks_each):
    """Every lookup gets slower with each session that has a rank, until the server stands still."""
    (few_lines, few_compared), (many_lines, many_compared) = (
        steps_of_a_turn(sessions, advice, blocks_each) for sessions in (FEW, MANY)
    )
    assert few_lines > 100
    assert many_lines <= MORE * few_lines
    assert many_compared <= MORE * few_compared


def test_claims_on_one_key_take_the_room_of_one():
    """A system prompt that thousands of sessions rank keeps an entry for each of them, block by block."""
    engine = make_engine(8)
    ranks = engine.core.residency.ranks
    for _ in range(1000):
        ranks.claim(b"key", 1)
        ranks.claim(b"key", 2)
    assert sum(map(len, ranks._claims.values())) == 2
    for _ in range(1000):
        ranks.let_go(b"key", 2)
    assert ranks._claimed(b"key") == 1
    for _ in range(1000):
        ranks.let_go(b"key", 1)
    assert not any(ranks._claims.values())
    with pytest.raises(KeyError):
        ranks.let_go(b"key", 1)


@pytest.mark.parametrize("rank", [-1, 1, 2])
@pytest.mark.parametrize("verb", ["choose", "up_to"])
def test_who_leaves_is_found_without_a_look_at_all_that_are_ranked(rank, verb):
    """Each slot that is reclaimed costs a walk over all pins and all batch work of its tier."""
    questions = []
    for ranked in (10, 80):
        engine = make_engine(100, None)
        turn(engine, "s", prompt(1, 100))
        directory, policy = engine.core.residency.directory, LRU(100)
        policy.touch([*directory.ready_in(0)], Access.FILL)
        ranks = Ranks(directory, lambda handle, tier: 0, lambda tier: 100, lambda tier: None)
        for handle in policy.candidates(100)[-ranked:]:
            ranks.claim(directory.key(handle), rank)
        asked = Asked()
        arguments = {"total": 100} if verb == "choose" else {}
        assert len(getattr(ranks, verb)(policy, 0, 2, staying=asked, **arguments)) == 2
        questions.append(asked.questions)
    assert questions == [2, 2]


def test_nobody_is_chosen_twice():
    """A block that leaves before the policy is asked is what the policy says as well: too few slots are freed."""
    engine = make_engine(8, None)
    turn(engine, "s", prompt(1, 8))
    residency = engine.core.residency
    policy = residency.levels[0].policy
    first, second, third = policy.candidates(3)
    assert residency.ranks.choose(policy, 0, 2, (), 8, cheapest=[second]) == [second, first]
    residency.ranks.claim(residency.directory.key(third), -1)
    assert residency.ranks.choose(policy, 0, 3, (), 8, cheapest=[third, first]) == [third, first, second]
