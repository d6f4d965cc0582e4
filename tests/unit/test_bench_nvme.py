"""`kvtier bench nvme` at tiny sizes: its names, its ratios the right way round, and slow paths that show in them."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import cmd_bench
from kvtier.cli.bench.nvme import churn, course, gets, lookups, process_io, puts, records, store_ring
from kvtier.cli.bench.nvme.goals import BY_NAME, GOALS, Goal
from kvtier.cli.bench.nvme.hollow import HollowFile
from kvtier.cli.bench.nvme.plan import MIB, Plan, Shape, quick
from kvtier.cli.bench.nvme.volume import Volume
from kvtier.cli.bench.report import OURS
from kvtier.cli.bench.timing import Timed, speed_ratio
from kvtier.errors import UsageError
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import Outcome, ReadItem, Status, WriteBatch
from tests.bench_disk import disk

__all__ = ["disk"]

NAMES = {
    "put_2m_vs_raw",
    "put_64k_vs_raw",
    "get_2m_vs_raw",
    "sparse_read_amplification",
    "verify_ratio",
    "churn_cpu_ratio",
    "put_2m_vs_files",
    "put_64k_vs_files",
    "put_360k_vs_files",
    "write_amplification",
    "lookup_ms_per_1000",
    "loop_lag_ms",
    "sparse_vs_inline",
    "four_in_flight_vs_one",
    "churn_throughput_ratio",
    "disk_vs_cap",
    "cpu_vs_entries",
    "host_warm_get",
    "host_warm_get_vs_memcpy",
}
TINY = replace(
    quick(Plan()),
    large=Shape(2 * MIB, 1),
    middle=Shape(360 * 1024, 2),
    small=Shape(65_536, 8),
    ring_bytes=6 * MIB,
    churn_bytes=16 * MIB,
    churn_turns=1,
    records=500,
    lookup_blocks=8,
    lag_blocks=2,
    image_bytes=MIB,
)


def timings(**seconds: tuple[float, float]) -> Callable[..., dict[str, Timed]]:
    """In place of a race: by contestant, its wall and CPU time. The contestants are made ready, and run once."""

    def interleave(contestants: Mapping[str, Any], rounds: int) -> dict[str, Timed]:
        for contestant in contestants.values():
            with contestant() as move:
                move()
        usual = (1.0, 1.0)
        return {name: Timed(*([second] for second in seconds.get(name.split(",")[0], usual))) for name in contestants}

    return interleave


def stand(disk: Path, undo: ExitStack, shape: Shape = TINY.small) -> puts.Stand:
    return puts.Stand(disk, TINY, shape, undo)


# ---------------------------------------------------------------- the whole run


def test_every_ratio_is_there_by_name(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that reads the ratios would miss one, or be given something that is no number."""
    monkeypatch.setattr(cmd_bench.nvme_plan, "quick", lambda plan: TINY)
    assert cmd_bench.nvme(disk, None, None, "batch", json_output=True, quick=True, in_place=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= NAMES
    assert report["goals"].keys() == NAMES == BY_NAME.keys()
    assert all(type(report[name]) is float and math.isfinite(report[name]) for name in NAMES)
    assert report.keys() - NAMES == {"goals", "bench", "command", "machine", "settings", "races", "costs", "notes"}
    rivals = {(race["what"], race["block_bytes"]): race["gbs"].keys() for race in report["races"]}
    for shape in (TINY.large, TINY.middle, TINY.small):
        assert rivals["put", shape.block_bytes] == {OURS, "raw, 1 thread", "files", "inline"}
    assert "show that the bench runs" in report["notes"][0]
    assert "given directory, as asked" in report["notes"][1]
    assert not list(disk.iterdir())


def test_people_are_told_what_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    """A miss would look like a success."""
    figures = {goal.name: goal.target for goal in GOALS} | {"put_64k_vs_raw": 0.59, "loop_lag_ms": 5.1}
    report = course.Report("nvme", {})
    course.Findings(report, figures).show(course.Console(width=120))
    lines = capsys.readouterr().out.splitlines()
    for goal in GOALS:
        (line,) = [line for line in lines if line.split()[:1] == [goal.name]]
        assert goal.bound in line
        assert line.split()[-1] == ("NO" if goal.name in ("put_64k_vs_raw", "loop_lag_ms") else "yes")


def test_a_goal_may_be_met_another_way() -> None:
    """A machine whose memcpy is slow would fail for its own limit."""
    goal, instead = BY_NAME["host_warm_get"], BY_NAME["host_warm_get_vs_memcpy"]
    assert goal.met({goal.name: 3.0, instead.name: 0.81})
    assert instead.met({goal.name: 4.1, instead.name: 0.5})
    assert not goal.met({goal.name: 3.0, instead.name: 0.79})
    assert not instead.met({goal.name: 3.0, instead.name: 0.79})
    assert Goal("a", "", 1.0, at_most=True).met({"a": 1.0})
    assert not Goal("a", "", 1.0, at_most=True).met({"a": 1.1})


# ---------------------------------------------------------------- ratios the right way round


def test_a_ratio_is_taken_round_by_round() -> None:
    """A slow minute that hits both would count for one of them."""
    ours, theirs = Timed([1.0, 10.0, 2.0], []), Timed([2.0, 20.0, 4.0], [])
    assert speed_ratio(ours, theirs) == 2.0
    assert speed_ratio(theirs, ours) == 0.5


def test_each_contestant_is_what_its_name_says(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, or the inline store, would be given the speed of something else."""
    moved: list[str] = []
    monkeypatch.setattr(puts, "interleave", timings())
    with ExitStack() as undo:
        contestants = stand(disk, undo)
        for name in ("store", "raw", "files", "inline"):
            named = partial(partial, moved.append, name)
            monkeypatch.setattr(getattr(contestants, name), "put", named)
        race = contestants.race(1)
    assert dict(zip(race.timed, moved, strict=True)) == {
        OURS: "store",
        puts.RAW: "raw",
        puts.FILES: "files",
        puts.INLINE: "inline",
    }


def test_gets_are_compared_with_what_they_say(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store would look quick, or four batches at once would be paid as one."""
    times = {OURS: (4.0, 0.0), gets.UNVERIFIED: (3.0, 0.0), "at once": (8.0, 0.0)}
    plan = replace(TINY, ring_bytes=16 * MIB)
    with ExitStack() as undo:
        contestants = puts.Stand(disk, plan, plan.large, undo)
        monkeypatch.setattr(gets, "interleave", timings(**times, raw=(2.0, 0.0)))
        race, figures = gets.whole_batches(disk, plan, contestants, undo)
    assert figures == {"get_2m_vs_raw": 0.5, "verify_ratio": 0.75, "four_in_flight_vs_one": 2.0}
    assert race.timed.keys() == {OURS, gets.UNVERIFIED, gets.RAW_DEEP, puts.RAW}


def test_four_batches_are_read_at_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would be called in flight together, or not four of them."""
    from threading import Barrier

    together = Barrier(4, timeout=60)
    read: list[int] = []
    inner = LmdbTier.read

    def meeting(tier: LmdbTier, items: Sequence[ReadItem]) -> list[Outcome]:
        together.wait()
        read.append(len(items))
        return inner(tier, items)

    with ExitStack() as undo:
        ring = stand(disk, undo).store
        move = ring.get_at_once(4)
        monkeypatch.setattr(LmdbTier, "read", meeting)
        move()
    assert read == [TINY.small.blocks] * 4


def test_churn_is_compared_with_a_store_filled_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that wears out would look as good as new."""
    monkeypatch.setattr(churn, "interleave", timings(**{OURS: (4.0, 3.0), churn.YOUNG: (1.0, 2.0)}))
    _, figures = churn.measure(disk, TINY)
    assert figures["churn_cpu_ratio"] == 1.5
    assert figures["churn_throughput_ratio"] == 0.25
    assert 0.3 < figures["disk_vs_cap"] <= 1.05


def test_many_records_are_compared_with_few(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that takes longer in a large store would not be noticed."""
    monkeypatch.setattr(records, "interleave", timings(**{OURS: (1.0, 6.0), records.FEW: (1.0, 2.0)}))
    _, figures = records.measure(Volume(disk, None, ""), disk, TINY)
    assert figures["cpu_vs_entries"] == 3.0
    assert 1.0 < figures["write_amplification"] < 1.8


def test_the_slower_lookup_counts(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Misses are quick, and would hide slow hits."""
    monkeypatch.setattr(lookups, "interleave", timings(hit=(0.004, 0.0), miss=(0.001, 0.0)))
    costs, figures = lookups.measure(disk, 8, 1, 1.0)
    assert figures == {"lookup_ms_per_1000": pytest.approx(500.0)}
    assert [cost.median for cost in costs] == [4.0, 1.0]


# ---------------------------------------------------------------- planted slow paths


def test_a_tier_that_reads_twice_shows(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that nobody wanted would be read unnoticed."""
    with ExitStack() as undo:
        contestants = stand(disk, undo)
        _, honest = gets.scattered(TINY, contestants)
        inner = LmdbTier.read

        def twice(tier: LmdbTier, items: Sequence[ReadItem]) -> list[Outcome]:
            inner(tier, items)
            return inner(tier, items)

        monkeypatch.setattr(LmdbTier, "read", twice)
        _, wasteful = gets.scattered(TINY, contestants)
    assert honest["sparse_read_amplification"] == pytest.approx(1.0, abs=0.05)
    assert wasteful["sparse_read_amplification"] == pytest.approx(2.0, abs=0.1)


def test_a_slab_that_writes_twice_shows(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive would wear out twice as fast."""
    inner = HollowFile.write

    def twice(file: HollowFile, buffers: Sequence[memoryview], offset: int) -> int:
        inner(file, buffers, offset)
        return inner(file, buffers, offset)

    monkeypatch.setattr(HollowFile, "write", twice)
    _, figures = records.measure(Volume(disk, None, ""), disk, TINY)
    assert 2.0 < figures["write_amplification"] < 2.8


def test_what_else_lies_in_the_folder_counts(disk: Path) -> None:
    """A store could keep its bytes beside its slab and be called small."""
    with ExitStack() as undo:
        store = churn.FullStore(disk / "store", TINY, store_ring.Buffers(TINY.small, undo), undo)
        before = store.disk_bytes()
        (disk / "store" / "index" / "more").write_bytes(os.urandom(MIB))
        assert store.disk_bytes() == before + MIB


def test_churn_takes_what_was_asked_and_stays_full(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with room to spare would not be churned."""
    written: list[int] = []
    inner = LmdbTier.write

    def counting(tier: LmdbTier, batch: WriteBatch) -> list[Outcome]:
        written.append(sum(item.length_bytes for item in batch.items))
        return inner(tier, batch)

    with ExitStack() as undo:
        store = churn.FullStore(disk / "store", TINY, store_ring.Buffers(TINY.small, undo), undo)
        monkeypatch.setattr(LmdbTier, "write", counting)
        store.churn(3 * TINY.churn_bytes)
        assert sum(written) >= 3 * TINY.churn_bytes
        assert len(set(written)) > 1
        assert store._tier.room(TINY.small.block_bytes) <= 3 * TINY.small.blocks


def test_a_failed_move_is_no_fast_one(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses everything would look like a very fast store."""

    def refusing(tier: LmdbTier, batch: WriteBatch) -> list[Outcome]:
        return [Outcome(Status.NO_ROOM, detail="none")] * (len(batch.items) + len(batch.evict))

    monkeypatch.setattr(LmdbTier, "write", refusing)
    with ExitStack() as undo, pytest.raises(OSError, match="the store did not move a block: no_room none"):
        stand(disk, undo)


def test_a_hollow_slab_takes_no_disk(disk: Path) -> None:
    """A store of a million blocks would need the disk for them."""
    file = HollowFile.open_hollow(disk / "slab")
    file.hollow = True
    file.allocate(0, 64 * MIB)
    assert file.write([memoryview(bytes(4096))] * 3, 0) == 3 * 4096
    assert file.length_bytes() == 64 * MIB
    assert file.disk_bytes() == 0
    file.hollow = False
    file.allocate(0, MIB)
    assert file.disk_bytes() >= MIB
    file.close()


def test_a_kernel_that_does_not_count_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure would be 0, and called excellent."""
    monkeypatch.setattr(process_io, "COUNTS", tmp_path / "io")
    with pytest.raises(UsageError, match="does not say read_bytes"):
        process_io.process_bytes("read_bytes")
    (tmp_path / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 8192\n")
    assert process_io.process_bytes("read_bytes") == 4096
    assert process_io.process_bytes("write_bytes") == 8192
