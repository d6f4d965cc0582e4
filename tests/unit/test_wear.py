"""What a store was written in its life: kept over restarts, told by `stats` and `kvtier inspect`."""

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvtier
from kvtier.cli.inspect.wear import pace_bytes_per_day, wear_of
from kvtier.cli.main import app
from kvtier.engine.wear import DAY_MS, DAYS_KEPT, charged, read_row
from kvtier.policies.wear import Written
from tests.cache_bench import config_for, prompt, serve

ROW = {"since_ms": 1000, "at_ms": 5000, "payload": 100, "slots": 200, "index": 50, "days": [[0, 150], [1, 100]]}
BUDGET = {"saved": -40, "per_day": 1000, "burst": 500}


def account(**changes: Any) -> dict[str, Any]:
    return read_row(cbor2.dumps(ROW | BUDGET | changes))


def test_a_row_is_read_as_it_was_written() -> None:
    """A restart begins with another account."""
    assert account() == ROW | BUDGET | {"days": {0: 150, 1: 100}}
    assert read_row(cbor2.dumps(ROW)) == ROW | {"days": {0: 150, 1: 100}}


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": -1},
        {"slots": "1"},
        {"index": None},
        {"since_ms": 1 << 62},
        {"days": 5},
        {"days": [[1]]},
        {"days": [5]},
        {"days": [[0, -1]]},
        {"days": [[[], 1]]},
        {"at_ms": True},
    ],
)
def test_a_row_that_cannot_be_is_none(changes: dict[str, Any]) -> None:
    """A damaged row makes a traceback, or an account that wears nothing."""
    assert account(**changes) == {}


@pytest.mark.parametrize("changes", [{"saved": "1"}, {"per_day": -1}, {"burst": None}])
def test_a_budget_that_cannot_be_leaves_the_account(changes: dict[str, Any]) -> None:
    """One bad number hides all that is known."""
    assert account(**changes) == ROW | {"days": {0: 150, 1: 100}}


@given(st.binary(max_size=40))
def test_no_bytes_are_too_bad(row: bytes) -> None:
    """A cache does not open because of a row that only tells what was."""
    assert isinstance(read_row(row), dict)


def run(folder: Path, budget: str | None, numbers: range) -> dict[str, Any]:
    """Serve and flush some prompts; the disk's stats."""
    config = config_for(folder, disk={"wear": budget})
    with kvtier.open_sync(config) as cache:
        for number in numbers:
            serve(cache, prompt(config, number, 3))
        cache.flush()
        stats: dict[str, Any] = cache.stats()["tiers"]["lmdb"]
    return stats


