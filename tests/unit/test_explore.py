"""The explorer's command: what it prints, its exit codes, and that a seed means the same run every time."""

import pytest

from kvtier.cache import leases, residency
from kvtier.cache.transitions import MOVES
from kvtier.engine import demotion, flushes, reservations, resizing, settlement
from kvtier.testing import explore
from kvtier.testing.exploring.coverage import CANCEL_POINTS, Coverage
from kvtier.testing.exploring.dict_disk import DictDisk
from kvtier.testing.exploring.run import explore as run_seed
from kvtier.testing.exploring.store import GlassDisk

SEEN_WITHIN = 60  # seeds


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


WRONG = [
    *(
        ("--seeds", seeds)
        for seeds in ["", "5:5", "a:b", "-3:2", "9:1", ":", "1:", ":9", "0", "1:2:3", "1_0:20", "1.5:9"]
    ),
    *(
        ("--seeds", seeds)
        for seeds in ["0:99999999999999999999", "4294967295:4294967297", "0:1000001", "9" * 5000, "٣:٩"]
    ),
    *(("--seed", seed) for seed in ["", "x", "-1", "1.5", "4294967296", "9" * 5000, "0:5"]),
    *(("--jobs", jobs) for jobs in ["", "0", "-1", "x", "257", "9" * 5000]),
    *(("--steps", steps) for steps in ["", "-1", "x", "1000001"]),
]


@pytest.mark.parametrize(("option", "value"), WRONG, ids=[f"{option}={value[:12]}" for option, value in WRONG])
def test_what_cannot_be_run_is_a_mistake_of_usage(option, value, capsys):
    """A check that looks at nothing passes, a slip ends in a traceback, or one's machine is full of processes."""
    with pytest.raises(SystemExit) as left:
        explore.main([f"{option}={value}", *([] if option == "--steps" else ["--steps", "1"])])
    assert left.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    error = told.err.splitlines()[-1]
    assert f"argument {option}: " in error
    assert "_" not in error.replace("1_0", ""), "a name of the code is shown"
    assert len(error) < 250


def test_two_ways_to_say_which_seeds_are_too_many(capsys):
    """One of the two is ignored."""
    with pytest.raises(SystemExit) as left:
        explore.main(["--seeds", "0:5", "--seed", "7"])
    assert left.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_seeds_are_given_as_a_range_or_a_number_of_them(capsys):
    """The last seed is run as well, or the first is left out."""
    for seeds, passed in (("3:5", 2), ("3", 3), ("4294967295:4294967296", 1)):
        assert explore.main(["--seeds", seeds, "--steps", "1"]) == 0
        assert f"{passed} seeds passed" in capsys.readouterr().out
    assert explore.main(["--seed", "4294967295", "--steps", "0"]) == 0


def test_the_help_explains_every_option(capsys):
    """`--seeds FIRST:STOP`, and nobody says what that is."""
    with pytest.raises(SystemExit) as left:
        explore.main(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "100:300 for the seeds from 100 to 299, or 300 for those from 0" in text
    assert "(default: 0:200)" in text
    assert "exit codes: 0 all passed; 1 a seed failed" in text


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


def first_failure(seeds):
    """How the first of these seeds fails that does; empty if none does."""
    return next((result.failure for seed in seeds if (result := run_seed(seed)).failure), "")


def test_a_flush_that_leaves_room_unused_is_seen(monkeypatch):
    """A disk takes nothing new although old blocks could make room, and the explorer believes that it is full."""
    monkeypatch.setattr(demotion.Demotions, "_victims", lambda self, *args, **options: [])
    assert "a block of its size could make room" in first_failure(range(SEEN_WITHIN))


def test_a_flush_that_counts_what_it_has_saved_as_failed_is_seen(monkeypatch):
    """A flush cries wolf, and nobody looks."""
    tried = flushes.Flushes.tried

    def unsure(self, handle, key, *, lowest, done):
        if done and lowest and dict(self.owed()).get(handle) == key:
            self.settle(handle, failed=True)
        tried(self, handle, key, lowest=lowest, done=done)

    monkeypatch.setattr(flushes.Flushes, "tried", unsure)
    assert "is stored, and a flush counts it as failed" in first_failure(range(SEEN_WITHIN))


def test_a_prefix_that_is_cut_for_no_reason_is_seen(monkeypatch):
    """Half of what was loaded is computed once more, and the explorer takes that for a legal miss."""
    ready = settlement.Settlement._tokens_ready

    def half(self, record):
        return ready(self, record) // 16 * 8 if any(map(any, record.sources)) else ready(self, record)

    monkeypatch.setattr(settlement.Settlement, "_tokens_ready", half)
    assert "is cut for no reason" in first_failure(range(SEEN_WITHIN))


def test_a_prefix_that_is_not_found_by_its_reservation_is_seen(monkeypatch):
    """A block that a match has pinned is not asked for."""
    available = reservations.Reservations._available

    def without_the_last(self, match):
        hits, sources = available(self, match)
        return [row[:-1] for row in hits], [row[:-1] for row in sources]

    monkeypatch.setattr(reservations.Reservations, "_available", without_the_last)
    assert "tokens were there" in first_failure(range(SEEN_WITHIN))


def test_a_reservation_that_gives_up_early_is_seen(monkeypatch):
    """The deadline of a load is shorter than was asked for."""
    begin = reservations.Reservations.begin

    def hasty(self, ticket, match, blocks_total, deadline_s, now_s, **how):
        begin(self, ticket, match, blocks_total, now_s + (deadline_s - now_s) / 2, now_s, **how)

    monkeypatch.setattr(reservations.Reservations, "begin", hasty)
    assert "its time was cut" in first_failure(range(SEEN_WITHIN))


def test_a_load_that_drops_a_dirty_block_on_its_way_is_seen(monkeypatch):
    """A block that lies nowhere else makes room for one that lies on the disk, too."""
    take = residency.Residency.take

    def greedy(self, tier, count, *, drop_dirty, incoming=None):
        return take(self, tier, count, drop_dirty=True, incoming=incoming)

    monkeypatch.setattr(residency.Residency, "take", greedy)
    assert "dropped dirty blocks" in first_failure(range(SEEN_WITHIN))


def test_a_lease_that_was_given_back_and_still_shows_its_slots_is_seen(monkeypatch):
    """A caller writes where others read."""
    monkeypatch.setattr(leases.Lease, "slots", lambda self, group=0: tuple(self.record.slots[group]))
    assert "was given back is good for something" in first_failure(range(SEEN_WITHIN))


def test_a_resize_that_waits_for_a_lost_device_is_seen(monkeypatch):
    """Somebody waits for memory that is gone."""
    monkeypatch.setattr(resizing.Resizes, "give_up", lambda self, tier: [])
    assert "wait for slots of a lost device" in first_failure(range(SEEN_WITHIN))


def test_a_cache_that_cannot_be_opened_fails_its_seed():
    """A disk whose opening raises ends the explorer with a traceback, and no seed is named."""

    class Shut:
        def open(self, namespaces):
            raise OSError("no such device")

    results = [run_seed(seed, 5, disk=lambda setup: Shut()) for seed in range(6)]
    failures = [result for result in results if result.failure]
    assert failures
    assert all("no such device" in result.failure and result.failed_at == 0 for result in failures)
