"""Hints in the simulator's tiers: who says what and when, what becomes of it, and hints that were recorded."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvtier.engine.hints import Advice
from kvtier.errors import TraceError
from kvtier.policies import POLICIES
from kvtier.policies.base import Hint
from kvtier.sim.flat import simulate
from kvtier.sim.hints import Hints, sessions_of
from kvtier.sim.reading import read_trace
from kvtier.sim.replay import Replay
from kvtier.sim.report import TieredJob, report_of
from kvtier.sim.telling import Telling
from kvtier.sim.tier_model import Speed
from kvtier.sim.trace import Trace, TracedHint, TracedRequest
from tests.unit.test_sim_tiers import EAGER, LMDB, TOKENS, config_of, gpu, host, setup_of

ENDS, RETURNS = Hints("ends"), Hints("returns")


def request(at_s: float, first: int, blocks: int, session: str | None = None) -> TracedRequest:
    return TracedRequest(at_s, blocks * TOKENS + 1, 0, range(first, first + blocks), session)


def trace_of(*requests: TracedRequest, hints: tuple[TracedHint, ...] = ()) -> Trace:
    return Trace("t", TOKENS, None, requests, hints)


def talks(seed: int, count: int, every_s: float = 1.0) -> Trace:
    """Conversations of which most end with their first turn; the others return after a while."""
    rng = random.Random(seed)
    due: list[tuple[float, int, int]] = []
    requests, fresh = [], 0
    for turn in range(count):
        waiting = sorted(at for at in due if at[0] <= turn)
        if waiting:
            due.remove(waiting[0])
            _, first, blocks = waiting[0]
        else:
            first, blocks = fresh, 6
            fresh += 20
        requests.append(request(every_s * turn, first, blocks))
        if rng.random() < 0.35 and blocks < 18:
            due.append((turn + rng.uniform(4, 16), first, blocks + 2))
    return trace_of(*requests)


def told(trace: Trace, hints: Hints, *times_s: float) -> list[tuple[str, Advice]]:
    """What is said when the requests have been served at these times."""
    said: list[tuple[str, Advice]] = []
    telling = Telling(trace, lambda session, advice, now_s: said.append((session, advice)), hints)
    for number, now_s in enumerate(times_s):
        telling.begun(number, now_s)
        telling.served(number, now_s)
    return said


# ---------------------------------------------------------------- made up


def test_an_end_is_said_once_its_session_is_over() -> None:
    """A conversation is called ended that goes on, or the end of another one is said."""
    trace = trace_of(request(0, 0, 2), request(1, 10, 2), request(2, 0, 3))
    assert told(trace, ENDS, 0.5, 1.5, 2.5) == [("session 1", Advice(ends=True)), ("session 0", Advice(ends=True))]
    telling = Telling(trace, lambda *said: None, ENDS)
    assert [telling.session(number) for number in range(3)] == ["session 0", "session 1", "session 0"]


def test_a_return_is_said_in_seconds_from_now() -> None:
    """Requests that waited say that they return as much later; or the noise of times has no effect."""
    trace = trace_of(request(0, 0, 2), request(30, 0, 3), request(31, 0, 4))
    first, second, last = told(trace, RETURNS, 10.0, 40.0, 50.0)
    assert first == ("session 0", Advice(returns_in_s=20.0))
    assert second == ("session 0", Advice(returns_in_s=0.0))  # its next turn waits already
    assert last == ("session 0", Advice(ends=True))
    (_, noisy), *_ = told(trace, Hints("returns", noise=2.0), 10.0, 40.0, 50.0)
    assert noisy.returns_in_s not in (None, 20.0)
    (_, huge), *_ = told(trace, Hints("returns", noise=200.0), 10.0)
    assert huge.returns_in_s is not None
    assert 0 <= huge.returns_in_s <= 1e9


def test_recorded_sessions_are_taken() -> None:
    """Sessions are guessed from blocks where it is known whose they are."""
    names = ("a", "b", "a", None, None)
    requests = [request(n, 0, 2, name) for n, name in enumerate(names)]
    assert sessions_of(trace_of(*requests)) == [0, 1, 0, 3, 4]
    assert sessions_of(trace_of(*[request(n, 0, 2) for n in range(3)])) == [0, 0, 0]


@pytest.mark.parametrize(
    ("policy", "hints"), [("lru", ENDS), ("arc", ENDS), ("hit_density", RETURNS)], ids=["lru", "arc", "hit_density"]
)
def test_hints_reach_the_policies_of_all_tiers(policy: str, hints: Hints) -> None:
    """Hints are made up and never reach the product's `hint`, or only the fastest tier hears of them."""
    trace, setup = talks(1, 120), setup_of(config_of(gpu(24), host(48, **EAGER), LMDB), policy=policy)
    replay = Replay(trace, replace(setup, hints=hints))
    replay.run()
    assert replay.core.check() == []
    stats, report = replay.core.stats(), report_of(trace, replay)
    assert report.hints == (len({*sessions_of(trace)}) if hints is ENDS else len(trace.requests))
    assert (report.ends_wrong, report.distrusted_hints, stats["unknown_sessions"]) == (0, 0, 0)
    assert all(tier["hinted_blocks"] > 0 for tier in stats["tiers"].values())


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_ends_make_room_for_those_who_return(policy: str) -> None:
    """Hints come to the tiers at a time when they are of no use, or the end of another session is said."""
    trace, setup = talks(1, 150), setup_of(config_of(gpu(24), host(48)), policy=policy)
    plain, hinted = (TieredJob(each).run(trace) for each in (setup, replace(setup, hints=ENDS)))
    assert (plain.hints, plain.ends_wrong) == (0, 0)
    assert hinted.prefix_tokens > 1.05 * plain.prefix_tokens


