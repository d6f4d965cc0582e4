"""Policies of other packages in the simulator: what one of them does wrong is told, and no figures are made of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import UsageError
from kvtier.policies.base import Access
from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from kvtier.sim import jobs
from kvtier.sim.flat import simulate
from kvtier.sim.guarded import Guarded, policy_of
from kvtier.sim.hints import Hints
from kvtier.sim.report import TieredJob
from kvtier.sim.trace import Trace
from tests.unit.test_sim_tiers import LMDB, config_of, conversations, gpu, host, setup_of

HERE = "tests.unit.test_sim_guarded"


class Good(LRU):
    """As ours."""


class Without(FIFO):
    """Uses no hints."""


class Raises(LRU):
    def touch(self, *arguments: Any, **named: Any) -> None:
        raise RuntimeError("boom\nat length")


class Ends(LRU):
    def evict(self, *arguments: Any, **named: Any) -> None:
        raise SystemExit(3)


class Nobody(LRU):
    def candidates(self, *arguments: Any, **named: Any) -> list[int]:
        return []


class Strangers(LRU):
    def candidates(self, count: int, *arguments: Any, **named: Any) -> list[int]:
        return [10**9 + each for each in range(count)]


class BeforeTheFirst(LRU):
    def candidates(self, count: int, *arguments: Any, **named: Any) -> list[int]:
        return [-1 - each for each in range(count)]


class Twice(LRU):
    def candidates(self, count: int, *arguments: Any, **named: Any) -> list[int]:
        return [*super().candidates(1, *arguments, **named)] * max(2, count)


class Lists(LRU):
    def candidates(self, count: int, *arguments: Any, **named: Any) -> Any:
        return [[1]] * count


class Silent(LRU):
    def candidates(self, *arguments: Any, **named: Any) -> Any:
        return None


class Pinned(LRU):
    def candidates(self, count: int, pinned: Any = (), *arguments: Any, **named: Any) -> list[int]:
        return super().candidates(count, (), *arguments, **named)


class Keeps(LRU):
    def evict(self, handles: Any, incoming: int | None = None) -> None:
        pass


class Forgets(LRU):
    def forgotten(self) -> list[int]:
        return [7]


class Unmakeable(LRU):
    def __init__(self, blocks: int) -> None:
        raise ValueError(f"not {blocks}")


class Small(LRU):
    def __init__(self, blocks: int) -> None:
        if blocks < 10:
            raise ValueError("too small")
        super().__init__(blocks)


class Nothing:
    def __init__(self, blocks: int) -> None:
        pass


WRONG = {
    Raises: "its `touch` raised RuntimeError: boom at length",
    Ends: "its `evict` raised SystemExit: 3",
    Nobody: "its `candidates` named [] where 1 of 4 have to leave",
    Strangers: "not all of whom are there",
    BeforeTheFirst: "not all of whom are there",
    Twice: "where 1 of 4 have to leave",
    Lists: "not all of whom are there",
    Silent: "answered None, and no list",
    Keeps: "with 4 residents where there are 3",
    Forgets: "answered [7], and no list of those who left",
    Small: "cannot be made for 4 blocks: ValueError: too small",
}


@pytest.fixture
def trace() -> Trace:
    return conversations(3, 60, 0.2)


def named(kind: type) -> str:
    return f"{HERE}:{kind.__name__}"


@pytest.mark.parametrize("order", ["flat", "request"])
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_a_policy_does_wrong_is_told(trace: Trace, kind: type, order: str) -> None:
    """Blocks that left are found for ever, 90 % of them in a tier of four blocks; or there is a traceback."""
    with pytest.raises(UsageError) as error:
        simulate(trace, named(kind), 4, order)
    assert named(kind) in str(error.value)
    assert WRONG[kind] in str(error.value)


TIERED = [kind for kind in WRONG if kind not in (Nobody, Small)]  # with tiers, nobody may be free to leave


@pytest.mark.parametrize("kind", TIERED, ids=lambda kind: kind.__name__)
def test_with_tiers_too(trace: Trace, kind: type) -> None:
    """As above, and the product's own code goes on with what cannot be."""
    with pytest.raises(UsageError, match=kind.__name__):
        TieredJob(setup_of(config_of(gpu(16), host(16), LMDB), policy=named(kind))).run(trace)