def inspected(folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    wear: dict[str, Any] = json.loads(done.stdout)["wear"]
    return wear


def test_two_processes_add_up(tmp_path: Path) -> None:
    """Wear of before the last restart is forgotten, or the budget full again after it."""
    first = run(tmp_path / "s", "1MB/day", range(4))
    told = inspected(tmp_path / "s")
    assert told["payload_bytes"] == first["written_bytes"] == 4 * 3 * 2048
    assert told["slot_bytes"] == 2 * told["payload_bytes"]
    assert told["budget"]["bytes_per_day"] == told["budget"]["burst_bytes"] == 10**6
    second = run(tmp_path / "s", "1MB/day", range(4, 6))
    both = inspected(tmp_path / "s")
    assert both["payload_bytes"] == first["written_bytes"] + second["written_bytes"]
    assert both["since_ms"] == told["since_ms"]
    assert sum(day["written_bytes"] for day in both["days"]) == both["slot_bytes"] + both["index_bytes"]
    assert both["amplification"] > 2
    # A day's second pays 12 bytes: what is left is what was there, less what was written. The index pages of a
    # process's last commits may be counted at the next one, so of them nothing is asked here.
    assert second["wear_left_bytes"] < first["wear_left_bytes"] - second["written_bytes"] + 12 * 60
    assert first["wear_left_bytes"] < 10**6 - 2 * first["written_bytes"]


def test_a_run_without_a_budget_does_not_refill_it(tmp_path: Path) -> None:
    """Whoever leaves `wear` out once has a full budget afterwards, or owes for years what nobody limited."""
    folder = tmp_path / "s"
    first = run(folder, "1MB/day", range(4))
    written = run(folder, None, range(4, 8))["written_bytes"]
    told = inspected(folder)
    assert (told["budget"], told["life_years"]) == (None, None), "it has none now"
    assert told["payload_bytes"] == first["written_bytes"] + written
    third = run(folder, "1MB/day", range(8, 9))
    spent = 2 * (written + third["written_bytes"])  # a page for half a page
    assert third["wear_left_bytes"] < first["wear_left_bytes"] - spent + 12 * 60
    assert third["wear_left_bytes"] > 0
    run(folder, "20KB/day", range(10, 11))
    assert inspected(folder)["budget"]["left_bytes"] < 0
    debt = inspected(folder)["budget"]["left_bytes"]
    run(folder, None, range(11, 15))
    run(folder, None, range(15, 16))
    fourth = run(folder, "20KB/day", range(0))
    assert debt <= fourth["wear_left_bytes"] <= debt + 60, "a debt stays, and becomes no larger"


def test_a_budget_that_was_used_up_makes_no_debt_while_there_is_none(tmp_path: Path) -> None:
    """A night without `wear` keeps the disk from being written for weeks."""
    folder = tmp_path / "s"
    assert run(folder, "300KB/day", range(2))["wear_left_bytes"] > 0
    run(folder, None, range(2, 40))
    assert -1 <= run(folder, "300KB/day", range(0))["wear_left_bytes"] <= 600


def test_what_others_write_is_charged() -> None:
    """A verb's writes are on no account, or its budget is spent twice, or a row that is damaged stops it."""
    half_day_ms = DAY_MS // 2
    row = read_row(charged(cbor2.dumps(ROW | BUDGET), Written(7, 10, 3), 5000 + half_day_ms))
    assert row["saved"] == min(500, -40 + 500) - 13
    assert (row["payload"], row["slots"], row["index"]) == (107, 210, 53)
    assert (row["since_ms"], row["at_ms"], row["days"]) == (1000, 5000 + half_day_ms, {0: 163, 1: 100})
    days = [[day, 1] for day in range(DAYS_KEPT)]
    later = read_row(charged(cbor2.dumps(ROW | {"days": days}), Written(1, 2, 3), 20 * DAY_MS))
    assert [*later["days"].items()] == [(day, 1) for day in range(1, DAYS_KEPT)] + [(20, 5)]
    assert "saved" not in later
    fresh = read_row(charged(b"?", Written(1, 2, 3), 9))
    assert fresh == {"since_ms": 9, "at_ms": 9, "payload": 1, "slots": 2, "index": 3, "days": {0: 5}}


def test_people_are_told_as_well(tmp_path: Path) -> None:
    """`kvtier inspect` says nothing of wear, or fails where there is no account yet."""
    run(tmp_path / "s", "1KB/day", range(2))
    out = CliRunner().invoke(app, ["inspect", str(tmp_path / "s")], env={"COLUMNS": "200"}).output
    assert "bytes for each byte of blocks" in out
    assert "budget of 1000 B a day" in out
    assert "more were written" in out
    assert "five years last" in out


def test_a_store_without_an_account_has_none(tmp_path: Path) -> None:
    """A store of an older version cannot be inspected."""
    assert wear_of(None, tmp_path, 0) is None
    assert wear_of({}, tmp_path, 0) is None


@pytest.mark.parametrize(
    ("days", "since_days", "now_days", "pace"),
    [
        ({0: 100}, 0.0, 0.5, 200),  # half a day
        ({0: 100}, 0.0, 0.001, 2400),  # an hour at least
        ({0: 100, 1: 300, 2: 100}, 0.0, 2.5, 200),
        ({0: 900, **dict.fromkeys(range(1, 9), 70)}, 0.0, 8.0, 80),  # the last seven, and the one that has begun
        ({0: 900}, 0.0, 20.0, 0),
    ],
)
def test_the_pace_is_that_of_the_latest_days(
    days: dict[int, int], since_days: float, now_days: float, pace: float
) -> None:
    """A life is projected from a busy week of long ago, or from one minute."""
    told = account(days=[*days.items()], since_ms=int(since_days * DAY_MS))
    assert pace_bytes_per_day(told, int(now_days * DAY_MS)) == pytest.approx(pace)


def test_a_life_is_that_of_the_budget_at_the_pace(tmp_path: Path) -> None:
    """A drive that is written at twice its budget is said to last its whole life."""
    told = account(days=[[0, 1000]], since_ms=0)
    found = wear_of(told, tmp_path, DAY_MS // 2)
    assert found is not None
    assert (found["written_bytes_per_day"], found["life_years"]) == (2000, 2.5)
    assert found["budget"]["left_bytes"] == -40 + (DAY_MS // 2 - 5000) * 1000 // DAY_MS
    assert found["amplification"] == 2.5
    later = wear_of(told, tmp_path, 9 * DAY_MS)
    assert later is not None
    assert (later["life_years"], later["budget"]["left_bytes"]) == (None, 500)


def test_as_many_days_are_kept_as_a_pace_needs() -> None:
    """A row that goes out with each batch grows with the age of the store."""
    assert [*account(days=[[day, 1] for day in range(30)])["days"]] == [*range(30 - DAYS_KEPT, 30)]