def test_wrong_hints_are_counted_and_distrusted() -> None:
    """A simulation believes those whom the product does not."""
    trace, setup = talks(2, 150), setup_of(config_of(gpu(24), host(48)))
    found = {wrong: TieredJob(replace(setup, hints=Hints("ends", wrong=wrong))).run(trace) for wrong in (0.1, 1.0)}
    assert 0 < found[0.1].ends_wrong < 0.2 * found[0.1].hints
    assert found[0.1].distrusted_hints == 0
    assert found[1.0].distrusted_hints > 0.25 * found[1.0].hints > 10


def test_no_hints_change_nothing() -> None:
    """A session that is named, and of which nothing is said, is kept otherwise than one that is not."""
    trace, setup = talks(3, 80), setup_of(config_of(gpu(24), host(48)))
    silent = replace(setup, hints=Hints("returns", coverage=0.0))
    assert replace(TieredJob(silent).run(trace), hinted=None) == TieredJob(setup).run(trace)


def scaled(trace: Trace, factor: float) -> Trace:
    return replace(trace, requests=[each._replace(at_s=factor * each.at_s) for each in trace.requests])


@pytest.mark.parametrize("hints", [None, ENDS, RETURNS], ids=["none", "ends", "returns"])
def test_one_tier_knows_no_times(hints: Hints | None) -> None:
    """What a policy finds depends on the pace of the traffic that it was tuned on."""
    trace = talks(1, 100)
    for policy in POLICIES:
        found = [simulate(scaled(trace, factor), policy, 40, "request", hints) for factor in (0.1, 1.0, 10.0)]
        assert found == 3 * [found[1]], policy


def at_pace(trace: Trace, factor: float, hints: Hints | None) -> tuple[int, list[int]]:
    """Tokens found by a machine that is as much slower as the traffic; in how many accesses returns were expected."""
    speeds = dict.fromkeys(("gpu", "host"), Speed(1e6 / factor, 1e6 / factor, 0.001 * factor))
    setup = setup_of(config_of(gpu(24), host(48)), policy="hit_density", prefill_tokens_per_s=1000 / factor)
    replay = Replay(scaled(trace, factor), replace(setup, speeds=speeds, hints=hints))
    heard: list[int] = []
    policy: Any = replay.core.residency.levels[0].policy
    tell = policy.hint

    def hearing(handles: Any, hint: Hint) -> int:
        heard.extend([] if hint.returns_in is None else [hint.returns_in])
        return int(tell(handles, hint))

    policy.hint = hearing
    return replay.run().tokens.total(), heard


@pytest.mark.parametrize("hints", [None, ENDS, RETURNS], ids=["none", "ends", "returns"])
def test_a_faster_machine_finds_the_same_of_faster_traffic(hints: Hints | None) -> None:
    """The product counts in seconds somewhere: what was found at one pace is not what is found at another.

    Except of a return, which is said in seconds: the pace of the last minute tells how many accesses these are.
    """
    (found, heard), *others = (at_pace(talks(1, 100), factor, hints) for factor in (1.0, 0.1, 10.0))
    assert found > 0
    assert [tokens for tokens, _ in others] == 2 * [pytest.approx(found, rel=0.02 if hints is RETURNS else 0.0)]
    assert bool(heard) == (hints is RETURNS)
    for _, accesses in others:
        ratios = [one / other for one, other in zip(accesses, heard, strict=True) if other]
        assert not ratios or 0.7 < median(ratios) < 1.4


# ---------------------------------------------------------------- recorded