def test_who_is_held_stays(trace: Trace) -> None:
    """A policy that does not heed pins seems to work, for a request loses its blocks without noticing."""
    with pytest.raises(UsageError, match="not all of whom are there and may leave"):
        TieredJob(setup_of(config_of(gpu(16), host(16), LMDB), policy=named(Pinned))).run(trace)


@pytest.mark.parametrize(("kind", "ours"), [(Good, "lru"), (Without, "fifo")])
def test_a_good_one_is_as_good_as_ours(trace: Trace, kind: type, ours: str) -> None:
    """Who is watched finds something else, or hears of no hints."""
    for hints in (None, Hints("ends")):
        for order in ("flat", "request"):
            assert simulate(trace, named(kind), 9, order, hints) == simulate(trace, ours, 9, order, hints)
        found = [
            TieredJob(setup_of(config_of(gpu(16), host(16), LMDB), policy=policy, hints=hints)).run(trace).record()
            for policy in (named(kind), ours)
        ]
        assert found[0] | {"policy": ours} == found[1]


def test_ours_are_not_watched() -> None:
    """Every simulation takes half as long again."""
    assert type(policy_of("lru", 5)) is LRU
    assert isinstance(policy_of(named(Good), 5), Guarded)


def test_a_watched_policy_answers_for_itself() -> None:
    """What the watch passes on is something else than it was asked for."""
    policy = policy_of(named(Good), 4)
    policy.touch([1, 2, 3], Access.FILL, 4096)
    assert (len(policy), policy.check(), policy.remembers(2), policy.remembers(9)) == (3, [], True, False)
    policy.resize(2)
    policy.evict(policy.candidates(1, pinned={1}))
    policy.forget([3])
    assert (len(policy), policy.ghosts(), policy.candidates(2)) == (1, [], [])
    own = LRU(2)
    own.touch([1], Access.FILL, 4096)
    assert policy.snapshot() == own.snapshot()
    with pytest.raises(UsageError, match="begins with empty tiers"):
        policy.restore(own.snapshot())


# ---------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace, and modules that cannot be imported."""
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.syspath_prepend(tmp_path)
    lines = [{"t": n, "in": 2048, "ids": [n % 7, 100 + n, 200 + n, 300 + n]} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "misspelt_policy.py").write_text("def (")
    (tmp_path / "dividing_policy.py").write_text("1 / 0")
    (tmp_path / "leaving_policy.py").write_text("raise SystemExit(5)")
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("json:loads", "cannot be made"),
        ("builtins:list", "cannot be made"),
        (named(Nothing), "is no policy: it has no __len__, touch, candidates"),
        (named(Unmakeable), "ValueError: not 1000"),
        (named(Small), "ValueError: too small"),
        (named(Raises), "boom"),
        ("misspelt_policy:P", "SyntaxError"),
        ("dividing_policy:P", "ZeroDivisionError: division by zero"),
        ("leaving_policy:P", "SystemExit: 5"),
    ],
)
def test_the_command_tells_what_is_wrong(files: Path, policy: str, says: str) -> None:
    """Somebody who tries his own policy reads our traceback."""
    arguments = ["simulate", str(files / "t.jsonl"), "--policy", f"lru,{policy}", "--capacity", "4", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.exception
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "error" in json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("policy", ["json:loads", "nowhere.at_all:Policy"])
def test_a_files_own_policy_is_told_too(files: Path, policy: str) -> None:
    """As above, where the policy stands in the YAML."""
    model = "{name: m, weights_epoch: x, layers: 2, kv_heads: 2, head_dim: 16, dtype: float32, block_tokens: 16}"
    (files / "t.yaml").write_text(f"model: {model}\ntiers:\n  - {{type: gpu, capacity: 4MiB, policy: '{policy}'}}\n")
    result = CliRunner().invoke(app, ["simulate", str(files / "t.jsonl"), "--tiers", str(files / "t.yaml")])
    assert result.exit_code == 2, result.exception
    assert policy in result.stderr
    assert sys.modules.get("nowhere") is None
