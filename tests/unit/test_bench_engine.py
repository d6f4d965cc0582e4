"""`kvtier bench engine`: the disk that it asks for, what it shows meanwhile, and what a signal leaves."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.cli.bench import engine, folder, opening, progress, world
from kvtier.cli.bench.progress import Step, silent
from tests.bench_disk import clean_disk, disk

__all__ = ["clean_disk", "disk"]

FEW = engine.Sizes(8, 3000, engine.KEYS_MIN, 2, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def used_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*"))


def test_it_asks_for_the_disk_that_it_takes(clean_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four gigabytes are written, and a disk with fourteen free is refused; or it is filled; or nobody sees how far."""
    used: dict[str, int] = {}

    @contextmanager
    def watched(path: Path) -> Iterator[Path]:
        with folder.emptied(path):
            yield path
            used[path.name] = used_bytes(path.parent)

    monkeypatch.setattr(engine, "emptied", watched)
    missing: dict[str, int] = {}

    def begin(what: str, steps: int) -> Step:
        missing[what] = steps

        def step() -> None:
            missing[what] -= 1

        return step

    engine.measure(clean_disk, FEW, begin)
    assert len(missing) == 7, "people see what is done"
    assert not any(missing.values()), "a bar stands still before the end, or runs beyond it"
    assert used.keys() == {"verbs", "opening", "moves"}
    assert max(used.values()) <= engine.disk_bytes(FEW)
    assert used["opening"] >= 0.3 * opening.disk_bytes(FEW.store_blocks), "what it begins with included"
    million = engine.Sizes(store_blocks=1_000_000)
    assert engine.disk_bytes(million) < 1.3 * 1_000_000 * world.SMALL_BYTES


def test_a_signal_leaves_nothing(clean_disk: Path) -> None:
    """A polite kill leaves a folder of gigabytes."""

    def killed(what: str, steps: int) -> object:
        if what.startswith("opening"):
            os.kill(os.getpid(), signal.SIGTERM)
        return silent(what, steps)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        engine.measure(clean_disk, FEW, killed)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_people_see_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems to hang for minutes; or a log, and what a program reads, is full of bars."""
    monkeypatch.setenv("TERM", "xterm")
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.shown() as begin:
            for what in ("one part", "another part"):
                step = begin(what, 2)
                step()
                step()
        told = stream.getvalue()
        assert bool(told) is shown
        for piece in ("one part", "another part", "50 %", "100 %"):
            assert (piece in told) is shown