def test_a_recorded_hint_waits_for_its_request() -> None:
    """A hint comes before the request that it is about, and is lost, where the simulated engine is slower."""
    said: list[tuple[str, float]] = []
    hints = (
        TracedHint(1.0, "b", 1, ends=True),
        TracedHint(2.0, "a", 0, pin=True, ttl_s=9.0),
        TracedHint(3.0, "c", None),
    )
    trace = trace_of(request(0, 0, 2, "a"), request(0.5, 10, 2, "b"), hints=hints)
    telling = Telling(trace, lambda session, advice, now_s: said.append((session, now_s)))
    assert telling.recorded == hints
    telling.begun(0, 0.0)
    for hint in hints:
        telling.due(hint, hint.at_s)
    assert said == [("a", 2.0), ("c", 3.0)]
    telling.begun(1, 7.0)
    telling.begun(1, 8.0)
    assert said[2:] == [("b", 7.0)]


@pytest.mark.parametrize("prefill", [1000.0, 20.0])
def test_recorded_hints_are_replayed(prefill: float) -> None:
    """A recording of a product that had hints is simulated as if it had none; or they come at another time."""
    requests = [request(0, 0, 4, "old"), request(1, 10, 4, "over"), request(2, 20, 4, "new"), request(500, 0, 4, "old")]
    trace = trace_of(*requests, hints=(TracedHint(1.5, "over", 1, ends=True),))
    setup = setup_of(config_of(gpu(12)), prefill_tokens_per_s=prefill)
    with_hints = TieredJob(setup).run(trace)
    assert (with_hints.hints, with_hints.prefix_tokens) == (1, 16)  # who is over made room for the new
    without = TieredJob(replace(setup, recorded_hints=False)).run(trace)
    assert (without.hints, without.prefix_tokens < 16) == (0, True)
    replaced = TieredJob(replace(setup, hints=ENDS)).run(trace)
    assert replaced.hints == 3


def test_a_hint_about_a_request_that_did_without_is_said() -> None:
    """A hint waits for ever for a request that never gets slots."""
    trace = trace_of(request(0, 0, 100, "large"), hints=(TracedHint(1.0, "large", 0, ends=True),))
    assert TieredJob(setup_of(config_of(gpu(16)))).run(trace).hints == 1


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


HEADER = {"kvtier_trace": 1, "block_tokens": 4}
LINE = {"t": 1.0, "in": 5, "out": 0, "ids": [1], "session": "s"}
FIRST = {"t": 0.5, "session": "s", "hint": {"priority": -1}}


def test_sessions_are_named_as_a_cache_takes_it(tmp_path: Path) -> None:
    """A trace is simulated whose sessions no cache would take."""
    for line in (LINE, FIRST):
        long, longer = ({"session": "\u00e9" * 128 + more} for more in ("", "x"))
        read_trace(written(tmp_path / "t.jsonl", HEADER, line | long, LINE | long))
        with pytest.raises(TraceError, match="256 bytes") as error:
            read_trace(written(tmp_path / "t.jsonl", HEADER, LINE | long, line | longer))
        assert error.value.line == 3


def test_hints_are_read(tmp_path: Path) -> None:
    """A hint is taken for a request, or for one about another turn of its session."""
    hints = [
        {"t": 1.5, "session": "s", "hint": {"returns_in_s": 3.5, "pin": True, "ttl_s": 2}},
        {"t": 2.5, "session": "s", "hint": {"ends": True}},
    ]
    lines = [FIRST, LINE, hints[0], LINE | {"t": 2.0, "session": None}, LINE | {"t": 2.2}, hints[1]]
    trace = read_trace(written(tmp_path / "t.jsonl", HEADER, *lines))
    assert [each.session for each in trace.requests] == ["s", None, "s"]
    assert [*trace.hints] == [
        TracedHint(0.5, "s", None, priority=-1),
        TracedHint(1.5, "s", 0, returns_in_s=3.5, pin=True, ttl_s=2),
        TracedHint(2.5, "s", 2, ends=True),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"hint": {"ends": True, "pin": True}},
        {"hint": {"end": True}},
        {"hint": {"priority": 7}},
        {"hint": {"returns_in_s": "soon"}},
        {"hint": {"follows": 1}},
        {"hint": {}},
        {"hint": 5},
        {"session": 5},
        {"session": None},
        {"t": -1},
    ],
    ids=str,
)
def test_a_hint_that_cannot_be_is_told(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A broken recording ends in a traceback, or is simulated as something else."""
    path = written(tmp_path / "t.jsonl", HEADER, LINE, FIRST | changes)
    with pytest.raises(TraceError, match=r"t.jsonl, line 3: "):
        read_trace(path)
    with pytest.raises(TraceError, match=r"line 2: 'session' is 5"):
        read_trace(written(tmp_path / "u.jsonl", HEADER, LINE | {"session": 5}))
