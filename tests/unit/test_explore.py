"""The explorer's command: what it prints, its exit codes, and that a seed means the same run every time."""

import pytest

from kvtier.cache.transitions import MOVES
from kvtier.engine import reservations
from kvtier.testing import explore
from kvtier.testing.exploring.coverage import CANCEL_POINTS, Coverage
from kvtier.testing.exploring.dict_disk import DictDisk
from kvtier.testing.exploring.run import explore as run_seed
from kvtier.testing.exploring.store import GlassDisk


def trace(seed, steps=60):
    lines = []
    result = run_seed(seed, steps, lines.append)
    assert not result.failure, result.failure
    return lines


def test_a_seed_is_the_same_run_every_time():
    """A failing seed cannot be replayed."""
    first = trace(7)
    trace(8)
    assert trace(7) == first
    assert trace(8) != first


def test_fewer_steps_are_the_beginning_of_more():
    """`--steps` shows something else than what failed."""
    short, long = trace(3, 20), trace(3, 40)
    told = short[: short.index("     wind up")]
    assert len(told) > 20
    assert long[: len(told)] == told


def test_the_outcome_does_not_depend_on_the_number_of_processes(capsys):
    """Two machines find different things under the same seeds."""
    printed = []
    for jobs in ("1", "2"):
        assert explore.main(["--seeds", "0:6", "--steps", "40", "--jobs", jobs]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "6 seeds passed" in printed[0]


def test_a_failing_seed_is_told_with_the_way_to_see_it(monkeypatch, capsys):
    """A bug is found and nobody can reproduce it. (The bug: what a reservation has is never given back.)"""
    monkeypatch.setattr(reservations.Reservations, "_forget", lambda self, record: None)
    assert explore.main(["--seeds", "0:20", "--steps", "60"]) == 1
    out = capsys.readouterr().out
    assert "failed" in out
    assert "python -m kvtier.testing.explore --seed" in out
    assert out.rstrip().endswith("--trace")


def test_the_trace_shows_each_operation(capsys):
    """What a seed did cannot be read."""
    assert explore.main(["--seed", "1", "--steps", "5", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 1: Setup(")
    assert [line[:4] for line in lines if line[:4].strip().isdigit() and line[:4].startswith("  ")] == [
        f"{n:4}" for n in range(1, 6)
    ]


@pytest.mark.parametrize("seeds", ["", "5:5", "a:b", "-3:2", "9:1"])
def test_a_range_without_seeds_is_a_mistake(seeds, capsys):
    """A check that looks at nothing passes."""
    with pytest.raises(SystemExit) as left:
        explore.main([f"--seeds={seeds}"])
    assert left.value.code == 2
    assert "seeds" in capsys.readouterr().err


def test_a_row_that_is_never_reached_fails_a_long_range(monkeypatch, capsys):
    """The table of moves has a row that nothing tests, and nobody hears of it."""
    monkeypatch.setattr(explore, "COVERING_SEEDS", 2)
    assert explore.main(["--seeds", "0:2", "--steps", "3"]) == 1
    assert "never reached: " in capsys.readouterr().out


def test_coverage_lists_both_tables():
    """A new move is not looked for."""
    coverage = Coverage()
    names = [name for name, _ in coverage.rows()]
    assert len(names) == len({*names}) >= len(MOVES) + len(CANCEL_POINTS)
    assert coverage.missed() == names
    with pytest.raises(KeyError):
        coverage.cancelled("somewhere else")


def test_a_disk_of_ones_own_takes_the_place_of_ours():
    """An author of a tier cannot explore it."""
    made = []

    class Opaque:
        """It can be opened, and not looked into."""

        def __init__(self, setup):
            self.open = DictDisk(setup.extents, setup.extent_pages).open

    def disk(setup):
        made.append(Opaque(setup))
        return made[-1]

    results = [run_seed(seed, 120, disk=disk) for seed in range(12)]
    assert not any(result.failure for result in results), [result.failure for result in results]
    assert made
    assert not isinstance(made[0], GlassDisk)
    assert any(result.coverage.counters["disk.demoted_blocks"] for result in results)


def test_a_cache_that_cannot_be_opened_fails_its_seed():
    """A disk whose opening raises ends the explorer with a traceback, and no seed is named."""

    class Shut:
        def open(self, namespaces):
            raise OSError("no such device")

    results = [run_seed(seed, 5, disk=lambda setup: Shut()) for seed in range(6)]
    failures = [result for result in results if result.failure]
    assert failures
    assert all("no such device" in result.failure and result.failed_at == 0 for result in failures)
